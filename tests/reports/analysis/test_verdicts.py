"""Verdicts on a run: correct, complete and quiet, with problems, and notes on emulation."""

import pytest
from msgspec.structs import replace

from parbench.bench.plan.plan import Plan, SkippedCase
from parbench.bench.results.records import Check, Record
from parbench.reports.analysis.verdicts import ReportVerdict, describe_emulations, judge_run
from parbench.reports.run_data import RunData
from tests.support.reports.nodes_fixtures import EMULATION
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    out_of_budget_record,
    step_case,
)

FIRST = collective_case()
SECOND = collective_case(size_bytes=2048)
STEP = step_case()
NO_SPACE = SkippedCase(case=step_case("large"), reason="needs 4 ranks")


def judge(plan: Plan, *records: Record) -> dict[str, ReportVerdict]:
    """Return the verdicts on a run by their word."""
    verdicts = judge_run(RunData(make_run(plan, records)))
    return {verdict.word: verdict for verdict in verdicts}


FIRST_TWICE = [ok_record(FIRST, 0), ok_record(FIRST, 1)]


@pytest.mark.parametrize(
    ("record", "word", "level", "count"),
    [
        (ok_record(FIRST), "CORRECT", "good", "2 of 2"),
        (failed_record(FIRST, 0, "wrong"), "WRONG", "bad", "1 of 2"),
        (
            ok_record(FIRST, check=Check(passed=None)),
            "CORRECT",
            "doubtful",
            "1 of 2",
        ),
    ],
)
def test_correctness_counts_checked_results(
    record: Record, word: str, level: str, count: str
) -> None:
    verdict = judge(make_plan([FIRST, SECOND]), ok_record(SECOND), record)[word]
    assert verdict.level == level
    assert count in verdict.message


def test_complete_run_has_every_repetition() -> None:
    plan = make_plan([FIRST], repetitions=2, skipped=[NO_SPACE])
    verdict = judge(plan, *FIRST_TWICE)["COMPLETE"]
    assert verdict.level == "good"
    assert "1 case cannot run" in verdict.message


def test_broken_run_counts_failures() -> None:
    plan = make_plan([FIRST, SECOND, STEP], repetitions=2)
    records = [*FIRST_TWICE, failed_record(SECOND), failed_record(STEP, 0, "hang")]
    verdict = judge(plan, *records)["BROKEN"]
    assert verdict.level == "bad"
    assert "1 failed and 1 hung of 3" in verdict.message


def test_partial_run_proposes_a_budget() -> None:
    plan = make_plan([FIRST, SECOND, STEP], repetitions=2)
    records = [*FIRST_TWICE, ok_record(SECOND, 0), out_of_budget_record(SECOND, 1)]
    records += [out_of_budget_record(STEP, 0), out_of_budget_record(STEP, 1)]
    verdict = judge(plan, *records)["PARTIAL"]
    assert verdict.level == "bad"
    assert "2 of 3 cases ran fewer than 2 repetitions" in verdict.message
    assert "--budget" in verdict.hint


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (out_of_budget_record(FIRST, 0), "out of time"),
        (failed_record(FIRST, 0, "skipped", "no float8"), "no float8"),
    ],
)
def test_nothing_measured_has_a_reason(record: Record, reason: str) -> None:
    verdict = judge(make_plan([FIRST]), record)["NOTHING MEASURED"]
    assert verdict.level == "bad"
    assert reason in verdict.message
    assert ("--budget" in verdict.hint) == (reason == "out of time")


def test_noise_is_the_variation_of_repetitions() -> None:
    quiet = [ok_record(FIRST, repetition, 1e-3) for repetition in range(3)]
    noisy = [ok_record(SECOND, repetition, 1e-3 * 2**repetition) for repetition in range(3)]
    assert judge(make_plan([FIRST], repetitions=3), *quiet)["QUIET"].level == "good"
    plan = make_plan([FIRST, SECOND], repetitions=3)
    verdict = judge(plan, *quiet, *noisy)["NOISY"]
    assert verdict.level == "doubtful"
    assert "1 of 2 cases" in verdict.message


def test_noise_of_a_single_repetition_is_unknown() -> None:
    verdict = judge(make_plan([FIRST]), ok_record(FIRST))["NOISE UNKNOWN"]
    assert verdict.level == "doubtful"


def test_emulation_may_be_of_records_or_the_plan() -> None:
    sentences = (f"emulated: {EMULATION}",)
    assert (
        describe_emulations(run_from_records(ok_record(FIRST, emulation=EMULATION)))
        == sentences
    )
    run = run_from_records(ok_record(SECOND))
    assert describe_emulations(run) == ()
    plan = replace(run.info.plan, emulation=EMULATION)
    assert describe_emulations(replace(run, info=replace(run.info, plan=plan))) == sentences
