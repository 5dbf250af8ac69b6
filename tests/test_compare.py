"""Two runs, series by series: every verdict, the families and the exit code."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare_fixtures import CASE, NOISE, OTHER, compared, launches, only, run_of
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective, make_plan, make_run, ok, step

from bench.errors import UserError
from bench.messages import LEFT_OUT
from bench.plan import Skipped
from reports.comparing.compare import WORST_FIRST, compare, world_words
from reports.comparing.compare_rule import Rule

# --- the verdicts ---


@pytest.mark.parametrize(
    ("factor", "word", "code"), [(1.1, "SLOWER", 1), (0.9, "FASTER", 0), (1.0, "SAME", 0), (1.03, "AMBIGUOUS", 0)]
)
def test_times_are_judged_by_launches(factor: float, word: str, code: int) -> None:
    found = compared(launches(), launches(factor=factor))
    assert only(found).word == word
    assert found.code() == code
    assert only(found).effect is not None
    assert only(found).base_seconds == pytest.approx([1e-3 * NOISE[(3 * i) % 5] for i in range(5)])


def test_the_observation_is_a_launchs_median_not_its_iterations() -> None:
    many = [msgspec.structs.replace(record, samples=launches(n=9)[0].samples) for record in launches()]
    assert only(compared(many, launches(n=1000))).effect == only(compared(launches(), launches())).effect


def test_times_stand_in_the_order_of_launches_whatever_that_of_records() -> None:
    found = only(compared(launches()[::-1], launches()))
    assert found.base_seconds == found.new_seconds


def test_four_launches_are_too_few_however_clear() -> None:
    found = only(compared(launches(), launches(factor=2.0, count=4)))
    assert found.word == "INSUFFICIENT"
    assert found.reason == "at least 5 launches a side are needed: BASE has 5, NEW has 4"
    assert found.effect is not None
    assert found.effect.change == pytest.approx(1.0, abs=0.02)


def test_launches_left_out_by_the_budget_do_not_count() -> None:
    short = [*launches(count=3), *(bad(CASE, i, "skipped", LEFT_OUT) for i in (3, 4))]
    assert only(compared(launches(), short)).reason.endswith("BASE has 5, NEW has 3")


def test_a_wrong_result_has_no_time() -> None:
    wrong = [*launches(count=4), bad(CASE, 4, "wrong", "3 of 96 elements differ")]
    found = compared(launches(), wrong)
    assert (only(found).word, only(found).reason) == ("WRONG", "3 of 96 elements differ")
    assert only(found).effect is None
    assert found.code() == 1


def test_a_wrong_base_cannot_be_compared_with() -> None:
    wrong = [*launches(count=4), bad(CASE, 4, "wrong", "3 of 96 elements differ")]
    found = only(compared(wrong, launches()))
    assert found.word == "INSUFFICIENT"
    assert found.reason.endswith("BASE has 0, NEW has 5 (in BASE it is wrong)")
    assert found.effect is None


@pytest.mark.parametrize("status", ["failed", "hang"])
def test_what_failed_or_hung_did_not_run(status: Any) -> None:
    found = compared(launches(), [*launches(count=4), bad(CASE, 4, status, "rank 1 died")])
    assert (only(found).word, only(found).reason, found.code()) == ("FAILED", "rank 1 died", 4)


def test_a_base_that_failed_once_is_judged_by_its_other_launches() -> None:
    base = [*launches(count=5), bad(CASE, 5, "failed")]
    assert only(compared(base, launches(factor=1.1))).word == "SLOWER"


def test_what_vanished_is_missing_and_what_came_is_new() -> None:
    found = compared([*launches(), *launches(OTHER)], launches())
    assert (only(found, OTHER).word, only(found, OTHER).reason) == ("MISSING", "not in the plan of NEW")
    assert found.code() == 4
    other = compared(launches(), [*launches(), *launches(OTHER)])
    assert only(other, OTHER).word == "NEW"
    assert other.code() == 0


def test_missing_says_what_became_of_it() -> None:
    base = run_of([*launches(), *launches(OTHER)])
    skipped = run_of(launches(), cases=[CASE], skipped=[Skipped(case=OTHER, reason="needs 4 ranks")])
    assert only(compare(base, skipped, Rule()), OTHER).reason == "skipped in NEW: needs 4 ranks"
    killed = run_of(launches(), cases=[CASE, OTHER])
    assert only(compare(base, killed, Rule()), OTHER).reason == "planned in NEW, but without a record"
    late = run_of([*launches(), bad(OTHER, 0, "skipped", LEFT_OUT)])
    assert only(compare(base, late, Rule()), OTHER).reason == f"skipped in NEW: {LEFT_OUT}"


def test_what_neither_run_measured_is_no_series() -> None:
    skipped = bad(OTHER, 0, "skipped", "needs 4 ranks")
    found = compared([*launches(), skipped], [*launches(), skipped])
    assert [one.case for one in found.series] == [CASE]


def test_a_changed_environment_forbids_to_blame_the_code() -> None:
    changed = {**ENVIRONMENT, "versions": {"python": "3.11.7", "numpy": "2.5.0"}}
    runs = run_of(launches()), run_of(launches(factor=1.5), changed)
    found = compare(*runs, Rule())
    assert (only(found).word, only(found).reason) == ("ENV-CHANGED", "versions.numpy: 2.4.6 -> 2.5.0")
    assert only(found).effect is not None
    assert [change.path for change in found.changes] == ["versions.numpy"]
    assert (found.code(), found.code(fail_on_unknown=True)) == (0, 3)
    meant = compare(*runs, Rule(), ["versions.*"])
    assert only(meant).word == "SLOWER"
    assert [change.path for change in meant.changes] == ["versions.numpy"]


def test_without_times_the_environment_is_not_the_reason() -> None:
    records = [*launches(count=4), bad(CASE, 4, "wrong", "3 of 96 elements differ")]
    wrong = run_of(records, {"versions": {"torch": "2.12"}})
    found = compare(wrong, run_of(launches(), {"versions": {"torch": "2.13"}}), Rule())
    assert only(found).word == "INSUFFICIENT"


def test_what_was_never_measured_has_no_surroundings_to_differ_in() -> None:
    failed = run_of([*launches(), bad(OTHER, 0, "failed", "no rank came")])
    found = compare(failed, run_of([*launches(), *launches(OTHER)]), Rule())
    assert (only(found, OTHER).word, only(found, OTHER).changes, found.changes) == ("INSUFFICIENT", (), ())


def test_only_the_series_whose_launches_changed_are_forbidden() -> None:
    moved = launches(OTHER, environment={"changed": {"host.cpu_model": ["Example CPU", "Another CPU"]}})
    found = compared([*launches(), *launches(OTHER)], [*launches(), *moved])
    assert (only(found).word, only(found, OTHER).word) == ("SAME", "ENV-CHANGED")


def test_many_changes_are_counted() -> None:
    versions = {f"library{i}": str(i) for i in range(5)}
    older = {**ENVIRONMENT, "versions": dict.fromkeys(versions, "0.1")}
    newer = {**ENVIRONMENT, "versions": dict.fromkeys(versions, "0.2")}
    found = compare(run_of(launches(), older), run_of(launches(), newer), Rule())
    assert only(found).reason.endswith("versions.library2: 0.1 -> 0.2; and 2 more")


# --- series and families ---


def test_another_world_is_another_series() -> None:
    other = msgspec.structs.replace(WORLD, nodes=2)
    found = compared([*launches(), *launches(OTHER)], [*launches(world=other), *launches(OTHER)])
    words = {(one.case.name, one.word): one.reason for one in found.series}
    assert words["collective.all_reduce", "MISSING"] == (
        "NEW ran it on another world: 4 ranks on 1 node, gloo, cpu -> 4 ranks on 2 nodes, gloo, cpu"
    )
    assert ("collective.all_reduce", "NEW") in words
    assert found.code() == 4


def test_a_case_whose_ranks_never_started_is_still_the_same_series() -> None:
    two_nodes = msgspec.structs.replace(WORLD, nodes=2)
    found = only(compared(launches(world=two_nodes), [bad(CASE, 0, "failed", "no rank came")]))
    assert (found.word, found.reason) == ("FAILED", "no rank came")


def test_runs_that_share_nothing_are_the_users_error() -> None:
    with pytest.raises(UserError, match=r"share no series: BASE \(runs/run-1\) has 1 measured case on 4 ranks, gloo"):
        compared(launches(), launches(OTHER))
    with pytest.raises(UserError, match="share no series"):
        compared([], launches())


def test_a_curve_is_one_family_with_the_sizes_that_moved() -> None:
    sizes = [collective(size_bytes=1024 * 4**i) for i in (2, 0, 3, 1)]
    factors = [1.2, 1.0, 1.2, 1.0]
    base = [record for case in sizes for record in launches(case)]
    new = [record for case, factor in zip(sizes, factors, strict=True) for record in launches(case, factor)]
    found = compared([*base, *launches(step())], [*new, *launches(step())])
    curve, alone = found.families
    assert [one.case.params["size_bytes"] for one in curve.series] == [1024, 4096, 16384, 65536]
    assert [one.word for one in curve.series] == ["SAME", "SAME", "SLOWER", "SLOWER"]
    assert curve.word == "SLOWER"
    assert curve.name == "collective.all_reduce dtype=float32 mode=blocking"
    assert curve.p_value is not None
    assert curve.p_value < 0.05
    assert alone.word == "SAME"
    assert found.counts == {"SLOWER": 2, "SAME": 3}


def test_modes_are_families_of_their_own() -> None:
    cases = [collective(mode=mode) for mode in ("blocking", "pipelined")]
    records = [record for case in cases for record in launches(case)]
    assert len(compared(records, records).families) == 2


def test_a_family_with_nothing_to_judge_has_no_p_value() -> None:
    found = compared([*launches(), *launches(OTHER)], [*launches(), bad(OTHER, 0, "failed")])
    assert [family.p_value is None for family in found.families] == [False, True]


def test_verdicts_stay_with_their_series_where_some_are_not_judged() -> None:
    cases = [collective(size_bytes=1024 * 4**i) for i in range(4)]
    base = [record for case in cases for record in launches(case)]
    new = [*launches(cases[0], 1.2), *launches(cases[1], 1.2, count=2), bad(cases[2]), *launches(cases[3], 0.8)]
    assert [one.word for one in compared(base, new).series] == ["SLOWER", "INSUFFICIENT", "FAILED", "FASTER"]


def test_chance_among_many_series_is_no_alarm() -> None:
    suspect, others = collective("all_gather"), [collective(f"other{i}") for i in range(20)]
    noisy = [1.045, 1.075, 1.035, 1.06, 1.05]
    new = [ok(suspect, i, 1e-3 * value) for i, value in enumerate(noisy)]
    assert only(compared(launches(suspect), new), suspect).word == "SLOWER"
    still = [record for case in others for record in launches(case)]
    found = compared([*launches(suspect), *still], [*new, *still])
    assert only(found, suspect).word == "AMBIGUOUS"
    assert found.code() == 0


# --- exit codes, and what else differs ---


def test_the_exit_code_is_that_of_the_worst() -> None:
    slower, failed, vanished = launches(factor=1.2), [bad(OTHER, 0, "failed")], launches(count=5)
    base = [*launches(), *launches(OTHER)]
    assert compared(base, [*slower, *failed]).code() == 1
    assert compared(base, [*launches(), *failed]).code(fail_on_unknown=True) == 4
    assert compared(base, vanished).code() == 4
    unknown = compared(base, [*launches(), *launches(OTHER, count=1)])
    assert (unknown.code(), unknown.code(fail_on_unknown=True)) == (0, 3)
    assert compared(base, base).code(fail_on_unknown=True) == 0


def test_counts_stand_worst_first() -> None:
    assert WORST_FIRST[0] == "WRONG"
    assert WORST_FIRST[-1] == "SAME"
    found = compared([*launches(), *launches(OTHER)], [*launches(factor=1.2), *launches(OTHER)])
    assert list(found.counts) == ["SLOWER", "SAME"]


def test_what_was_asked_differently_is_shown_and_forbids_nothing() -> None:
    base, new = run_of(launches()), run_of(launches())
    longer = msgspec.structs.replace(new.info.plan, budget_seconds=10.0)
    new = msgspec.structs.replace(new, info=msgspec.structs.replace(new.info, plan=longer), path=Path("runs/other"))
    found = compare(base, new, Rule())
    assert [change.text for change in found.changes] == ["plan.budget_seconds: 90.0 -> 10.0"]
    assert only(found).word == "SAME"


def test_a_run_of_an_unknown_environment_can_be_compared() -> None:
    bare = make_run(make_plan([CASE], launches=5), launches(), None)
    assert only(compare(bare, bare, Rule())).word == "SAME"


def test_a_world_in_words() -> None:
    assert world_words(WORLD) == "4 ranks on 1 node, gloo, cpu"
    assert world_words(msgspec.structs.replace(WORLD, size=1, nodes=2)) == "1 rank on 2 nodes, gloo, cpu"
