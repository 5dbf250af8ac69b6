"""The history keeps each run once, whole, whoever else writes and whoever is killed while writing."""

import csv
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from parbench.reports.history import database
from parbench.reports.history.database import APPLICATION, SCHEMA, History, open_history
from parbench.reports.history.entries import About, read_entry
from parbench.reports.history.runs import add_folders
from parbench.reports.history.show import render_csv
from tests.support.compare_fixtures import CASE, make_repetitions
from tests.support.history_fixtures import (
    fill_history,
    make_daily_records,
    make_entry,
    write_history_run,
)
from tests.support.paths import ROOT
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import ENVIRONMENT


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with open_history(tmp_path / "h.sqlite", create=True) as found:
        yield found


def places(history: History) -> list[tuple[str, str]]:
    return [(line.branch, line.commit) for line in history.runs()]


def ids(history: History, branch: str | None = None) -> list[str]:
    return [line.id for line in history.runs(branch)]


def test_add_keeps_a_run_once(history: History, tmp_path: Path) -> None:
    night = make_entry(tmp_path, 1, commit="abc")
    assert [history.add(night) for _ in range(3)] == ["added", "unchanged", "unchanged"]
    [line] = history.runs()
    assert (line.id, line.branch, line.commit, line.num_series, line.num_bad) == (
        "run-001",
        "main",
        "abc",
        2,
        0,
    )
    assert all(len(history.times(number, [line])) == 1 for number in history.series())
    kept, read = history.run(history.line("run-001")), load_run(tmp_path / "run-001")
    assert (kept.info, kept.records, kept.path) == (read.info, read.records, tmp_path / "run-001")


def test_add_moves_a_run_with_its_annotations(history: History, tmp_path: Path) -> None:
    night = make_entry(tmp_path, 1, branch="wrong", commit="abc")
    right = replace(night, about=About(branch="main", commit="def"))
    history.add(night)
    history.annotate("run-001", "*", "meant")
    assert history.add(right) == "unchanged", "it is not meant"
    assert history.add(replace(right, meant=frozenset({"branch"}))) == "moved"
    assert places(history) == [("main", "abc")]
    assert [one.branch for one in history.annotations()] == ["main"]
    assert history.add(replace(right, meant=frozenset({"branch", "commit"}))) == "moved"
    assert history.line("run-001").commit == "def"
    assert history.add(replace(right, meant=frozenset({"branch", "commit"}))) == "unchanged"


def test_add_updates_a_grown_run(history: History, tmp_path: Path) -> None:
    sizes = [make_entry(tmp_path / str(n), 1, records=make_repetitions(count=n)) for n in (2, 4, 5)]
    few, more, most = (replace(one, about=About(branch="main")) for one in sizes)
    history.add(replace(few, about=About(branch="topic", commit="abc")))
    assert history.add(more) == "updated"
    assert places(history) == [("topic", "abc")]
    assert history.add(replace(most, meant=frozenset({"branch"}))) == "moved"
    assert places(history) == [("main", "abc")]
    assert len(history.outcomes(history.line("run-001").number)) == len(history.series()) == 1


def test_runs_are_ordered_by_time(history: History, tmp_path: Path) -> None:
    for i, branch in ((3, "main"), (1, "topic"), (2, "main")):
        history.add(make_entry(tmp_path, i, branch=branch))
    assert ids(history) == ["run-001", "run-002", "run-003"]
    assert ids(history, "main") == ["run-002", "run-003"]
    for _ in range(2):
        history.annotate("run-001", "*all_reduce*", "new ring")
    [one] = history.annotations()
    assert (one.run_id, one.branch, one.series, one.note) == (
        "run-001",
        "topic",
        "*all_reduce*",
        "new ring",
    )
    assert one.started == history.line("run-001").started


def test_ambiguous_branches_and_unknown_runs_are_refused(history: History, tmp_path: Path) -> None:
    night = make_entry(tmp_path, 1)
    for branch in ("last", "", "main~1", "a:b", "two words"):
        assert "cannot name runs" in usage_error(
            history.add, replace(night, about=About(branch=branch))
        )
    assert history.runs() == ()
    for ask in (history.line, lambda run_id: history.annotate(run_id, "*", "x")):
        assert "h.sqlite has no run 'nope'" in usage_error(ask, "nope")
    assert history.annotations() == ()


def test_prune_keeps_newest_runs_and_annotations(history: History, tmp_path: Path) -> None:
    history.add(make_entry(tmp_path, 0, environment={"host": {"name": "old"}}))
    fill_history(history, tmp_path, [1.0] * 4, first=1)
    fill_history(history, tmp_path, [1.0] * 2, first=5, branch="topic")
    history.add(make_entry(tmp_path, 7, preset="smoke"))
    history.annotate("run-001", "*", "meant")
    assert len(history.series()) == 4
    assert history.prune(2) == ("run-002", "run-001", "run-000")
    assert ids(history) == ["run-003", "run-004", "run-005", "run-006", "run-007"]
    assert len(history.annotations()) == 1
    assert {one.around["host.name"] for one in history.series().values()} == {"node-a"}, (
        "no series without points"
    )
    assert history.prune(1) == ("run-003", "run-005")
    assert history.prune(1) == ()


