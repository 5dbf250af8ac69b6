"""A traced step is spans of compute, communication and copies on one clock."""

import time
from collections.abc import Callable
from typing import Any

import torch

from parbench.bench.results.spans import Span, difference, length
from parbench.bench.results.step_trace import (
    STEP,
    StepTrace,
    TimedCall,
    TraceEvent,
    build_device_trace,
    build_rank_timeline,
    list_phases,
)
from parbench.workloads.probes.probe import trace_step

NAP_NS = 20_000_000
US = 1000


def trace_on_cpu(step: Callable[[], object]) -> StepTrace:
    device = torch.device("cpu")
    trace_step(step, device)  # torch initializes its profiler within the first trace
    return trace_step(step, device)


def multiply_and_nap() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)
    time.sleep(NAP_NS / 1e9)
    torch.ones(64, 64) @ torch.ones(64, 64)


def assert_inside(spans: list[Span], step: Span) -> None:
    for start, stop in spans:
        assert step[0] <= start < stop <= step[1]


def test_trace_of_compute_and_sleep() -> None:
    trace = trace_on_cpu(multiply_and_nap)
    assert length(trace.compute) > 0
    assert_inside(trace.compute, trace.step)
    assert trace.comm == []
    assert trace.copies == []
    nap = max(difference([trace.step], trace.compute), key=lambda span: length([span]))
    assert length([nap]) >= NAP_NS
    assert trace.compute[0][1] <= nap[0]
    assert nap[1] <= trace.compute[-1][0]


def make_event(name: str, start_ns: int, stop_ns: int, **attributes: Any) -> TraceEvent:
    kind = {"is_device": True, "is_async": False, "thread": 1, **attributes}
    return TraceEvent(name=name, start_ns=start_ns, stop_ns=stop_ns, **kind)


def test_trace_of_device() -> None:
    """Kineto repeats annotated ranges on the device, where they are not kernels."""
    events = [
        make_event(STEP, 0, 1000, is_device=False),
        make_event("c10d::allreduce_", 100, 150, is_device=False),
        make_event("cuLaunchKernelEx", 110, 115, is_device=False, correlation=7),
        make_event(STEP, 0, 1000, is_annotation=True),
        make_event("nccl:all_reduce", 300, 740, is_annotation=True),
        make_event("ampere_sgemm_128x64", 0, 400),
        make_event("ncclDevKernel_AllReduce_Sum_f32", 300, 740, correlation=7),
        make_event("Memcpy DtoD (Device -> Device)", 740, 760),
        make_event("Memset (Device)", 750, 770),
        make_event("vectorized_elementwise_kernel", 770, 1000),
    ]
    trace = build_device_trace(events)
    assert trace.compute == [(0, 400), (770, 1000)]
    assert [(kernel.span, kernel.launch_ns) for kernel in trace.comm] == [((300, 740), 110)]
    assert trace.copies == [(740, 770)]
    assert trace.issue_spans == [(100, 150)]


def test_phase_on_device_lasts_as_long_as_its_kernels() -> None:
    host = {"is_device": False}
    events = [
        make_event("parbench:forward", 0, 20, is_annotation=True, **host),
        make_event("cudaLaunchKernel", 10, 12, correlation=1, **host),
        make_event("sgemm", 100, 200, correlation=1),
        make_event("parbench:backward", 20, 60, is_annotation=True, **host),
        make_event("cudaLaunchKernel", 30, 32, correlation=2, **host),
        make_event("cudaLaunchKernel", 40, 42, correlation=3, **host),
        make_event("sgemm", 200, 300, correlation=2),
        make_event("ncclDevKernel_AllReduce_Sum_f32", 280, 500, correlation=3),
        make_event("parbench:data", 60, 90, is_annotation=True, **host),
    ]
    assert list_phases(events) == [
        ("forward", (100, 200)),
        ("backward", (200, 500)),
        ("data", (60, 90)),
    ]


def test_rank_timeline_is_clipped_to_step() -> None:
    trace = StepTrace(
        step=(5 * US, 25 * US),
        compute=[(4 * US, 10 * US)],
        copies=[(8 * US, 12 * US)],
        phases=[("forward", (5 * US, 14 * US))],
    )
    calls = [TimedCall("dp", "all_reduce", (18 * US, 30 * US), 64)]
    timeline = build_rank_timeline(1, trace, calls, late_ns=3 * US)
    assert timeline.start_us == 3.0
    assert timeline.stop_us == 23.0
    intervals = [(i.stream, i.name, i.start_us, i.stop_us) for i in timeline.intervals]
    assert timeline.intervals[-1].num_bytes == 64
    assert intervals == [
        ("phase", "forward", 3.0, 12.0),
        ("compute", "compute", 3.0, 8.0),
        ("copy", "copy", 8.0, 10.0),
        ("comm dp", "all_reduce", 16.0, 23.0),
    ]
