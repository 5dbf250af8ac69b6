"""The history file: each run once, whoever else writes and whoever is killed while writing."""

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from parbench.bench.results.runs import load_run
from parbench.reports.history import database
from parbench.reports.history.database import History, RunEntry, open_history
from parbench.reports.history.runs import add_folders, read_entry
from tests.support.refusals import usage_error
from tests.support.reports.compare_fixtures import make_repetitions
from tests.support.reports.history_fixtures import DailyRuns, make_entry, write_history_run
from tests.support.reports.reports_fixtures import collective_case


@pytest.fixture
def history(no_runs: DailyRuns) -> History:
    return no_runs.history


@pytest.fixture
def entry(tmp_path: Path) -> RunEntry:
    return make_entry(tmp_path / "added", 1, branch="topic", commit="abc")


def list_ids(history: History, branch: str | None = None) -> list[str]:
    return [line.id for line in history.list_runs(branch)]


def find_place(history: History) -> tuple[str, str]:
    """Return branch and commit of the only run."""
    [run] = history.list_runs()
    return run.branch, run.commit


def test_add_keeps_a_run_once(history: History, entry: RunEntry, tmp_path: Path) -> None:
    assert history.add(entry) == "added"
    assert history.add(entry) == "unchanged"
    [line] = history.list_runs()
    assert line.id == "run-001"
    assert find_place(history) == ("topic", "abc")
    assert history.count_series() == {line.number: (2, 0)}
    path = tmp_path / "added" / "run-001"
    assert history.load_run(line).path == path
    assert history.load_run(line).records == load_run(path).records


def test_add_moves_a_run_with_its_annotations(history: History, entry: RunEntry) -> None:
    history.add(entry)
    history.annotate("run-001", "*", "intended")
    corrected = replace(entry, branch="main", commit="def")
    assert history.add(corrected) == "unchanged"  # a default branch moves nothing
    assert history.add(corrected, {"branch"}) == "updated"
    assert find_place(history) == ("main", "abc")
    [annotation] = history.list_annotations()
    assert annotation.branch == "main"


def test_add_updates_a_grown_run(history: History, tmp_path: Path) -> None:
    short = make_repetitions(count=2)
    history.add(make_entry(tmp_path / "short", 1, records=short, branch="topic"))
    long = make_repetitions(count=4)
    assert history.add(make_entry(tmp_path / "long", 1, records=long)) == "updated"
    assert find_place(history) == ("topic", "")
    assert len(history.read_points(history.find_run("run-001"))) == 1


@pytest.mark.parametrize("branch", ["last", "", "main~1", "a:b", "two words"])
def test_ambiguous_branch_is_refused(branch: str, history: History, entry: RunEntry) -> None:
    ambiguous = replace(entry, branch=branch)
    assert repr(branch) in usage_error(history.add, ambiguous)
    assert history.list_runs() == ()


def test_unknown_run_is_refused(history: History) -> None:
    assert "'nope'" in usage_error(history.find_run, "nope")
    assert "'nope'" in usage_error(history.annotate, "nope", "*", "note")


def test_prune_keeps_newest_runs_and_annotations(no_runs: DailyRuns) -> None:
    history = no_runs.history
    no_runs.add(1, environment={"host": {"cpu_model": "old"}})
    no_runs.add(3)
    no_runs.add(2, branch="topic")
    no_runs.add(1, preset="smoke")
    history.annotate("run-001", "*", "intended")
    assert history.prune(2) == ("run-001", "run-000")
    assert list_ids(history) == ["run-002", "run-003", "run-004", "run-005", "run-006"]
    assert len(history.list_annotations()) == 1
    models = {series.environment["host.cpu_model"] for series in history.list_series()}
    assert models == {"Example CPU"}  # Series without points are deleted.
    assert history.prune(1) == ("run-002", "run-004")


def test_history_reads_a_run_where_its_folder_was_added_last(
    history: History, entry: RunEntry, tmp_path: Path
) -> None:
    history.add(entry)
    (tmp_path / "added").rename(tmp_path / "renamed")
    line = history.find_run("run-001")
    assert str(tmp_path / "added" / "run-001") in usage_error(history.load_run, line)
    path = tmp_path / "renamed" / "run-001"
    assert history.add(read_entry(path, entry.branch)) == "updated"
    assert history.load_run(history.find_run("run-001")).path == path


def test_two_writers_add_each_run_once(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    for i in range(6):
        write_history_run(tmp_path / "runs", i)

    def add_runs(_: int) -> list[str]:
        changes = add_folders(file, [tmp_path / "runs"], branch="main", commit="")
        return [change for _, change in changes]

    with ThreadPoolExecutor(2) as writers:
        first, second = writers.map(add_runs, range(2))
    assert Counter(first + second) == {"added": 6, "unchanged": 6}
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
from parbench.reports.history.database import open_history
from parbench.reports.history.runs import read_entry
with open_history(Path(sys.argv[1])) as history:
    history.add(read_entry(Path(sys.argv[2]), "main"))
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
        assert history.add(read_entry(path, "main")) == "added"


def add_entry(file: Path, entry: RunEntry) -> None:
    with open_history(file) as history:
        history.add(entry)


def test_add_gives_up_waiting_for_a_writer(
    no_runs: DailyRuns, entry: RunEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_WAIT_SECONDS", 0.05)
    with closing(sqlite3.connect(no_runs.file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert "another process" in usage_error(add_entry, no_runs.file, entry)


def test_history_with_analyze_and_a_user_index_opens(runs: DailyRuns) -> None:
    with closing(sqlite3.connect(runs.file)) as connection:
        connection.execute("ANALYZE")
        connection.execute("CREATE INDEX my_index ON point (status)")
        connection.commit()
    with open_history(runs.file) as history:
        assert len(history.list_runs()) == 12