def test_history_reads_a_run_where_its_folder_was_added_last(
    history: History, tmp_path: Path
) -> None:
    history.add(make_entry(tmp_path / "old", 1))
    (tmp_path / "old").rename(tmp_path / "new")
    told = usage_error(history.run, history.line("run-001"))
    assert told.startswith(f"run run-001 is not in {tmp_path / 'old' / 'run-001'} any more")
    assert (
        history.add(read_entry(tmp_path / "new" / "run-001", About(branch="main"))) == "unchanged"
    )
    assert history.run(history.line("run-001")).path == tmp_path / "new" / "run-001"


def test_add_folders_adds_each_run_once(tmp_path: Path) -> None:
    runs, file = tmp_path / "runs", tmp_path / "h.sqlite"
    paths = [write_history_run(runs, i) for i in range(2)]
    (runs / "notes").mkdir()
    for name, why in (
        ("notes", "notes is no run and holds none"),
        ("absent", f"no such folder: {runs / 'absent'}"),
    ):
        adding = add_folders(file, [runs, runs / name], branch="topic", commit="")
        assert why in usage_error(list, adding)
    assert not file.exists()
    told = list(add_folders(file, [paths[0], runs], branch="topic", commit="abc"))
    assert told == [("run-000", "added"), ("run-001", "added")]
    with open_history(file) as history:
        assert places(history) == [("topic", "abc")] * 2


def test_add_folders_keeps_runs_before_a_damaged_one(tmp_path: Path) -> None:
    for i in range(3):
        write_history_run(tmp_path / "runs", i)
    (tmp_path / "runs" / "run-001" / "records.jsonl").write_text("no record\n")
    file = tmp_path / "h.sqlite"
    adding = add_folders(file, [tmp_path / "runs"], branch="main", commit="")
    assert "line 1 is no record" in usage_error(list, adding)
    with open_history(file) as history:
        assert ids(history) == ["run-000"]


def rows(history: History, branch: str | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(render_csv(history, branch).splitlines()))


def test_csv_has_a_row_per_run_and_a_column_per_series(history: History, tmp_path: Path) -> None:
    fill_history(history, tmp_path, [1.0, 1.1], commit="abc")
    history.add(
        make_entry(tmp_path, 2, records=make_daily_records(2, cases=[CASE]), branch="topic")
    )
    first, second, third = rows(history)
    assert list(first)[:3] == ["time", "commit", "run"]
    assert (first["time"], first["commit"], first["run"]) == (
        "2026-01-01T00:00:00.000Z",
        "abc",
        "run-000",
    )
    assert float(second[CASE.label]) == pytest.approx(1.1e-3, rel=0.01)
    [broadcast] = [name for name in third if "broadcast" in name]
    assert [name for name, value in third.items() if not value] == ["commit", broadcast]
    assert [row["run"] for row in rows(history, "main")] == ["run-000", "run-001"]
    other = {**ENVIRONMENT, "host": {"name": "node-b"}}
    history.add(
        make_entry(tmp_path, 3, records=make_daily_records(3, cases=[CASE]), environment=other)
    )
    first, *_, last = rows(history)
    columns = [name for name in first if "all_reduce" in name]
    assert len(columns) == 2, "two series of one case"
    assert all(" #" in name for name in columns)
    assert (
        [bool(first[name]) for name in columns]
        == [not last[name] for name in columns]
        == [True, False]
    )


WRITER = """
import sys
from pathlib import Path
from parbench.reports.history.runs import add_folders
for run_id, what in add_folders(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]], branch="main", commit=""):
    print(what, run_id, flush=True)
"""


def writer(file: Path, *folders: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(file), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> list[str]:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return said.split()


def test_two_writers_add_each_run_once(tmp_path: Path) -> None:
    for i in range(8):
        write_history_run(tmp_path / "runs", i)
    file = tmp_path / "h.sqlite"
    both = [writer(file, tmp_path / "runs") for _ in range(2)]
    said = [told(one) for one in both]
    assert Counter(said[0][::2] + said[1][::2]) == {"added": 8, "unchanged": 8}
    with open_history(file) as history:
        assert ids(history) == [f"run-{i:03}" for i in range(8)]
        assert {len(history.outcomes(line.number)) for line in history.runs()} == {2}


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def opened(path: Path, create: bool = False) -> Path:
    with open_history(path, create=create) as found:
        assert found.runs() == ()
    return path


def test_open_creates_file_and_folder(tmp_path: Path) -> None:
    path = opened(opened(tmp_path / "deep" / "history.sqlite", create=True))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION,)


def test_open_refuses_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    assert "is empty" in usage_error(opened, path)
    assert path.stat().st_size == 0
    opened(path, create=True)


def test_failed_add_leaves_nothing(tmp_path: Path) -> None:
    night, path = make_entry(tmp_path, 0), opened(tmp_path / "h.sqlite", create=True)
    with (
        pytest.raises(UserError, match="cannot be used as a history"),
        open_history(path) as history,
    ):
        history.add(replace(night, points=(*night.points, night.points[0])))
    assert [count(path, table) for table in ("run", "series", "point")] == [0] * 3
    with open_history(path) as history:
        assert history.add(night) == "added"


def test_add_gives_up_waiting_for_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_WAIT_SECONDS", 0.05)
    path = opened(tmp_path / "history.sqlite", create=True)
    write_history_run(tmp_path / "runs", 0)
    with closing(sqlite3.connect(path, isolation_level=None)) as first:
        first.execute("BEGIN IMMEDIATE")
        adding = add_folders(path, [tmp_path / "runs"], branch="main", commit="")
        assert "being written by other processes" in usage_error(list, adding)
