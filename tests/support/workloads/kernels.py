"""Kernels of communication, as a trace of a step has them."""

from parbench.bench.results.step_trace import TraceEvent


def make_kernel(start_ns: int, stop_ns: int, launch_ns: int | None = None) -> TraceEvent:
    return TraceEvent(
        name="ncclDevKernel_AllReduce",
        start_ns=start_ns,
        stop_ns=stop_ns,
        thread=1,
        is_device=True,
        is_async=False,
        launch_ns=launch_ns,
    )
