"""The history keeps each run once, whole, whoever else writes and whoever is killed while writing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from compare_fixtures import CASE, launches
from history_fixtures import entry, fill, put

from bench.errors import UserError
from bench.runs import load_run
from reports.comparing.history import ANNOTATIONS, open_history
from reports.comparing.history_entry import About

FIXTURES = Path(__file__).parent


def test_a_run_is_kept_once(tmp_path: Path) -> None:
    night = entry(tmp_path, 1, commit="abc")
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        assert [history.add(night) for _ in range(3)] == ["added", "unchanged", "unchanged"]
        [line] = history.runs()
        assert (line.id, line.branch, line.commit, line.num_series, line.num_bad) == ("run-001", "main", "abc", 2, 0)
        assert all(len(history.points_of_series(number)) == 1 for number in history.series())


def test_a_run_that_has_grown_replaces_itself(tmp_path: Path) -> None:
    few = entry(tmp_path / "few", 1, records=launches(count=2))
    many = entry(tmp_path / "many", 1, records=launches(count=5))
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        assert [history.add(one) for one in (few, many)] == ["added", "updated"]
        [number] = history.series()
        [value] = history.points_of_series(number)
        assert value.launches == 5
        assert len(history.runs()) == 1


def test_a_branch_or_commit_that_is_meant_moves_a_run_and_its_annotations(tmp_path: Path) -> None:
    night = entry(tmp_path, 1, branch="wrong", commit="abc")
    right = replace(night, about=About(branch="main", commit="def"))
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        history.add(night)
        history.annotate("run-001", "*", "meant")
        before = history.run("run-001")
        assert history.add(right) == "unchanged", "it is not meant"
        assert history.add(replace(right, meant=frozenset({"branch"}))) == "moved"
        [line] = history.runs()
        assert (line.branch, line.commit) == ("main", "abc")
        assert [one.branch for one in history.annotations()] == ["main"]
        assert history.add(replace(right, meant=frozenset({"branch", "commit"}))) == "moved"
        assert history.line("run-001").commit == "def"
        assert history.add(replace(right, meant=frozenset({"branch", "commit"}))) == "unchanged"
        assert history.run("run-001") == before


def test_a_run_that_has_grown_stays_on_its_branch_unless_another_is_meant(tmp_path: Path) -> None:
    sizes = [entry(tmp_path / str(n), 1, records=launches(count=n)) for n in (2, 4, 5)]
    few, more, most = (replace(one, about=About(branch="main")) for one in sizes)
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        history.add(replace(few, about=About(branch="topic", commit="abc")))
        assert history.add(more) == "updated"
        assert [(line.branch, line.commit) for line in history.runs()] == [("topic", "abc")]
        assert history.add(replace(most, meant=frozenset({"branch"}))) == "moved"
        assert [(line.branch, line.commit) for line in history.runs()] == [("main", "abc")]
        assert len(history.run("run-001").records) == 5


def test_runs_come_in_the_order_of_time_and_by_branch(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for i, branch in ((3, "main"), (1, "topic"), (2, "main")):
            history.add(entry(tmp_path, i, branch=branch))
        assert [line.id for line in history.runs()] == ["run-001", "run-002", "run-003"]
        assert [line.id for line in history.runs("main")] == ["run-002", "run-003"]


@pytest.mark.parametrize("branch", ["last", "", "main~1", "a:b", "two words"])
def test_a_branch_that_could_mean_something_else_is_refused(tmp_path: Path, branch: str) -> None:
    with (
        open_history(tmp_path / "h.sqlite", create=True) as history,
        pytest.raises(UserError, match="cannot name runs"),
    ):
        history.add(entry(tmp_path, 1, branch=branch))


def test_a_run_is_given_back_as_it_was(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path / "more", [1.0], first=1)
        kept = history.run("run-001")
    read = load_run(path)
    assert (kept.info, kept.records) == (read.info, read.records)
    assert kept.path == Path("run-001")


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for ask in (history.run, history.line, lambda run_id: history.annotate(run_id, "*", "x")):
            with pytest.raises(UserError, match=r"h\.sqlite has no run 'nope'"):
                ask("nope")
        assert history.annotations() == ()


def test_annotations_are_kept_once_with_their_place_in_time(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0] * 3)
        for _ in range(2):
            history.annotate("run-001", "*all_reduce*", "new ring")
        [one] = history.annotations()
        assert (one.run_id, one.branch, one.series, one.note) == ("run-001", "main", "*all_reduce*", "new ring")
        assert one.started == history.line("run-001").started


def test_pruning_keeps_the_newest_of_each_branch_and_the_annotations(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0] * 5)
        fill(history, tmp_path, [1.0] * 2, first=5, branch="topic")
        history.add(entry(tmp_path, 7, records=launches(CASE)[:5], environment={"host": {"name": "old"}}))
        history.annotate("run-001", "*", "meant")
        before = len(history.series())
        assert history.prune(2) == ("run-003", "run-002", "run-001", "run-000")
        assert [line.id for line in history.runs()] == ["run-004", "run-005", "run-006", "run-007"]
        assert len(history.annotations()) == 1
        assert len(history.series()) == before
        assert history.prune(1) == ("run-004", "run-005")
        assert history.prune(1) == ()


def test_pruning_forgets_series_without_points(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0], environment={"host": {"name": "old"}})
        fill(history, tmp_path, [1.0], first=1)
        assert len(history.series()) == 4
        history.prune(1)
        assert {one.around["host.name"] for one in history.series().values()} == {"node-a"}


def test_what_was_exported_is_read_back_the_same(tmp_path: Path) -> None:
    from reports.comparing.history_add import add_folders

    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path / "in", [1.0, 1.1])
        fill(history, tmp_path / "in", [1.2], first=2, branch="topic", commit="abc")
        history.annotate("run-001", "*", "meant")
        assert history.export(tmp_path / "out") == 3
        lines, notes, series = history.runs(), history.annotations(), history.series()
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"run-000", "run-001", "run-002", ANNOTATIONS}
    copy = tmp_path / "copy.sqlite"
    added = dict(add_folders(copy, [tmp_path / "out"], branch="ignored", commit=""))
    assert set(added.values()) == {"added"}
    with open_history(copy) as history:
        assert history.runs() == lines
        assert history.annotations() == notes
        assert [one.fingerprint for one in history.series().values()] == [one.fingerprint for one in series.values()]


def test_an_export_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0])
        with pytest.raises(UserError, match="cannot be written"):
            history.export(tmp_path / "file")


def test_annotations_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / ANNOTATIONS).write_text("{}")
    with (
        open_history(tmp_path / "h.sqlite", create=True) as history,
        pytest.raises(UserError, match="is not what parbench wrote"),
    ):
        history.import_annotations(tmp_path)


WRITER = """
import sys
from pathlib import Path
from reports.comparing.history_add import add_folders
for run_id, what in add_folders(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]], branch="main", commit=""):
    print(what, run_id, flush=True)
