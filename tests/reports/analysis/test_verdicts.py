"""Verdicts on a run: correct, complete and quiet, with problems, and notes on emulation."""

from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.machine.environment import DISTURBANCES, VOLATILE
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Plan, Skipped
from parbench.bench.results.records import Check, Record
from parbench.reports.analysis.summary import summarize
from parbench.reports.analysis.verdicts import (
    Verdict,
    bad_rows,
    emulations,
    not_measured,
    other_claims,
    verdicts,
)
from tests.support.nodes_fixtures import EMULATION
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    collective_case,
    failed_record,
    hang_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
)

FIRST = collective_case()
SECOND = collective_case(size_bytes=2048)
STEP = step_case()
NO_SPACE = Skipped(case=step_case("large"), reason="needs 4 ranks")


def judge(plan: Plan, *records: Record, environment: Any = None) -> dict[str, Verdict]:
    """Return the verdicts on a run by their word."""
    run = make_run(plan, records, environment)
    return {verdict.word: verdict for verdict in verdicts(run, summarize(run))}


def cut_record(case: Case, launch: int) -> Record:
    return failed_record(case, launch, "skipped", LEFT_OUT)


UNCHECKED = ok_record(FIRST, check=Check(passed=None))


@pytest.mark.parametrize(
    ("records", "word", "level", "count"),
    [
        ([ok_record(FIRST), ok_record(SECOND)], "CORRECT", "good", "2 of 2"),
        ([ok_record(FIRST), failed_record(SECOND, 0, "wrong")], "WRONG", "bad", "1 of 2"),
        ([ok_record(SECOND), UNCHECKED], "CORRECT", "doubtful", "1 of 2"),
        ([UNCHECKED], "UNCHECKED", "doubtful", "0 of 1"),
    ],
)
def test_correctness_counts_checked_results(
    records: list[Record], word: str, level: str, count: str
) -> None:
    plan = make_plan([record.case for record in records])
    verdict = judge(plan, *records)[word]
    assert verdict.level == level
    assert count in verdict.told


BOTH = [ok_record(FIRST, 0), ok_record(FIRST, 1)]


def test_complete_run_has_every_repetition() -> None:
    plan = make_plan([FIRST], launches=2, skipped=[NO_SPACE])
    verdict = judge(plan, *BOTH)["COMPLETE"]
    assert verdict.level == "good"
    assert "1 case cannot run" in verdict.told


def test_broken_run_counts_failures() -> None:
    plan = make_plan([FIRST, SECOND, STEP], launches=2)
    verdict = judge(plan, *BOTH, failed_record(SECOND), failed_record(STEP, 0, "hang"))["BROKEN"]
    assert verdict.level == "bad"
    assert "1 failed and 1 hung of 3" in verdict.told


def test_partial_run_proposes_a_budget() -> None:
    plan = make_plan([FIRST, SECOND, STEP], launches=2)
    cut = [cut_record(SECOND, 1), cut_record(STEP, 0), cut_record(STEP, 1)]
    verdict = judge(plan, *BOTH, ok_record(SECOND, 0), *cut)["PARTIAL"]
    assert verdict.level == "bad"
    assert "1 have none of 2, 1 have 1 of 2" in verdict.told
    assert "--budget" in verdict.remedy
    plan = make_plan([FIRST], launches=3)
    assert judge(plan, *BOTH, cut_record(FIRST, 2))["PARTIAL"].level == "doubtful"


@pytest.mark.parametrize(
    ("plan", "records", "reason"),
    [
        (make_plan([FIRST]), [cut_record(FIRST, 0)], "the budget of 1 min 30 s"),
        (make_plan([FIRST]), [failed_record(FIRST, 0, "skipped", "no float8")], "no float8"),
        (make_plan([], skipped=[NO_SPACE]), [], "needs 4 ranks"),
    ],
)
def test_nothing_measured_has_a_reason(plan: Plan, records: list[Record], reason: str) -> None:
    verdict = judge(plan, *records)["NOTHING MEASURED"]
    assert verdict.level == "bad"
    assert reason in verdict.told


def test_noise_is_the_variation_of_repetitions() -> None:
    quiet = [ok_record(FIRST, launch, 1e-3 * (1 + 0.001 * launch)) for launch in range(3)]
    noisy = [ok_record(SECOND, launch, 1e-3 * 2**launch) for launch in range(3)]
    assert judge(make_plan([FIRST], launches=3), *quiet)["QUIET"].level == "good"
    load = {VOLATILE: {DISTURBANCES: {"load average": "3.10 on 2 cores"}}}
    plan = make_plan([FIRST, SECOND], launches=3)
    verdict = judge(plan, *quiet, *noisy, environment=load)["NOISY"]
    assert verdict.level == "doubtful"
    assert "1 of 2 cases" in verdict.told
    assert "load average 3.10 on 2 cores" in verdict.told
    assert judge(make_plan([FIRST]), ok_record(FIRST))["NOISE UNKNOWN"].level == "doubtful"


def test_bad_rows_have_status_repetitions_and_reason() -> None:
    records = [
        hang_record(FIRST, 0),
        failed_record(FIRST, 1, "skipped", "not tried again"),
        failed_record(SECOND, reason=""),
        ok_record(STEP),
    ]
    first, second = bad_rows(summarize(run_from_records(*records, launches=2)))
    assert first.case == FIRST.label
    assert first.status == "hang"
    assert first.launches == "1/2"
    assert first.reason == "rank 1 did not arrive within 60 s"
    assert "no reason" in second.reason


def test_not_measured_includes_skips_of_plan_and_run() -> None:
    plan = make_plan([FIRST], skipped=[NO_SPACE])
    summary = summarize(make_run(plan, [failed_record(FIRST, 0, "skipped", "no float8")]))
    reasons = [(problem.launches, problem.reason) for problem in not_measured(summary)]
    assert reasons == [("all", "needs 4 ranks"), ("1/1", "no float8")]
    assert bad_rows(summary) == ()


SHARED = "functional only: 4 ranks on 2 cores"


def test_emulation_may_be_of_records_or_the_plan() -> None:
    emulated, usual = ok_record(FIRST, notes=[EMULATION, EMULATION]), ok_record(SECOND)
    assert emulations(run_from_records(emulated)) == (EMULATION,)
    assert emulations(run_from_records(emulated, usual)) == (f"{EMULATION} (1 of 2 records)",)
    run = run_from_records(usual)
    assert emulations(run) == ()
    plan = replace(run.info.plan, notes=(EMULATION, SHARED))
    run = replace(run, info=replace(run.info, plan=plan))
    assert emulations(run) == (EMULATION,)
    assert other_claims(run) == (SHARED,)
