"""Two runs compared series by series: verdicts, families and the exit code."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.regression.compare import WORST_FIRST, compare, world_words
from parbench.reports.regression.rule import Rule
from tests.support.compare_fixtures import (
    CASE,
    NOISE,
    OTHER_CASE,
    compare_records,
    find_series,
    make_repetitions,
    run_from_records,
)
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    WORLD,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
)

WRONG = [*make_repetitions(count=4), failed_record(CASE, 4, "wrong", "3 of 96 elements differ")]
TWO_NODES = msgspec.structs.replace(WORLD, nodes=2)
BOTH = [*make_repetitions(), *make_repetitions(OTHER_CASE)]


@pytest.mark.parametrize(
    ("factor", "verdict", "code", "strict_code"),
    [(1.1, "SLOWER", 1, 1), (0.9, "FASTER", 0, 0), (1.0, "SAME", 0, 0), (1.03, "AMBIGUOUS", 0, 3)],
)
def test_verdict_follows_the_change_of_medians(
    factor: float, verdict: str, code: int, strict_code: int
) -> None:
    comparison = compare_records(make_repetitions(), make_repetitions(factor=factor))
    assert find_series(comparison).word == verdict
    assert (comparison.code(), comparison.code(fail_on_unknown=True)) == (code, strict_code)
    effect = find_series(comparison).effect
    assert effect is not None
    assert effect.change == pytest.approx(factor - 1)
    medians = [1e-3 * NOISE[(3 * i) % 5] for i in range(5)]
    assert [*find_series(comparison).base_times.values()] == pytest.approx(medians)


def test_observation_is_a_repetition_not_an_iteration() -> None:
    usual = find_series(compare_records(make_repetitions(), make_repetitions())).effect
    assert (
        find_series(compare_records(make_repetitions(n=9), make_repetitions(n=1000))).effect
        == usual
    )
    reverse = find_series(compare_records(make_repetitions()[::-1], make_repetitions()))
    assert [*reverse.base_times.items()] == [*reverse.new_times.items()]


def test_four_repetitions_are_insufficient() -> None:
    series = find_series(compare_records(make_repetitions(), make_repetitions(factor=2.0, count=4)))
    assert series.word == "INSUFFICIENT"
    assert "NEW has 4" in series.reason
    assert series.effect is not None
    assert series.effect.change == pytest.approx(1.0, abs=0.02)
    left_out = [failed_record(CASE, i, "skipped", LEFT_OUT) for i in (3, 4)]
    assert (
        "NEW has 3"
        in find_series(
            compare_records(make_repetitions(), [*make_repetitions(count=3), *left_out])
        ).reason
    )


@pytest.mark.parametrize(
    ("status", "verdict", "code"),
    [("wrong", "WRONG", 1), ("failed", "FAILED", 4), ("hang", "FAILED", 4)],
)
def test_bad_repetition_of_new_decides(status: Any, verdict: str, code: int) -> None:
    broken = failed_record(CASE, 4, status, "rank 1 reported it")
    comparison = compare_records(make_repetitions(), [*make_repetitions(count=4), broken])
    series = find_series(comparison)
    assert (series.word, series.reason, series.effect) == (verdict, "rank 1 reported it", None)
    assert comparison.code() == code


def test_wrong_base_is_insufficient_a_failed_one_is_not() -> None:
    series = find_series(compare_records(WRONG, make_repetitions()))
    assert (series.word, series.effect) == ("INSUFFICIENT", None)
    assert "BASE has 0" in series.reason
    failed_once = [*make_repetitions(count=5), failed_record(CASE, 5, "failed")]
    assert find_series(compare_records(failed_once, make_repetitions(factor=1.1))).word == "SLOWER"


def test_added_case_is_new() -> None:
    comparison = compare(run_from_records(make_repetitions()), run_from_records(BOTH), Rule())
    assert (find_series(comparison, OTHER_CASE).word, comparison.code()) == ("NEW", 0)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (run_from_records(make_repetitions()), "not in the plan"),
        (
            run_from_records(
                make_repetitions(),
                cases=[CASE],
                skipped=[Skipped(case=OTHER_CASE, reason="needs 4 ranks")],
            ),
            "needs 4 ranks",
        ),
        (run_from_records(make_repetitions(), cases=[CASE, OTHER_CASE]), "without a record"),
        (
            run_from_records(
                [*make_repetitions(), failed_record(OTHER_CASE, 0, "skipped", LEFT_OUT)]
            ),
            LEFT_OUT,
        ),
    ],
    ids=["not-planned", "skipped-by-plan", "no-record", "left-out"],
)
def test_missing_case_has_its_reason(new: Run, reason: str) -> None:
    comparison = compare(run_from_records(BOTH), new, Rule())
    assert (find_series(comparison, OTHER_CASE).word, comparison.code()) == ("MISSING", 4)
    assert reason in find_series(comparison, OTHER_CASE).reason


def test_case_skipped_by_both_is_no_series() -> None:
    records = [*make_repetitions(), failed_record(OTHER_CASE, 0, "skipped", "needs 4 ranks")]
    assert [series.case for series in compare_records(records, records).series] == [CASE]


def test_changed_environment_is_env_changed_unless_meant() -> None:
    newer = {**ENVIRONMENT, "versions": {"python": "3.11.7", "numpy": "2.5.0"}}
    runs = (
        run_from_records(make_repetitions()),
        run_from_records(make_repetitions(factor=1.5), newer),
    )
    comparison = compare(*runs, Rule())
    assert find_series(comparison).word == "ENV-CHANGED"
    assert find_series(comparison).reason == "versions.numpy: 2.4.6 -> 2.5.0"
    assert find_series(comparison).effect is not None
    assert (comparison.code(), comparison.whole) == (3, None)
    assert find_series(compare(*runs, Rule(), ["versions.*"])).word == "SLOWER"


def test_environment_matters_only_where_times_exist() -> None:
    wrong = run_from_records(WRONG, {"versions": {"torch": "2.12"}})
    comparison = compare(
        wrong, run_from_records(make_repetitions(), {"versions": {"torch": "2.13"}}), Rule()
    )
    assert find_series(comparison).word == "INSUFFICIENT"
    unknown = make_run(make_plan([CASE], launches=5), make_repetitions(), None)
    assert find_series(compare(unknown, unknown, Rule())).word == "SAME"


def test_environment_change_of_one_series_spares_others() -> None:
    changed = {"changed": {"host.cpu_model": ["Example CPU", "Another CPU"]}}
    comparison = compare_records(
        BOTH, [*make_repetitions(), *make_repetitions(OTHER_CASE, environment=changed)]
    )
    assert (find_series(comparison).word, find_series(comparison, OTHER_CASE).word) == (
        "SAME",
        "ENV-CHANGED",
    )


def test_changed_plan_is_shown_only() -> None:
    base, new = run_from_records(make_repetitions()), run_from_records(make_repetitions())
    plan = msgspec.structs.replace(new.info.plan, budget_seconds=10.0)
    info = msgspec.structs.replace(new.info, plan=plan)
    new = msgspec.structs.replace(new, info=info, path=Path("runs/other"))
    comparison = compare(base, new, Rule())
    assert [change.text for change in comparison.changes] == ["plan.budget_seconds: 90.0 -> 10.0"]
    assert find_series(comparison).word == "SAME"


@pytest.mark.parametrize(
    "change", [{"nodes": 2}, {"size": 2}, {"backend": "nccl"}, {"device": "cuda"}]
)
def test_another_world_is_another_series(change: dict[str, Any]) -> None:
    new = [
        *make_repetitions(world=msgspec.structs.replace(WORLD, **change)),
        *make_repetitions(OTHER_CASE),
    ]
    comparison = compare_records(BOTH, new)
    assert comparison.counts == {"MISSING": 1, "NEW": 1, "SAME": 1}
    assert comparison.code() == 4


def test_failed_start_belongs_to_every_world() -> None:
    failed = failed_record(CASE, 0, "failed", "no rank came")
    assert (
        find_series(compare_records(make_repetitions(world=TWO_NODES), [failed])).word == "FAILED"
    )


def test_world_words_count_ranks_and_nodes() -> None:
    assert world_words(WORLD) == "4 ranks on 1 node, gloo, cpu"


def test_runs_without_a_common_series_are_refused() -> None:
    assert "share no series" in usage_error(
        compare_records, make_repetitions(), make_repetitions(OTHER_CASE)
    )
    assert "share no series" in usage_error(compare_records, [], make_repetitions())


def curve(factors: dict[int, float]) -> list[Record]:
    cases = {size: collective_case(size_bytes=1024 * size) for size in factors}
    return [
        record
        for size, factor in factors.items()
        for record in make_repetitions(cases[size], factor)
    ]


def test_family_is_a_curve_ordered_by_size() -> None:
    base, new = curve({16: 1, 1: 1, 64: 1, 4: 1}), curve({16: 1.2, 1: 1.0, 64: 1.2, 4: 1.0})
    comparison = compare_records(
        [*base, *make_repetitions(step_case())], [*new, *make_repetitions(step_case())]
    )
    family, single = comparison.families
    assert [series.word for series in family.series] == ["SAME", "SAME", "SLOWER", "SLOWER"]
    assert (family.word, single.word) == ("SLOWER", "SAME")
    assert family.name == "collective.all_reduce dtype=float32 mode=blocking"
    assert family.p_value is not None
    assert family.p_value < 0.05
    modes = [
        record
        for mode in ("blocking", "graph")
        for record in make_repetitions(collective_case(mode=mode))
    ]
    assert len(compare_records(modes, modes).families) == 2


def test_unjudged_series_shift_no_verdict() -> None:
    cases = [collective_case(size_bytes=1024 * 4**i) for i in range(4)]
    base = [record for case in cases for record in make_repetitions(case)]
    new = [
        *make_repetitions(cases[0], 1.2),
        *make_repetitions(cases[1], 1.2, count=2),
        failed_record(cases[2]),
    ]
    new += make_repetitions(cases[3], 0.8)
    verdicts = [series.word for series in compare_records(base, new).series]
    assert verdicts == ["SLOWER", "INSUFFICIENT", "FAILED", "FASTER"]


def test_many_series_raise_the_threshold() -> None:
    suspect, others = (
        collective_case("all_gather"),
        [collective_case(f"other{i}") for i in range(20)],
    )
    factors = (1.055, 1.085, 1.045, 1.07, 1.06)
    new = [ok_record(suspect, i, 1e-3 * factor) for i, factor in enumerate(factors)]
    assert find_series(compare_records(make_repetitions(suspect), new), suspect).word == "SLOWER"
    same = [record for case in others for record in make_repetitions(case)]
    comparison = compare_records([*make_repetitions(suspect), *same], [*new, *same])
    assert (find_series(comparison, suspect).word, comparison.code()) == ("AMBIGUOUS", 0)


def test_exit_code_is_that_of_the_worst_verdict() -> None:
    assert (WORST_FIRST[0], WORST_FIRST[-1]) == ("WRONG", "SAME")
    failed = failed_record(OTHER_CASE, 0, "failed")
    table = (
        ([*make_repetitions(factor=1.2), failed], 1, 1),
        ([*make_repetitions(count=2), failed], 4, 4),
        ([*make_repetitions(), *make_repetitions(OTHER_CASE, count=1)], 0, 3),
        (BOTH, 0, 0),
    )
    for new, code, strict_code in table:
        comparison = compare_records(BOTH, new)
        assert (comparison.code(), comparison.code(fail_on_unknown=True)) == (code, strict_code)