"""


def writer(file: Path, *folders: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(file), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(FIXTURES.parent)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> None:
    process.communicate(timeout=60)
    assert process.returncode == 0


def assert_each_once(file: Path, count: int) -> None:
    with open_history(file) as history:
        assert [line.id for line in history.runs()] == [f"run-{i:03}" for i in range(count)]
        points = Counter(len(history.points_of_run(line.number)) for line in history.runs())
        assert points == {2: count}
        assert all(len(history.run(line.id).records) == 10 for line in history.runs())


def test_two_writers_of_the_same_runs_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    for i in range(30):
        put(tmp_path / "runs", i)
    file = tmp_path / "h.sqlite"
    both = [writer(file, tmp_path / "runs") for _ in range(2)]
    said = [one.communicate(timeout=60)[0].split() for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert Counter(said[0][::2] + said[1][::2]) == {"added": 30, "unchanged": 30}
    assert_each_once(file, 30)


def test_a_writer_that_is_killed_leaves_whole_runs_and_all_that_it_told_of(tmp_path: Path) -> None:
    for i in range(40):
        put(tmp_path / "runs", i)
    file = tmp_path / "h.sqlite"
    rng = random.Random(0)
    for _ in range(4):
        with writer(file, tmp_path / "runs") as killed:
            assert killed.stdout is not None
            said = [killed.stdout.readline() for _ in range(3)]
            time.sleep(rng.uniform(0, 0.02))
            killed.send_signal(signal.SIGKILL)
            told = [line.split()[1] for line in [*said, *killed.stdout] if line.endswith("\n")]
        with open_history(file) as history:
            lines = history.runs()
            assert set(told) <= {line.id for line in lines}
            assert all(len(history.points_of_run(line.number)) == line.num_series == 2 for line in lines)
    finish(writer(file, tmp_path / "runs"))
    assert_each_once(file, 40)


def test_a_writer_killed_inside_its_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    put(tmp_path / "runs", 0)
    put(tmp_path / "runs", 1)
    file = tmp_path / "h.sqlite"
    inside = f"""
import os, signal
from reports.comparing import history
original, seen = history.History._insert, []
def insert(self, entry):
    original(self, entry)
    seen.append(entry)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
history.History._insert = insert
{WRITER}"""
    environment = {**os.environ, "PYTHONPATH": str(FIXTURES.parent)}
    command = [sys.executable, "-c", inside, str(file), str(tmp_path / "runs")]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    with open_history(file) as history:
        assert [line.id for line in history.runs()] == ["run-000"]
        assert msgspec.to_builtins(history.run("run-000").info)["id"] == "run-000"
    finish(writer(file, tmp_path / "runs"))
    assert_each_once(file, 2)
