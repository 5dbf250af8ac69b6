"""A traced step is spans within it: arithmetic, each communication from its issue to its end, and what is neither."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_communication import trained
from torch.profiler import record_function

from bench.compat import TraceEvent
from bench.world import World
from workloads.communication import counted
from workloads.intervals import Span, break_down, gaps, intersection, length
from workloads.trace import COMPUTE, STEP, Trace, _on_device, trace_step

CPU = torch.device("cpu")
NAP_SECONDS = 0.02
NAP_NS = 20_000_000
NAMES = ["ddp:prepare", "zero1:prepare", "fsdp:zero3", "tp:tp", "tp:tp_sp"]


def timed(step: Callable[[], object]) -> Trace:
    trace_step(step, CPU)  # what torch does the first time is in no gap of the second
    return trace_step(step, CPU)


def calculate() -> None:
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()


def calculate_and_nap() -> None:
    calculate()
    time.sleep(NAP_SECONDS)
    calculate()


def nap_as_compute() -> None:
    calculate()
    with record_function(COMPUTE):
        time.sleep(NAP_SECONDS)


def inside(spans: list[Span], step: Span) -> bool:
    return all(step[0] <= start < stop <= step[1] for start, stop in spans)


# ---- what ranks do


def trace_and_num_calls(world: World, name: str) -> tuple[Trace, int]:
    step = trained(world, name)
    num_calls = len(counted(step.step, step.layout.axes))
    trace = trace_step(step.step, world.device)
    step.close()
    return trace, num_calls


def reductions_with_a_late_rank(world: World) -> Trace:
    """Trace three sums, to the second of which the last rank comes late."""
    tensor = torch.ones(64)

    def step() -> None:
        for number in range(3):
            if number == 1 and world.rank == world.size - 1:
                time.sleep(NAP_SECONDS)
            dist.all_reduce(tensor, group=world.group)
            tensor.mul_(0.5)

    world.barrier()
    return trace_step(step, world.device)


def tensor_parallel_with_a_late_rank(world: World) -> Trace:
    """Trace a step whose calls are made from within operators on DTensors; the last rank comes late."""
    step = trained(world, "tp:tp")
    world.barrier()

    def late() -> None:
        if world.rank == world.size - 1:
            time.sleep(5 * NAP_SECONDS)
        step.step()

    trace = trace_step(late, world.device)
    step.close()
    return trace


# ---- tests of one process


def test_arithmetic_lies_inside_the_step_and_nothing_is_communication() -> None:
    trace = timed(calculate)
    assert length(trace.compute) > 0
    assert inside(trace.compute, trace.step)
    assert (trace.comm, trace.copies, trace.called) == ([], [], [])
    assert intersection(trace.compute, trace.busy) == trace.compute


def test_the_wall_by_our_own_clock_is_that_of_the_step() -> None:
    trace = timed(calculate_and_nap)
    assert trace.wall_seconds >= NAP_SECONDS
    assert trace.wall_seconds == pytest.approx((trace.step[1] - trace.step[0]) / 1e9, abs=0.01)


def test_a_nap_is_a_gap_between_arithmetic() -> None:
    trace = timed(calculate_and_nap)
    asleep = [span for span in gaps(trace.busy, trace.step) if length([span]) >= NAP_NS]
    assert len(asleep) == 1
    assert trace.compute[0][1] <= asleep[0][0]
    assert trace.compute[-1][0] >= asleep[0][1]
    assert intersection(trace.compute, asleep) == []


def test_a_nap_that_is_called_compute_is_compute() -> None:
    trace = timed(nap_as_compute)
    assert max(length([span]) for span in trace.compute) >= NAP_NS
    assert inside(trace.compute, trace.step)
    assert not [span for span in gaps(trace.busy, trace.step) if length([span]) >= NAP_NS]


# ---- tests of a device's events, as kineto tells them


def event(name: str, start_ns: int, stop_ns: int, *, device: bool = True, annotation: bool = False) -> TraceEvent:
    return TraceEvent(
        name=name,
        start_ns=start_ns,
        stop_ns=stop_ns,
        thread=1,
        device=device,
        asynchronous=False,
        annotation=annotation,
    )


KERNELS = [
    event("ampere_sgemm_128x64", 0, 400),
    event("ncclDevKernel_AllReduce_Sum_f32", 300, 740),
    event("Memcpy DtoD (Device -> Device)", 740, 760),
    event("Memset (Device)", 750, 770),
    event("vectorized_elementwise_kernel", 770, 1000),
]
RANGES = [
    event(STEP, 0, 1000, annotation=True),
    event("parbench:forward", 0, 740, annotation=True),
    event("nccl:all_reduce", 300, 740, annotation=True),
    event("DistributedDataParallel.forward", 0, 1000, annotation=True),
]
HOST = [event(STEP, 0, 1000, device=False, annotation=True), event("c10d::allreduce_", 100, 150, device=False)]


def test_ranges_that_stand_on_the_device_too_are_no_kernels() -> None:
    trace = _on_device([*HOST, *RANGES, *KERNELS], 1e-6)
    assert trace.compute == [(0, 400), (770, 1000)]
    assert trace.comm == [(300, 740)]
    assert trace.copies == [(740, 770)]
    found = break_down(trace.step, trace.compute, {"dp": trace.comm}, trace.copies)
    assert found.exposed_comm_seconds["dp"] == pytest.approx(340e-9)
    assert found.compute_seconds == pytest.approx(630e-9)


def test_a_device_s_events_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has ten thousands of kernels: none is looked for among the others."""

    def never(one: object, other: object) -> bool:
        raise AssertionError("events are compared")

    monkeypatch.setattr(TraceEvent, "__eq__", never)
    assert len(_on_device([*HOST, *KERNELS * 3], 1e-6).comm) == 3


# ---- tests of two ranks


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_span_inside_the_step_for_every_counted_call(two_ranks: Ranks, name: str) -> None:
    for trace, num_calls in two_ranks.call("test_trace:trace_and_num_calls", name=name):
        assert len(trace.comm) == num_calls > 0
        for spans in (trace.compute, trace.comm, trace.called, trace.busy):
            assert length(spans) > 0
            assert inside(spans, trace.step)
        assert trace.copies == []


@pytest.mark.parametrize("name", NAMES)
def test_issuing_communication_or_waiting_for_it_is_no_arithmetic(two_ranks: Ranks, name: str) -> None:
    for trace, _ in two_ranks.call("test_trace:trace_and_num_calls", name=name):
        assert intersection(trace.compute, trace.called) == []


def test_a_communication_lasts_until_the_late_rank_has_come(two_ranks: Ranks) -> None:
    punctual, late = two_ranks.call("test_trace:reductions_with_a_late_rank")
    assert [length([span]) >= NAP_NS / 2 for span in punctual.comm] == [False, True, False]
    assert [length([span]) >= NAP_NS / 2 for span in late.comm] == [False, False, False]
    assert length(punctual.compute) < NAP_NS / 2
    assert max(length([span]) for span in gaps(late.busy, late.step)) >= NAP_NS


def test_an_operator_that_waits_for_a_late_rank_does_no_arithmetic_meanwhile(two_ranks: Ranks) -> None:
    punctual, _ = two_ranks.call("test_trace:tensor_parallel_with_a_late_rank")
    assert length(punctual.comm) >= 4 * NAP_NS
    assert max(length([span]) for span in punctual.compute) < 2 * NAP_NS
