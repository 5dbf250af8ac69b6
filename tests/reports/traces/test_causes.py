"""The first cause of a synthetic step is the fault that was drawn into it."""

from dataclasses import replace
from pathlib import Path

import pytest

from parbench.reports.traces.causes import causes_of, step_seconds, waits_by_rank
from parbench.reports.traces.steps import job_of, read_steps
from tests.support.drawn_steps import (
    FAULTS,
    draw_late_rank,
    draw_one_bucket,
    make_job,
)
from tests.support.kineto_files import RankFile


@pytest.mark.parametrize("kind", FAULTS)
def test_first_cause_is_the_fault_of_the_step(kind: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, FAULTS[kind])
    assert step_seconds(job) == pytest.approx(10e-3)
    assert causes_of(job)[0].kind == kind


def test_late_rank_is_found_across_clocks(tmp_path: Path) -> None:
    job = make_job(tmp_path, draw_late_rank, num_hosts=4)
    assert "clocks" in job.notes[-1]
    waits = waits_by_rank(job)
    assert waits[2] == pytest.approx([2e-3] * 4)
    assert waits[0] == [0.0] * 4
    assert "rank 2" in causes_of(job)[0].sentence


@pytest.mark.parametrize(("doubt_ms", "is_late"), [(1, True), (3, False)])
def test_late_rank_must_exceed_the_doubt_of_clocks(
    tmp_path: Path, doubt_ms: int, is_late: bool
) -> None:
    job = make_job(tmp_path, draw_late_rank)
    job = replace(job, doubt_ns=doubt_ms * 1_000_000)
    kinds = {cause.kind for cause in causes_of(job)}
    assert ("late rank" in kinds) == is_late


def test_collective_slower_than_the_fit_is_a_slow_link(tmp_path: Path) -> None:
    job = make_job(tmp_path, draw_one_bucket)
    cause, *_ = causes_of(job, lambda call: call.transfer_ns / 1e9 / 2)
    assert cause.kind == "slow link"
    assert cause.evidence["won_seconds"] == pytest.approx(1.25e-3, rel=0.01)


def test_short_gaps_between_operators_are_no_cause(tmp_path: Path) -> None:
    file = RankFile(0, 1)
    file.event("user_annotation", "ProfilerStep#1", 0, 14_000)
    for number in range(40):
        start = 350 * number
        file.event("cpu_op", "aten::mm", start, start + 245)
    steps = read_steps(file.write(tmp_path))
    assert causes_of(job_of([steps])) == ()
