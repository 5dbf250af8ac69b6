"""Kernels of communication are matched with the calls that launched them."""

from typing import Any

import pytest

from parbench.bench.results.step_trace import StepTrace
from parbench.workloads.probes.call_spans import find_call_spans
from tests.support.workloads.kernels import make_kernel

ISSUED = [(0, 10), (20, 30)]


def make_trace(**fields: Any) -> StepTrace:
    return StepTrace(step=(0, 100), **fields)


def test_spans_on_a_host_are_in_order_of_issue() -> None:
    trace = make_trace(comm=[make_kernel(0, 5), make_kernel(7, 9)])
    assert find_call_spans(trace, ["dp", "tp"]) == [(0, 5), (7, 9)]
    assert find_call_spans(trace, ["dp"]) is None


def test_kernel_belongs_to_the_call_that_launched_it() -> None:
    # The kernel of the second call starts first, on another communicator.
    kernels = [make_kernel(40, 50, 25), make_kernel(60, 80, 5)]
    trace = make_trace(comm=kernels, issue_spans=ISSUED)
    assert find_call_spans(trace, ["dp", "tp"]) == [(60, 80), (40, 50)]


def test_kernels_of_one_call_are_one_span() -> None:
    kernels = [make_kernel(40, 50, 5), make_kernel(60, 80, 6), make_kernel(85, 90, 25)]
    trace = make_trace(comm=kernels, issue_spans=ISSUED)
    assert find_call_spans(trace, ["dp", "tp"]) == [(40, 80), (85, 90)]


@pytest.mark.parametrize(
    ("axes", "spans"),
    [(["dp", "dp"], [(40, 50), (40, 50)]), (["tp", "dp"], [None, (40, 50)])],
)
def test_kernel_of_coalesced_calls_belongs_to_all(
    axes: list[str], spans: list[tuple[int, int] | None]
) -> None:
    # A kernel that is launched after the last call belongs to the earlier calls of its axis too.
    trace = make_trace(comm=[make_kernel(40, 50, 35)], issue_spans=ISSUED)
    assert find_call_spans(trace, axes) == spans
