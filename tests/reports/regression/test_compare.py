"""Two runs, series by series: every verdict, the families and the exit code."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare_fixtures import CASE, NOISE, OTHER, compared, launches, only, run_of
from refusals import refusal
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective, make_plan, make_run, ok, step

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.plan.plan import Skipped
from parbench.reports.regression.compare import WORST_FIRST, compare, world_words
from parbench.reports.regression.rule import Rule

WRONG = [*launches(count=4), bad(CASE, 4, "wrong", "3 of 96 elements differ")]
TWO_NODES = msgspec.structs.replace(WORLD, nodes=2)


def test_times_are_judged_by_launches() -> None:
    table = ((1.1, "SLOWER", 1, 1), (0.9, "FASTER", 0, 0), (1.0, "SAME", 0, 0), (1.03, "AMBIGUOUS", 0, 3))
    for factor, word, code, strict in table:
        found = compared(launches(), launches(factor=factor))
        assert (only(found).word, found.code(), found.code(fail_on_unknown=True)) == (word, code, strict), factor
        effect = only(found).effect
        assert effect is not None
        assert effect.change == pytest.approx(factor - 1)
        base, new = ([*times.values()] for times in (only(found).base_times, only(found).new_times))
        assert base == pytest.approx([1e-3 * NOISE[(3 * i) % 5] for i in range(5)])
        assert new == pytest.approx([factor * value for value in base])


def test_the_observation_is_a_launchs_median_in_the_order_of_launches() -> None:
    many = [msgspec.structs.replace(record, samples=launches(n=9)[0].samples) for record in launches()]
    usual = only(compared(launches(), launches()))
    assert only(compared(many, launches(n=1000))).effect == usual.effect, "not its iterations"
    found = only(compared(launches()[::-1], launches()))
    assert [*found.base_times.items()] == [*found.new_times.items()], "whatever the order of records"


def test_four_launches_are_too_few_however_clear() -> None:
    found = only(compared(launches(), launches(factor=2.0, count=4)))
    assert (found.word, found.reason) == (
        "INSUFFICIENT",
        "at least 5 launches a side are needed: BASE has 5, NEW has 4",
    )
    assert found.effect is not None
    assert found.effect.change == pytest.approx(1.0, abs=0.02)
    short = [*launches(count=3), *(bad(CASE, i, "skipped", LEFT_OUT) for i in (3, 4))]
    reason = only(compared(launches(), short)).reason
    assert reason.endswith("BASE has 5, NEW has 3"), "what the budget left out does not count"


def test_what_went_wrong_or_did_not_run_has_no_time() -> None:
    table: tuple[tuple[Any, str, int], ...] = (("wrong", "WRONG", 1), ("failed", "FAILED", 4), ("hang", "FAILED", 4))
    for status, word, code in table:
        found = compared(launches(), [*launches(count=4), bad(CASE, 4, status, "rank 1 said so")])
        assert (only(found).word, only(found).reason, found.code()) == (word, "rank 1 said so", code), status
        assert only(found).effect is None


def test_a_wrong_base_cannot_be_compared_with_and_one_that_failed_once_is_judged_by_its_other_launches() -> None:
    found = only(compared(WRONG, launches()))
    assert (found.word, found.effect) == ("INSUFFICIENT", None)
    assert found.reason.endswith("BASE has 0, NEW has 5 (in BASE it is wrong)")
    base = [*launches(count=5), bad(CASE, 5, "failed")]
    assert only(compared(base, launches(factor=1.1))).word == "SLOWER"


def test_what_vanished_is_missing_and_what_came_is_new() -> None:
    both = run_of([*launches(), *launches(OTHER)])
    came = compare(run_of(launches()), both, Rule())
    assert (only(came, OTHER).word, came.code()) == ("NEW", 0)
    table = (
        (run_of(launches()), "not in the plan of NEW"),
        (
            run_of(launches(), cases=[CASE], skipped=[Skipped(case=OTHER, reason="needs 4 ranks")]),
            "skipped in NEW: needs 4 ranks",
        ),
        (run_of(launches(), cases=[CASE, OTHER]), "planned in NEW, but without a record"),
        (run_of([*launches(), bad(OTHER, 0, "skipped", LEFT_OUT)]), f"skipped in NEW: {LEFT_OUT}"),
    )
    for new, why in table:
        found = compare(both, new, Rule())
        assert (only(found, OTHER).word, only(found, OTHER).reason, found.code()) == ("MISSING", why, 4)
    skipped = bad(OTHER, 0, "skipped", "needs 4 ranks")
    neither = compared([*launches(), skipped], [*launches(), skipped])
    assert [one.case for one in neither.series] == [CASE], "what neither run measured is no series"


def test_a_changed_environment_forbids_to_blame_the_code() -> None:
    changed = {**ENVIRONMENT, "versions": {"python": "3.11.7", "numpy": "2.5.0"}}
    runs = run_of(launches()), run_of(launches(factor=1.5), changed)
    found = compare(*runs, Rule())
    assert (only(found).word, only(found).reason) == ("ENV-CHANGED", "versions.numpy: 2.4.6 -> 2.5.0")
    assert only(found).effect is not None
    assert [change.path for change in found.changes] == ["versions.numpy"]
    assert (found.code(), found.whole) == (3, None), "nothing was compared"
    meant = compare(*runs, Rule(), ["versions.*"])
    assert only(meant).word == "SLOWER"
    assert [change.path for change in meant.changes] == ["versions.numpy"]
    older, newer = ({**ENVIRONMENT, "versions": dict.fromkeys(map(str, range(5)), text)} for text in ("0.1", "0.2"))
    many = compare(run_of(launches(), older), run_of(launches(), newer), Rule())
    assert only(many).reason.endswith("versions.2: 0.1 -> 0.2; and 2 more")


def test_without_times_the_environment_is_not_the_reason() -> None:
    wrong = run_of(WRONG, {"versions": {"torch": "2.12"}})
    found = compare(wrong, run_of(launches(), {"versions": {"torch": "2.13"}}), Rule())
    assert only(found).word == "INSUFFICIENT"
    failed = run_of([*launches(), bad(OTHER, 0, "failed", "no rank came")])
    found = compare(failed, run_of([*launches(), *launches(OTHER)]), Rule())
    assert (only(found, OTHER).word, only(found, OTHER).changes, found.changes) == ("INSUFFICIENT", (), ())
    bare = make_run(make_plan([CASE], launches=5), launches(), None)
    assert only(compare(bare, bare, Rule())).word == "SAME", "nothing is known of either side"


def test_only_the_series_whose_launches_changed_are_forbidden() -> None:
    moved = launches(OTHER, environment={"changed": {"host.cpu_model": ["Example CPU", "Another CPU"]}})
    found = compared([*launches(), *launches(OTHER)], [*launches(), *moved])
    assert (only(found).word, only(found, OTHER).word) == ("SAME", "ENV-CHANGED")


def test_what_was_asked_differently_is_shown_and_forbids_nothing() -> None:
    base, new = run_of(launches()), run_of(launches())
    longer = msgspec.structs.replace(new.info.plan, budget_seconds=10.0)
    new = msgspec.structs.replace(new, info=msgspec.structs.replace(new.info, plan=longer), path=Path("runs/other"))
    found = compare(base, new, Rule())
    assert [change.text for change in found.changes] == ["plan.budget_seconds: 90.0 -> 10.0"]
    assert only(found).word == "SAME"


def test_another_world_is_another_series() -> None:
    found = compared([*launches(), *launches(OTHER)], [*launches(world=TWO_NODES), *launches(OTHER)])
    words = {(one.case.name, one.word): one.reason for one in found.series}
    assert words["collective.all_reduce", "MISSING"] == (
        "NEW ran it on another world: 4 ranks on 1 node, gloo, cpu -> 4 ranks on 2 nodes, gloo, cpu"
    )
    assert ("collective.all_reduce", "NEW") in words
    assert found.code() == 4
    for more in ({"size": 2}, {"backend": "nccl"}, {"device": "cuda"}):
        new = [*launches(world=msgspec.structs.replace(WORLD, **more)), *launches(OTHER)]
        assert compared([*launches(), *launches(OTHER)], new).counts == {"MISSING": 1, "NEW": 1, "SAME": 1}, more
    started = only(compared(launches(world=TWO_NODES), [bad(CASE, 0, "failed", "no rank came")]))
    assert (started.word, started.reason) == ("FAILED", "no rank came"), "of nodes it knows nothing"
    assert world_words(msgspec.structs.replace(WORLD, size=1, nodes=2)) == "1 rank on 2 nodes, gloo, cpu"


def test_runs_that_share_nothing_are_the_users_error() -> None:
    told = refusal(compared, launches(), launches(OTHER))
    assert told.startswith(
        "the runs share no series: BASE (runs/run-1) has 1 measured case on 4 ranks, gloo, cpu, NEW "
    )
    assert "share no series" in refusal(compared, [], launches())


def test_a_curve_is_one_family_with_the_sizes_that_moved() -> None:
    sizes = [collective(size_bytes=1024 * 4**i) for i in (2, 0, 3, 1)]
    base = [record for case in sizes for record in launches(case)]
    new = [r for case, factor in zip(sizes, (1.2, 1.0, 1.2, 1.0), strict=True) for r in launches(case, factor)]
    found = compared([*base, *launches(step())], [*new, *launches(step())])
    curve, alone = found.families
    assert [one.case.params["size_bytes"] for one in curve.series] == [1024, 4096, 16384, 65536]
    assert [one.word for one in curve.series] == ["SAME", "SAME", "SLOWER", "SLOWER"]
    assert (curve.word, alone.word) == ("SLOWER", "SAME")
    assert curve.name == "collective.all_reduce dtype=float32 mode=blocking"
    assert curve.p_value is not None
    assert curve.p_value < 0.05
    assert list(found.counts.items()) == [("SLOWER", 2), ("SAME", 3)], "the worst first"
    modes = [record for mode in ("blocking", "pipelined") for record in launches(collective(mode=mode))]
    assert len(compared(modes, modes).families) == 2


def test_verdicts_stay_with_their_series_where_some_are_not_judged() -> None:
    cases = [collective(size_bytes=1024 * 4**i) for i in range(4)]
    base = [record for case in cases for record in launches(case)]
    new = [*launches(cases[0], 1.2), *launches(cases[1], 1.2, count=2), bad(cases[2]), *launches(cases[3], 0.8)]
    assert [one.word for one in compared(base, new).series] == ["SLOWER", "INSUFFICIENT", "FAILED", "FASTER"]
    found = compared([*launches(), *launches(OTHER)], [*launches(), bad(OTHER, 0, "failed")])
    assert [family.p_value is None for family in found.families] == [False, True]


def test_chance_among_many_series_is_no_alarm() -> None:
    suspect, others = collective("all_gather"), [collective(f"other{i}") for i in range(20)]
    new = [ok(suspect, i, 1e-3 * value) for i, value in enumerate((1.055, 1.085, 1.045, 1.07, 1.06))]
    assert only(compared(launches(suspect), new), suspect).word == "SLOWER"
    still = [record for case in others for record in launches(case)]
    found = compared([*launches(suspect), *still], [*new, *still])
    assert (only(found, suspect).word, found.code()) == ("AMBIGUOUS", 0)


def test_the_exit_code_is_that_of_the_worst() -> None:
    assert (WORST_FIRST[0], WORST_FIRST[-1]) == ("WRONG", "SAME")
    base, failed = [*launches(), *launches(OTHER)], bad(OTHER, 0, "failed")
    table = (
        ([*launches(factor=1.2), failed], 1, 1),
        ([*launches(count=2), failed], 4, 4),
        (launches(), 4, 4),
        ([*launches(), *launches(OTHER, count=1)], 0, 3),
        (base, 0, 0),
    )
    for new, code, strict in table:
        found = compared(base, new)
        assert (found.code(), found.code(fail_on_unknown=True)) == (code, strict), found.counts
