"""The calls of communication of a step, found in its trace."""

from bisect import bisect_right
from collections.abc import Sequence

from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import StepTrace


def find_call_spans(trace: StepTrace, axes: Sequence[str]) -> list[Span | None] | None:
    """Return the start and stop (ns) of each communication call of a step, from its trace.

    ``axes`` has the mesh axis of each call, in order of issue, which is also the order of the
    result. An entry is None for a call that the trace does not have. The whole result is None if
    the trace does not match the calls.

    On a CPU, the trace has calls in order of issue. On a device, kernels run in another order on
    each communicator, so that a kernel belongs to the call during which the host launched it. A
    kernel of coalesced calls is launched after its call has returned. It belongs to that call and
    to all earlier calls on the same axis that have no kernel.
    """
    if trace.issue_spans is None:
        return list(trace.comm) if len(trace.comm) == len(axes) else None
    launches = []
    for launched, span in zip(trace.launch_times, trace.comm, strict=True):
        if launched is None:
            return None
        launches.append((launched, span))
    if len(trace.issue_spans) != len(axes):
        return None
    return _match_kernels(launches, trace.issue_spans, axes)


def _match_kernels(
    launches: Sequence[tuple[int, Span]],
    issued: Sequence[Span],
    axes: Sequence[str],
) -> list[Span | None] | None:
    """Return the start and stop (ns) of each call from its kernels, None for a call without one.

    ``launches`` holds the launch time of each kernel, and the start and stop of its execution.
    ``issued`` holds the start and stop of each call on the host, in order of issue, and ``axes``
    its mesh axis. All times are in nanoseconds. The result is None if a kernel was launched before
    the first call.
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
