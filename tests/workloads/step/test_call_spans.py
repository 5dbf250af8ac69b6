"""Kernels of communication are matched with the calls that launched them."""

from typing import Any

import pytest

from parbench.bench.results.step_trace import StepTrace
from parbench.workloads.step.call_spans import find_call_spans

ISSUED = [(0, 10), (20, 30)]


def make_trace(**fields: Any) -> StepTrace:
    return StepTrace(step=(0, 100), wall_seconds=1e-7, **fields)


def test_spans_on_a_host_are_in_order_of_issue() -> None:
    trace = make_trace(comm=[(0, 5), (7, 9)])
    assert find_call_spans(trace, ["dp", "tp"]) == [(0, 5), (7, 9)]
    assert find_call_spans(trace, ["dp"]) is None


def test_kernel_belongs_to_the_call_that_launched_it() -> None:
    # The kernel of the second call starts first, on another communicator.
    trace = make_trace(comm=[(40, 50), (60, 80)], issue_spans=ISSUED, launch_times=[25, 5])
    assert find_call_spans(trace, ["dp", "tp"]) == [(60, 80), (40, 50)]


def test_kernels_of_one_call_are_one_span() -> None:
    trace = make_trace(
        comm=[(40, 50), (60, 80), (85, 90)], issue_spans=ISSUED, launch_times=[5, 6, 25]
    )
    assert find_call_spans(trace, ["dp", "tp"]) == [(40, 80), (85, 90)]


@pytest.mark.parametrize(
    ("axes", "spans"),
    [(["dp", "dp"], [(40, 50), (40, 50)]), (["tp", "dp"], [None, (40, 50)])],
)
def test_kernel_of_coalesced_calls_belongs_to_all(
    axes: list[str], spans: list[tuple[int, int] | None]
) -> None:
    # A kernel that is launched after the last call belongs to the earlier calls of its axis too.
    trace = make_trace(comm=[(40, 50)], issue_spans=ISSUED, launch_times=[35])
    assert find_call_spans(trace, axes) == spans
