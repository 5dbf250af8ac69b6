"""Words that mean runs: one, one before, several as one; anything else is refused."""

from pathlib import Path

import msgspec
import pytest
from compare_fixtures import CASE, OTHER, launches, run_of
from history_fixtures import entry, fill, put
from reports_fixtures import ENVIRONMENT, WORLD, bad

from bench.errors import UserError
from bench.plan import Skipped
from reports.comparing.compare import compare
from reports.comparing.compare_rule import Rule
from reports.comparing.compare_show import Asked, compare_runs, find_run
from reports.comparing.history import Line, open_history
from reports.comparing.history_select import means_run, notes_of_pools, pool, select_lines, select_run
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


# --- runs of different worlds ---

PAIR = msgspec.structs.replace(WORLD, size=2)
TWO_NODES = msgspec.structs.replace(WORLD, nodes=2)


def test_runs_of_another_world_are_left_out_and_told(tmp_path: Path) -> None:
    """Two ranks are faster than four: together they would make any run of four look slower."""
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for i in range(6):
            records = launches(CASE) if i % 2 else launches(CASE, 0.7, world=PAIR)
            history.add(entry(tmp_path, i, records=records))
    text, code = compare_runs(
        "main:6", str(put(tmp_path, 9, records=launches(CASE))), Asked(history=tmp_path / "h.sqlite")
    )
    assert code == 0
    assert "Verdict: 1 SAME" in text
    assert "BASE: main:6, host node-a, started 2026-01-06T00:00:00.000Z, 15 launches" in text
    assert (
        "Left out of main:6: 15 records on another world than the newest of their case, 2 ranks on 1 node, gloo, cpu."
    ) in text


def test_each_case_has_the_world_of_its_own_newest() -> None:
    old = run_of([*launches(CASE, world=PAIR), *launches(OTHER, world=PAIR)])
    pooled = pool([old, run_of(launches(CASE))], "last:2")
    assert {row.case.id: row.world.size for row in summarize(pooled).rows} == {CASE.id: 4, OTHER.id: 2}
    assert notes_of_pools([pooled]) == (
        "Left out of last:2: 5 records on another world than the newest of their case, 2 ranks on 1 node, gloo, cpu.",
    )


def test_what_is_on_one_world_is_pooled_without_a_note() -> None:
    pooled = pool([run_of(launches(CASE)), run_of(launches(CASE))], "last:2")
    assert (len(pooled.records), notes_of_pools([pooled])) == (10, ())


def test_ranks_that_never_started_do_not_say_on_how_many_nodes() -> None:
    failed = run_of([bad(CASE, 0, "failed", "no rank came")])
    assert failed.records[0].world != TWO_NODES
    for runs in ([failed, run_of(launches(CASE, world=TWO_NODES))], [run_of(launches(CASE, world=TWO_NODES)), failed]):
        [row] = summarize(pool(runs, "last:2")).rows
        assert (row.status, row.launches, len(row.records)) == ("failed", 5, 6)


def test_a_case_that_the_newest_world_has_no_ranks_for_keeps_its_own() -> None:
    needs_four = bad(CASE, 0, "skipped", "needs 4 ranks", world=PAIR)
    pooled = pool([run_of(launches(CASE)), run_of([needs_four, *launches(OTHER, world=PAIR)])], "last:2")
    found = {row.case.id: (row.world.size, row.launches) for row in summarize(pooled).rows}
    assert found == {CASE.id: (4, 5), OTHER.id: (2, 5)}


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
