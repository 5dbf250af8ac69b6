"""A traced step is spans of compute, communication and copies on one clock."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbench.bench.results.records import RankTimeline
from parbench.bench.results.spans import Span, break_down, gaps, intersection, length
from parbench.bench.results.traced import STEP, Trace, TraceEvent, on_device, rank_timeline
from parbench.bench.world.world import World
from parbench.workloads.step.probe import trace_step
from parbench.workloads.step.sent_bytes import counted
from tests.support.ranks import Ranks
from tests.support.training_steps import build_trained_step

NAP_NS = 20_000_000
US = 1000


def trace_on_cpu(step: Callable[[], object]) -> Trace:
    device = torch.device("cpu")
    trace_step(step, device)  # torch initializes its profiler within the first trace
    return trace_step(step, device)


def multiply() -> None:
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()


def multiply_and_nap() -> None:
    multiply()
    time.sleep(NAP_NS / 1e9)
    multiply()


def is_inside(spans: list[Span], step: Span) -> bool:
    return all(step[0] <= start < stop <= step[1] for start, stop in spans)


def test_trace_of_compute() -> None:
    trace = trace_on_cpu(multiply)
    assert length(trace.compute) > 0
    assert is_inside(trace.compute, trace.step)
    assert intersection(trace.compute, trace.busy) == trace.compute
    assert trace.comm == trace.copies == trace.called == []


def test_trace_of_sleep_is_a_gap() -> None:
    trace = trace_on_cpu(multiply_and_nap)
    [nap] = [span for span in gaps(trace.busy, trace.step) if length([span]) >= NAP_NS]
    assert trace.compute[0][1] <= nap[0]
    assert nap[1] <= trace.compute[-1][0]
    assert intersection(trace.compute, [nap]) == []


def make_event(name: str, start_ns: int, stop_ns: int, **attributes: bool) -> TraceEvent:
    kind: Any = {"asynchronous": False, "device": True, "annotation": False, **attributes}
    return TraceEvent(name=name, start_ns=start_ns, stop_ns=stop_ns, thread=1, **kind)


def test_device_trace_ignores_annotations() -> None:
    """Kineto repeats annotated ranges on the device, where they are not kernels."""
    events = [
        make_event(STEP, 0, 1000, device=False, annotation=True),
        make_event("c10d::allreduce_", 100, 150, device=False),
        make_event(STEP, 0, 1000, annotation=True),
        make_event("parbench:forward", 0, 740, annotation=True),
        make_event("nccl:all_reduce", 300, 740, annotation=True),
        make_event("ampere_sgemm_128x64", 0, 400),
        make_event("ncclDevKernel_AllReduce_Sum_f32", 300, 740),
        make_event("Memcpy DtoD (Device -> Device)", 740, 760),
        make_event("Memset (Device)", 750, 770),
        make_event("vectorized_elementwise_kernel", 770, 1000),
    ]
    trace = on_device(events, 1e-6)
    assert trace.compute == [(0, 400), (770, 1000)]
    assert trace.comm == [(300, 740)]
    assert trace.copies == [(740, 770)]
    assert trace.called == [(100, 150)]
    assert trace.kernels == 3
    parts = break_down(trace.step, trace.compute, {"dp": trace.comm}, trace.copies)
    assert parts.exposed_comm_seconds["dp"] == pytest.approx(340e-9)
    assert parts.compute_seconds == pytest.approx(630e-9)


@pytest.mark.parametrize("late_us", [0, 3])
def test_rank_timeline_is_clipped_to_step(late_us: int) -> None:
    trace = Trace(
        step=(5 * US, 25 * US),
        wall_seconds=20e-6,
        compute=[(4 * US, 10 * US), (15 * US, 20 * US)],
        comm=[(9 * US, 16 * US), (18 * US, 30 * US)],
        copies=[(8 * US, 12 * US)],
        called=[],
        busy=[],
        began_ns=1_000_000,
        phases=[("forward", (5 * US, 14 * US)), ("backward", (14 * US, 25 * US))],
    )
    calls = [("dp", "all_reduce", trace.comm[0]), ("tp", "all_gather", trace.comm[1])]
    timeline = rank_timeline(1, trace, calls, late_us * US)
    expected = [
        ("phase", "forward", 0.0, 9.0),
        ("phase", "backward", 9.0, 20.0),
        ("compute", "compute", 0.0, 5.0),
        ("compute", "compute", 10.0, 15.0),
        ("copy", "copy", 5.0, 7.0),
        ("comm dp", "all_reduce", 4.0, 11.0),
        ("comm tp", "all_gather", 13.0, 20.0),
    ]
    intervals = [
        (i.stream, i.name, i.start_us - late_us, i.stop_us - late_us) for i in timeline.intervals
    ]
    assert intervals == expected
    assert (timeline.rank, timeline.start_us, timeline.stop_us) == (1, late_us, 20 + late_us)


def trace_steps(world: World, names: list[str]) -> list[tuple[Trace, int, RankTimeline]]:
    """Return for each step its trace, its number of calls, and this rank's timeline."""
    results = []
    for name in names:
        step = build_trained_step(world, name)
        num_calls = len(counted(step.step, step.layout.axes))
        for _ in range(2):  # the first time torch's profiler misses some of gloo's events
            trace = trace_step(step.step, world.device)
        calls = [("dp", "communication", span) for span in trace.comm]
        results.append((trace, num_calls, rank_timeline(world.rank, trace, calls, 0)))
        step.close()
    return results


@pytest.mark.measures  # a thread of gloo may finish some microseconds after the step
def test_traced_step_has_all_calls_and_phases(two_ranks: Ranks) -> None:
    names = ["ddp", "zero3", "tp_sp"]
    for results in two_ranks.call("tests.workloads.step.test_trace:trace_steps", names=names):
        for name, (trace, num_calls, timeline) in zip(names, results, strict=True):
            assert len(trace.comm) == num_calls > 0, name
            step = (trace.step[0] - 100_000, trace.step[1] + 100_000)  # threads have other clocks
            for spans in (trace.compute, trace.comm, trace.called, trace.busy):
                assert length(spans) > 0, name
                assert is_inside(spans, step), name
            assert intersection(trace.compute, trace.called) == trace.copies == [], name
            assert {i.stream for i in timeline.intervals} == {"phase", "compute", "comm dp"}, name
            phases = [i.name for i in timeline.intervals if i.stream == "phase"]
            assert phases == ["forward", "backward", "update"], name


def trace_with_late_rank(world: World) -> Trace:
    """Trace three sums; rank 1 comes late to the second."""
    tensor = torch.ones(64)

    def step() -> None:
        for number in range(3):
            if number == 1 and world.rank == 1:
                time.sleep(NAP_NS / 1e9)
            dist.all_reduce(tensor, group=world.group)
            tensor.mul_(0.5)

    world.barrier()
    return trace_step(step, world.device)


@pytest.mark.measures
def test_communication_lasts_until_late_rank_comes(two_ranks: Ranks) -> None:
    punctual, late = two_ranks.call("tests.workloads.step.test_trace:trace_with_late_rank")
    assert [length([span]) >= NAP_NS / 2 for span in punctual.comm] == [False, True, False]
    assert [length([span]) >= NAP_NS / 2 for span in late.comm] == [False, False, False]
    assert length(punctual.compute) < NAP_NS / 2
