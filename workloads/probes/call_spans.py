"""The calls of communication of a step, found in its trace."""

from bisect import bisect_right
from collections.abc import Sequence

from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import StepTrace


def find_call_spans(trace: StepTrace, axes: Sequence[str]) -> list[Span | None] | None:
    """Return the start and stop of each communication call of a profiled step on one rank.

    Times are in nanoseconds of the profiler's clock. ``axes`` has the mesh axis of each call, in
    order of issue, which is also the order of the result. An element is None for a call to which no
    kernel in the trace belongs. The whole result is None if kernels cannot be assigned to calls:
    the trace has another number of calls than ``axes``, or the host launched a kernel before the
    first call or at an unknown time.

    * On a CPU, the trace has the calls themselves, in order of issue.
    * On a device, it has kernels. A kernel belongs to the call in which the host launched it. With
      several kernels, a call lasts from the first start to the last stop.
    * Torch may coalesce several calls into one kernel, which it launches after the last of them has
      returned. All coalesced calls then get the time of this kernel. The coalesced calls are the
      last call that was issued before the launch, and the calls directly before that call, as far
      back as they are on the same axis and have no kernel yet.
    """
    issued = trace.comm if trace.issue_spans is None else trace.issue_spans
    if len(issued) != len(axes):
        return None
    if trace.issue_spans is None:
        return [event.span for event in trace.comm]
    starts = [start for start, _ in trace.issue_spans]
    spans: list[Span | None] = [None] * len(axes)
    calls_by_last: dict[int, range] = {}
    launches = [(event.launch_ns or 0, event.span) for event in trace.comm]
    for launched, (start, stop) in sorted(launches):
        last_call = bisect_right(starts, launched) - 1
        if last_call < 0:
            return None
        if last_call not in calls_by_last:
            first_call = last_call
            if launched >= trace.issue_spans[last_call][1]:
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
