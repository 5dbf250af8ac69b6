"""Words that mean runs: one, one before, several as one; anything else is refused."""

from pathlib import Path

import msgspec
import pytest

from parbench.bench.plan.plan import Skipped
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import Row, summarize
from parbench.reports.history.database import Line, open_history
from parbench.reports.history.runs import find_run, means_run, select_lines, select_run
from parbench.reports.regression.compare import compare, notes_of_pools, pool
from parbench.reports.regression.compare_show import compare_runs
from parbench.reports.regression.rule import Rule
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions, run_from_records
from tests.support.history_fixtures import fill_history, make_entry, write_history_run
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import ENVIRONMENT, WORLD, failed_record


def line(i: int, branch: str = "main") -> Line:
    about = {
        "host": "node-a",
        "parbench": "0.1.0",
        "preset": "node",
        "branch": branch,
        "commit": "",
        "path": "",
    }
    return Line(
        number=i, id=f"run-{i}", started=f"2026-01-{i:02}", num_series=2, num_bad=0, **about
    )


LINES = (line(1), line(2), line(3, "topic"), line(4))


def test_a_word_means_runs() -> None:
    table = "main=4 main~0=4 main~1=2 main~2=1 topic=3 last=4 last~1=3 last:3=234 main:2=24 main:10=124 run-3=3"
    for word, _, numbers in (text.partition("=") for text in table.split()):
        assert "".join(str(one.number) for one in select_lines(LINES, word)) == numbers, word
    for word, rest in (("main:2", [1, 2]), ("main~1", [2])):
        found = select_lines(LINES, word, without="run-4")
        assert [one.number for one in found] == rest, (
            "several leave out the run they are compared with"
        )
    assert [
        word for word in ("main~1", "last:10", "main", "a/b~1", "runs/x") if means_run(word)
    ] == [
        "main~1",
        "last:10",
    ]


def test_a_word_that_means_none_is_refused() -> None:
    table = {
        "main~3": "goes back 3 runs, and the history has 3 of 'main'",
        "nope": "which has main, topic",
    }
    for word, why in {
        **table,
        "main:0": "at least 1",
        "main~x": "write a branch",
        "a b": "write a branch",
    }.items():
        told = usage_error(select_lines, LINES, word)
        assert told.startswith(repr(word)), word
        assert why in told, word


