"""A traced step is spans within it, each rank's and all ranks' on one clock: arithmetic, communication, and neither."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.profiler import record_function
from training_steps import trained

from parbench.bench.results.records import RankTimeline
from parbench.bench.results.spans import Span, break_down, gaps, intersection, length
from parbench.bench.results.traced import COMPUTE, STEP, Trace, TraceEvent, on_device, rank_timeline
from parbench.bench.world.world import World
from parbench.workloads.step.probe import trace_step
from parbench.workloads.step.sent_bytes import counted

CPU = torch.device("cpu")
NAP_SECONDS = 0.02
NAP_NS = 20_000_000
US = 1000


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
    step = trained(world, "tp")
    world.barrier()

    def late() -> None:
        if world.rank == world.size - 1:
            time.sleep(5 * NAP_SECONDS)
        step.step()

    trace = trace_step(late, world.device)
    step.close()
    return trace


def traces(world: World, names: list[str]) -> dict[str, tuple[Trace, int, RankTimeline]]:
    """Return of each step its trace, how many calls were counted, and this rank's timeline."""
    found = {}
    for name in names:
        step = trained(world, name)
        calls = counted(step.step, step.layout.axes)
        for _ in range(2):  # the first time torch's profiler misses some of gloo's events
            trace = trace_step(step.step, world.device)
        timeline = rank_timeline(world.rank, trace, [("dp", "communication", span) for span in trace.comm], 0)
        found[name] = trace, len(calls), timeline
        step.close()
    return found


def test_arithmetic_lies_inside_the_step_and_nothing_is_communication() -> None:
    trace = timed(calculate)
    assert length(trace.compute) > 0
    assert inside(trace.compute, trace.step)
    assert (trace.comm, trace.copies, trace.called) == ([], [], [])
    assert intersection(trace.compute, trace.busy) == trace.compute


def test_a_nap_is_a_gap_between_arithmetic_unless_it_is_called_compute() -> None:
    trace = timed(calculate_and_nap)
    asleep = [span for span in gaps(trace.busy, trace.step) if length([span]) >= NAP_NS]
    assert asleep
    assert trace.compute[0][1] <= asleep[0][0]
    assert trace.compute[-1][0] >= asleep[-1][1]
    assert intersection(trace.compute, asleep) == []
    assert trace.wall_seconds >= NAP_SECONDS
    named = timed(nap_as_compute)
    assert max(length([span]) for span in named.compute) >= NAP_NS
    assert inside(named.compute, named.step)


# ---- a device's events, as kineto tells them


def event(name: str, start_ns: int, stop_ns: int, *, device: bool = True, annotation: bool = False) -> TraceEvent:
    kind: Any = {"asynchronous": False, "device": device, "annotation": annotation}
    return TraceEvent(name=name, start_ns=start_ns, stop_ns=stop_ns, thread=1, **kind)


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
    trace = on_device([*HOST, *RANGES, *KERNELS], 1e-6)
    assert (trace.compute, trace.comm, trace.copies) == ([(0, 400), (770, 1000)], [(300, 740)], [(740, 770)])
    assert trace.called == [(100, 150)]
    assert trace.kernels == len([one for one in KERNELS if not one.name.startswith("Mem")]), "and no copies"
    found = break_down(trace.step, trace.compute, {"dp": trace.comm}, trace.copies)
    assert found.exposed_comm_seconds["dp"] == pytest.approx(340e-9)
    assert found.compute_seconds == pytest.approx(630e-9)


TRACE = Trace(
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


def test_intervals_are_clipped_to_the_step_and_begin_with_it_or_as_much_later_as_the_rank() -> None:
    expected = [
        ("phase", "forward", 0.0, 9.0),
        ("phase", "backward", 9.0, 20.0),
        ("compute", "compute", 0.0, 5.0),
        ("compute", "compute", 10.0, 15.0),
        ("copy", "copy", 5.0, 7.0),
        ("comm dp", "all_reduce", 4.0, 11.0),
        ("comm tp", "all_gather", 13.0, 20.0),
    ]
    for late in (0, 3):
        comm = zip(("dp", "tp"), ("all_reduce", "all_gather"), TRACE.comm, strict=True)
        found = rank_timeline(1, TRACE, comm, late * US)
        shown = [(one.stream, one.name, one.start_us, one.stop_us) for one in found.intervals]
        assert shown == [(stream, name, start + late, stop + late) for stream, name, start, stop in expected]
        assert (found.rank, found.start_us, found.stop_us) == (1, late, 20 + late)


def assert_traced(ranks: Ranks, *names: str) -> None:
    """There is a span inside the step for every counted call, and neither issuing nor awaiting one is arithmetic."""
    for found in ranks.call("test_trace:traces", names=list(names)):
        for name, (trace, num_calls, mine) in found.items():
            assert len(trace.comm) == num_calls > 0, name
            nearly = (trace.step[0] - 100_000, trace.step[1] + 100_000)  # other threads end theirs by another clock
            for spans in (trace.compute, trace.comm, trace.called, trace.busy):
                assert length(spans) > 0, name
                assert inside(spans, nearly), name
            assert trace.copies == [], name
            assert intersection(trace.compute, trace.called) == [], name
            assert {one.stream for one in mine.intervals} == {"phase", "compute", "comm dp"}, name
            phases = [one.name for one in mine.intervals if one.stream == "phase"]
            assert phases == ["forward", "backward", "update"], name
            computed = sum(one.stop_us - one.start_us for one in mine.intervals if one.stream == "compute") / 1e6
            assert computed == pytest.approx(length(trace.compute) / 1e9, rel=1e-6), name
            assert all(mine.start_us <= one.start_us < one.stop_us <= mine.stop_us for one in mine.intervals), name


@pytest.mark.measures  # a thread of gloo may say that it is done some microseconds after the step
def test_a_traced_step_has_all_its_calls_and_phases(two_ranks: Ranks) -> None:
    assert_traced(two_ranks, "ddp", "zero3", "tp_sp")


@pytest.mark.full
def test_so_has_every_other(two_ranks: Ranks) -> None:
    assert_traced(two_ranks, "zero1", "zero2", "hsdp", "tp")


@pytest.mark.measures
def test_a_communication_lasts_until_the_late_rank_has_come(two_ranks: Ranks) -> None:
    punctual, late = two_ranks.call("test_trace:reductions_with_a_late_rank")
    assert [length([span]) >= NAP_NS / 2 for span in punctual.comm] == [False, True, False]
    assert [length([span]) >= NAP_NS / 2 for span in late.comm] == [False, False, False]
    assert length(punctual.compute) < NAP_NS / 2
    assert max(length([span]) for span in gaps(late.busy, late.step)) >= NAP_NS


@pytest.mark.full
@pytest.mark.measures
def test_an_operator_that_waits_for_a_late_rank_does_no_arithmetic_meanwhile(two_ranks: Ranks) -> None:
    punctual, _ = two_ranks.call("test_trace:tensor_parallel_with_a_late_rank")
    assert length(punctual.comm) >= 4 * NAP_NS
    assert max(length([span]) for span in punctual.compute) < 2 * NAP_NS
