"""Words that mean runs: one, one before, several as one; anything else is refused."""

from pathlib import Path

import pytest
from compare_fixtures import CASE, OTHER, launches, run_of
from history_fixtures import entry, fill
from reports_fixtures import ENVIRONMENT

from bench.errors import UserError
from bench.plan import Skipped
from reports.comparing.compare import compare
from reports.comparing.compare_rule import Rule
from reports.comparing.compare_show import Asked, compare_runs, find_run
from reports.comparing.history import Line, open_history
from reports.comparing.history_select import means_run, pool, select_lines, select_run
from reports.summary import summarize


def line(i: int, branch: str = "main") -> Line:
    return Line(
        number=i,
        id=f"run-{i}",
        started=f"2026-01-{i:02}",
        host="node-a",
        parbench="0.1.0",
        preset="node",
        branch=branch,
        commit="",
        num_series=2,
        num_bad=0,
    )


LINES = (line(1), line(2), line(3, "topic"), line(4))


@pytest.mark.parametrize(
    ("word", "numbers"),
    [
        ("main", [4]),
        ("main~0", [4]),
        ("main~1", [2]),
        ("main~2", [1]),
        ("topic", [3]),
        ("last", [4]),
        ("last~1", [3]),
        ("last:3", [2, 3, 4]),
        ("main:2", [2, 4]),
        ("main:10", [1, 2, 4]),
        ("run-3", [3]),
    ],
)
def test_a_word_means_runs(word: str, numbers: list[int]) -> None:
    assert [one.number for one in select_lines(LINES, word)] == numbers


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("main~3", "goes back 3 runs, and the history has 3 of 'main'"),
        ("nope", "which has main, topic"),
        ("main:0", "at least 1"),
        ("main~x", "write a branch"),
        ("a b", "write a branch"),
    ],
)
def test_a_word_that_means_none_is_refused(word: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        select_lines(LINES, word)
    assert told in str(error.value)
    assert word in str(error.value)


def test_several_leave_out_the_run_they_are_compared_with() -> None:
    assert [one.number for one in select_lines(LINES, "main:2", without="run-4")] == [1, 2]
    assert [one.number for one in select_lines(LINES, "main~1", without="run-4")] == [2]


@pytest.mark.parametrize(
    ("word", "means"), [("main~1", True), ("last:10", True), ("main", False), ("a/b~1", False), ("runs/x", False)]
)
def test_what_can_only_mean_a_run(word: str, means: bool) -> None:
    assert means_run(word) == means


def test_pooled_runs_are_one_of_all_launches(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0, 1.0, 1.0])
    run = select_run(tmp_path / "h.sqlite", "last:3")
    rows = summarize(run).rows
    assert [row.launches for row in rows] == [15, 15]
    assert run.info.plan.launches == 15
    assert sorted(record.launch for record in run.records if record.case == CASE) == list(range(15))
    assert run.info.id == "last:3"


def test_one_run_is_itself(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0])
        [run] = [history.run("run-000")]
    assert pool([run], "main") is run


def test_what_differs_within_pooled_runs_is_seen(tmp_path: Path) -> None:
    newer = {**ENVIRONMENT, "torch": {"version": "2.14.0"}}
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0])
        fill(history, tmp_path, [1.0], first=1, environment=newer)
        fill(history, tmp_path, [1.0], first=2)
    path = tmp_path / "h.sqlite"
    mixed = compare(select_run(path, "last:2"), select_run(path, "run-002"), Rule())
    assert {one.word for one in mixed.series} == {"ENV-CHANGED"}
    assert any(change.path == "torch.version" and change.within == "BASE" for change in mixed.changes)
    alike = compare(select_run(path, "main~2"), select_run(path, "main"), Rule())
    assert {one.word for one in alike.series} == {"SAME"}


def test_what_one_run_skipped_and_another_measured_is_measured() -> None:
    old = run_of(launches(CASE))
    new = run_of(launches(OTHER), cases=[OTHER], skipped=[Skipped(case=CASE, reason="no time")])
    pooled = pool([old, new], "last:2")
    assert {row.case.id for row in summarize(pooled).rows} == {CASE.id, OTHER.id}
    assert pooled.info.plan.skipped == ()


def test_compare_takes_the_words(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with open_history(file, create=True) as history:
        fill(history, tmp_path, [1.0, 1.0, 1.2])
    text, code = compare_runs("main~1", "main", Asked(history=file))
    assert code == 1
    assert "2 SLOWER" in text
    text, code = compare_runs("last:10", str(tmp_path / "run-002"), Asked(history=file))
    assert code == 1
    assert "10 launches" in text, "the run itself is not among the ten"
    with pytest.raises(UserError, match="are the same run"):
        compare_runs("main", "run-002", Asked(history=file))


def test_a_folder_comes_before_a_branch_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "h.sqlite"
    with open_history(file, create=True) as history:
        fill(history, tmp_path, [1.0])
        history.add(entry(tmp_path, 1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run-000").rename(tmp_path / "main")
    assert find_run("main", file).info.id == "run-000"
    assert find_run("last", file).info.id == "run-001"


def test_without_a_history_a_word_is_told_apart_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no history, it does not exist"):
        find_run("main~1", tmp_path / "h.sqlite")
    with pytest.raises(UserError, match="is no run"):
        find_run("main", tmp_path / "h.sqlite")
    with pytest.raises(UserError, match="is no run"):
        find_run("main~1")
