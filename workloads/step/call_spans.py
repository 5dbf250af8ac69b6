"""The calls of communication of a step, found in its trace."""

from bisect import bisect_right
from collections.abc import Sequence

from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import StepTrace


def find_call_spans(trace: StepTrace, axes: Sequence[str]) -> list[Span | None] | None:
    """Return the start and stop of each communication call of a profiled step on one rank.

    Times are in nanoseconds of the profiler's clock. ``axes`` has the mesh axis of each call, in
    order of issue, which is also the order of the result. An element is None for a call that the
    trace does not have. The whole result is None if the trace does not match the calls.

    * On a CPU, the trace has the calls themselves, in order of issue.
    * On a device, it has kernels. A kernel belongs to the call in which the host launched it.
    * Torch may coalesce several calls into one kernel, which it launches after the last of them has
      returned. All of these calls then get the time of this kernel. They are the last call before
      the launch, and the calls directly before it that are on its axis and have no kernel yet.
    """
    if trace.issue_spans is None:
        spans: list[Span | None] = [event.span for event in trace.comm]
        return spans if len(spans) == len(axes) else None
    launches = []
    for kernel in trace.comm:
        if kernel.launch_ns is None:
            return None
        launches.append((kernel.launch_ns, kernel.span))
    if len(trace.issue_spans) != len(axes):
        return None
    return _match_kernels(launches, trace.issue_spans, axes)


def _match_kernels(
    launches: Sequence[tuple[int, Span]],
    issued: Sequence[Span],
    axes: Sequence[str],
) -> list[Span | None] | None:
    """Return the start and stop of each call on the device, None for a call without a kernel.

    With several kernels, a call lasts from the first start to the last stop. ``launches`` has, for
    each kernel, the time of its launch on the host, and its start and stop on the device.
    ``issued`` has the start and stop of each call on the host, in order of issue, and ``axes`` the
    mesh axis of each call. All times are in nanoseconds of the profiler's clock. The result is None
    if a kernel was launched before the first call.
    """
    starts = [start for start, _ in issued]
    spans: list[Span | None] = [None] * len(axes)
    calls_by_last: dict[int, range] = {}
    for launched, (start, stop) in sorted(launches):
        last_call = bisect_right(starts, launched) - 1
        if last_call < 0:
            return None
        if last_call not in calls_by_last:
            first_call = last_call
            if launched >= issued[last_call][1]:
                while (
                    first_call
                    and spans[first_call - 1] is None
                    and axes[first_call - 1] == axes[last_call]
                ):
                    first_call -= 1
            calls_by_last[last_call] = range(first_call, last_call + 1)
        for call in calls_by_last[last_call]:
            known_start, known_stop = spans[call] or (start, stop)
            spans[call] = min(known_start, start), max(known_stop, stop)
    return spans
