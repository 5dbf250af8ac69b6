"""The history file: each run once, whoever else writes and whoever is killed while writing."""

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from parbench.bench.results.runs import load_run
from parbench.reports.history import database
from parbench.reports.history.database import History, open_history
from parbench.reports.history.runs import add_folders, find_run
from tests.support.refusals import usage_error
from tests.support.reports.compare_fixtures import make_repetitions
from tests.support.reports.history_fixtures import DailyRuns, add_run, write_history_run
from tests.support.reports.reports_fixtures import collective_case


def list_ids(history: History, branch: str | None = None) -> list[str]:
    return [line.id for line in history.list_runs(branch)]


def test_add_updates_a_grown_run(no_runs: DailyRuns, tmp_path: Path) -> None:
    history = no_runs.history
    short = make_repetitions(count=2)
    outcome = add_run(history, tmp_path / "a", 1, records=short, branch="topic", commit="abc")
    assert outcome == "added"
    no_runs.annotate("run-001", "*")
    long = make_repetitions(count=4)
    assert add_run(history, tmp_path / "b", 1, records=long) == "updated"
    [run] = history.list_runs()
    assert (run.branch, run.commit) == ("topic", "abc")
    assert len(history.list_annotations()) == 1
    path = tmp_path / "b" / "run-001"
    assert find_run("run-001", no_runs.file).records == load_run(path).records
    path.rename(tmp_path / "renamed")
    assert str(path) in usage_error(find_run, "run-001", no_runs.file)


def test_prune_keeps_newest_runs_and_annotations(no_runs: DailyRuns) -> None:
    history = no_runs.history
    no_runs.add(1, environment={"host": {"cpu_model": "old"}})
    no_runs.add(3)
    no_runs.add(2, branch="topic")
    no_runs.add(1, preset="smoke")
    no_runs.annotate("run-001", "*")
    no_runs.annotate("run-002", "*")
    assert sorted(history.prune(2)) == ["run-000", "run-001"]
    assert list_ids(history) == ["run-002", "run-003", "run-004", "run-005", "run-006"]
    assert [note.run_id for note in history.list_annotations()] == ["run-002"]
    models = {series.environment["host.cpu_model"] for series in history.list_series()}
    assert models == {"Example CPU"}  # Series without points are deleted.


def test_two_writers_add_each_run_once(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    for i in range(6):
        write_history_run(tmp_path / "runs", i)

    def add_runs(_: int) -> list[str]:
        changes = add_folders(file, [tmp_path / "runs"], branch="main", commit="")
        return [change for _, change in changes]

    with ThreadPoolExecutor(2) as writers:
        first, second = writers.map(add_runs, range(2))
    assert Counter(first + second) == {"added": 6, "updated": 6}
    with open_history(file) as history:
        assert list_ids(history) == [f"run-00{i}" for i in range(6)]


# Kills itself when the last rows of the second run are written.
WRITE_HALF_A_RUN = """
import os, signal, sqlite3, sys
from pathlib import Path
connect = sqlite3.connect
num_points = 0
def trace(statement):
    global num_points
    num_points += statement.startswith("INSERT INTO point")
    if num_points == 100:
        os.kill(os.getpid(), signal.SIGKILL)
def connect_with_trace(*args, **options):
    connection = connect(*args, **options)
    connection.execute("PRAGMA cache_size = 1")  # pages go to the file before the commit
    connection.set_trace_callback(trace)
    return connection
sqlite3.connect = connect_with_trace
from parbench.reports.history.runs import add_folders
list(add_folders(Path(sys.argv[1]), [Path(sys.argv[2])], branch="main", commit=""))
"""


def test_sigkill_in_a_transaction_leaves_a_readable_history(
    no_runs: DailyRuns, tmp_path: Path
) -> None:
    no_runs.add(1)
    content = no_runs.file.read_bytes()
    records = []
    for i in range(120):
        records += make_repetitions(collective_case(f"operation{i}"), count=1, n=1)
    path = write_history_run(tmp_path, 1, records=records)
    command = [sys.executable, "-c", WRITE_HALF_A_RUN, str(no_runs.file), str(path)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert no_runs.file.read_bytes() != content  # half of the run is in the file
    with open_history(no_runs.file) as history:
        assert list_ids(history) == ["run-000"]
        assert len(history.list_series()) == 2
    [(_, outcome)] = add_folders(no_runs.file, [path], branch="main", commit="")
    assert outcome == "added"


def test_add_gives_up_waiting_for_a_writer(
    no_runs: DailyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_SECONDS", 0.05)
    path = write_history_run(tmp_path, 1)
    with closing(sqlite3.connect(no_runs.file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        changes = add_folders(no_runs.file, [path], branch="main", commit="")
        assert "locked" in usage_error(list, changes)


def test_history_with_analyze_and_a_user_index_opens(runs: DailyRuns) -> None:
    with closing(sqlite3.connect(runs.file)) as connection:
        connection.execute("ANALYZE")
        connection.execute("CREATE INDEX my_index ON point (seconds)")
        connection.commit()
    with open_history(runs.file) as history:
        assert len(history.list_runs()) == 12
