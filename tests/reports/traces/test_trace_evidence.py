"""The first finding in a synthetic step is the fault that was drawn into it."""

from dataclasses import replace
from pathlib import Path

import pytest

from parbench.reports.findings.finding import Finding
from parbench.reports.findings.rules import apply_rules
from parbench.reports.traces.job import TracedJob, build_timeline, compute_waits, join_ranks
from parbench.reports.traces.rank_trace import read_rank
from parbench.reports.traces.trace_evidence import PredictSeconds, collect_evidence
from tests.support.reports.drawn_steps import (
    FAULTS,
    draw_late_rank,
    draw_one_bucket,
    draw_ring,
    make_job,
)
from tests.support.reports.kineto_files import RankFile


def find_in(job: TracedJob, predict: PredictSeconds | None = None) -> tuple[Finding, ...]:
    return apply_rules(collect_evidence(job, predict))


@pytest.mark.parametrize("fault", FAULTS)
def test_first_finding_is_the_fault_of_the_step(fault: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, FAULTS[fault])
    assert job.step_seconds == pytest.approx(10e-3)
    kind = "slow-rank" if fault == "late-rank" else fault
    assert find_in(job)[0].kind == kind


def test_messages_of_a_ring_are_no_pipeline(tmp_path: Path) -> None:
    findings = find_in(make_job(tmp_path, draw_ring))
    assert [finding.kind for finding in findings] == ["exposed-communication"]
    assert "pp" not in findings[0].command


def test_late_rank_is_found_across_clocks(tmp_path: Path) -> None:
    job = make_job(tmp_path, draw_late_rank, num_hosts=4)
    assert "clocks" in job.notes[-1]
    timeline = build_timeline(replace(job, clock_error_ns=3000))
    assert timeline.uncertainty_seconds == pytest.approx(3e-6)
    starts = [rank.start_us for rank in timeline.ranks]
    assert starts == pytest.approx([0.0] * 4)
    waits = compute_waits(job)
    assert waits[2] == pytest.approx(2e-3)
    assert waits[0] == 0.0
    assert "Rank 2 arrives last in 100 % of collectives of 4 steps" in find_in(job)[0].message


@pytest.mark.parametrize(("error_ms", "is_late"), [(1, True), (3, False)])
def test_late_rank_must_exceed_the_clock_error(
    tmp_path: Path, error_ms: int, is_late: bool
) -> None:
    job = make_job(tmp_path, draw_late_rank)
    job = replace(job, clock_error_ns=error_ms * 1_000_000)
    kinds = {finding.kind for finding in find_in(job)}
    assert ("slow-rank" in kinds) == is_late


def test_collective_slower_than_the_fit_is_found(tmp_path: Path) -> None:
    job = make_job(tmp_path, draw_one_bucket)
    findings = find_in(job, lambda shared: shared.transfer_ns / 1e9 / 2)
    [off_fit] = [finding for finding in findings if finding.kind == "off-fit"]
    assert off_fit.time_share == pytest.approx(0.125, rel=0.01)


@pytest.mark.parametrize(("gap_us", "kinds"), [(105, []), (1500, ["host-bound"])])
def test_only_long_gaps_between_operators_are_idle(
    tmp_path: Path, gap_us: int, kinds: list[str]
) -> None:
    file = RankFile(0, 1)
    file.event("user_annotation", "ProfilerStep#1", 0, 40 * (245 + gap_us))
    for number in range(40):
        start = (245 + gap_us) * number
        file.event("cpu_op", "aten::mm", start, start + 245)
    steps = read_rank(file.write(tmp_path))
    assert [finding.kind for finding in find_in(join_ranks([steps]))] == kinds