def test_pooled_runs_are_one_of_all_launches(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill_history(history, tmp_path, [1.0, 1.0, 1.0])
    run = select_run(tmp_path / "h.sqlite", "last:3")
    assert [row.launches for row in summarize(run).rows] == [15, 15]
    assert (run.info.id, run.info.plan.launches) == ("last:3", 15)
    assert sorted(record.launch for record in run.records if record.case == CASE) == list(range(15))
    one = select_run(tmp_path / "h.sqlite", "main")
    assert pool([one], "main") is one


def test_what_differs_within_pooled_runs_is_seen(tmp_path: Path) -> None:
    newer = {**ENVIRONMENT, "torch": {"version": "2.14.0"}}
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill_history(history, tmp_path, [1.0])
        fill_history(history, tmp_path, [1.0], first=1, environment=newer)
        fill_history(history, tmp_path, [1.0], first=2)
    path = tmp_path / "h.sqlite"
    mixed = compare(select_run(path, "last:2"), select_run(path, "run-002"), Rule())
    assert {one.word for one in mixed.series} == {"ENV-CHANGED"}
    assert any(
        change.path == "torch.version" and change.within == "BASE" for change in mixed.changes
    )
    alike = compare(select_run(path, "main~2"), select_run(path, "main"), Rule())
    assert {one.word for one in alike.series} == {"SAME"}


def test_what_one_run_skipped_and_another_measured_is_measured() -> None:
    old = run_from_records(make_repetitions(CASE))
    new = run_from_records(
        make_repetitions(OTHER_CASE),
        cases=[OTHER_CASE],
        skipped=[Skipped(case=CASE, reason="no time")],
    )
    pooled = pool([old, new], "last:2")
    assert pooled_rows(old, new).keys() == {CASE.id, OTHER_CASE.id}
    assert pooled.info.plan.skipped == ()


PAIR = msgspec.structs.replace(WORLD, size=2)
TWO_NODES = msgspec.structs.replace(WORLD, nodes=2)


def pooled_rows(*runs: Run) -> dict[str, Row]:
    return {row.case.id: row for row in summarize(pool(runs, "last:2")).rows}


def test_runs_of_another_world_are_left_out_and_told(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for i in range(
            6
        ):  # two ranks are faster than four: together they would make any run of four look slower
            records = make_repetitions(CASE) if i % 2 else make_repetitions(CASE, 0.7, world=PAIR)
            history.add(make_entry(tmp_path, i, records=records))
    new = str(write_history_run(tmp_path, 9, records=make_repetitions(CASE)))
    text, code = compare_runs("main:6", new, history=tmp_path / "h.sqlite")
    assert code == 0
    assert "Verdict: 1 SAME" in text
    assert "BASE: main:6, host node-a, started 2026-01-06T00:00:00.000Z, 15 launches" in text
    assert (
        "Left out of main:6: 15 records on another world than the newest of their case, 2 ranks on 1 node, gloo, cpu."
    ) in text


def test_each_case_has_the_world_of_its_own_newest() -> None:
    runs = (
        run_from_records(
            [*make_repetitions(CASE, world=PAIR), *make_repetitions(OTHER_CASE, world=PAIR)]
        ),
        run_from_records(make_repetitions(CASE)),
    )
    found = {case_id: row.world.size for case_id, row in pooled_rows(*runs).items()}
    assert found == {CASE.id: 4, OTHER_CASE.id: 2}
    assert notes_of_pools([pool(runs, "last:2")]) == (
        "Left out of last:2: 5 records on another world than the newest of their case, 2 ranks on 1 node, gloo, cpu.",
    )
    alike = pool([runs[1], runs[1]], "last:2")
    assert (len(alike.records), notes_of_pools([alike])) == (10, ())


def test_ranks_that_never_started_do_not_say_on_how_many_nodes() -> None:
    failed = run_from_records([failed_record(CASE, 0, "failed", "no rank came")])
    assert failed.records[0].world != TWO_NODES
    fine = run_from_records(make_repetitions(CASE, world=TWO_NODES))
    for runs in ((failed, fine), (fine, failed)):
        [row] = pooled_rows(*runs).values()
        assert (row.status, row.launches, len(row.records)) == ("failed", 5, 6)


def test_a_case_that_the_newest_world_has_no_ranks_for_keeps_its_own() -> None:
    needs_four = failed_record(CASE, 0, "skipped", "needs 4 ranks", world=PAIR)
    rows = pooled_rows(
        run_from_records(make_repetitions(CASE)),
        run_from_records([needs_four, *make_repetitions(OTHER_CASE, world=PAIR)]),
    )
    found = {case_id: (row.world.size, row.launches) for case_id, row in rows.items()}
    assert found == {CASE.id: (4, 5), OTHER_CASE.id: (2, 5)}


def test_compare_takes_the_words(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with open_history(file, create=True) as history:
        fill_history(history, tmp_path, [1.0, 1.0, 1.2])
    text, code = compare_runs("main~1", "main", history=file)
    assert (code, "2 SLOWER" in text) == (1, True)
    text, code = compare_runs("last:10", str(tmp_path / "run-002"), history=file)
    assert (code, "10 launches" in text) == (1, True), "the run itself is not among the ten"
    assert "are the same run" in usage_error(compare_runs, "main", "run-002", history=file)


def test_a_folder_comes_before_a_branch_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "h.sqlite"
    for word, history in (("main~1", file), ("main", file), ("main~1", None)):
        why = "history not found" if "~" in word and history else "no such folder"
        assert why in usage_error(find_run, word, history)
    with open_history(file, create=True) as kept:
        fill_history(kept, tmp_path, [1.0])
        kept.add(make_entry(tmp_path, 1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run-000").rename(tmp_path / "main")
    assert find_run("main", file).info.id == "run-000"
    assert find_run("last", file).info.id == "run-001"
