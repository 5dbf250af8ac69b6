"""The calls of communication of a step, found in its trace."""

from bisect import bisect_right
from collections.abc import Sequence

from parbench.bench.results.spans import Span
from parbench.bench.results.traced import Trace


def spans_of_calls(trace: Trace, axes: Sequence[str]) -> list[Span | None] | None:
    """Return the span of each call of a step, None of one that was not seen; ``axes`` are the calls', in their order.

    None instead where the trace cannot be held against them. A host's are in the order of issue. A device's kernels
    run in another order on each communicator, so each belongs to the call within which the host launched it; one
    launched after its call has returned, as coalesced calls are, belongs to that and to all before it on the same axis
    that have none.
    """
    if trace.issued is None:
        return list(trace.comm) if len(trace.comm) == len(axes) else None
    known = [
        (launched, span) for launched, span in zip(trace.launched, trace.comm, strict=True) if launched is not None
    ]
    if len(trace.issued) != len(axes) or len(known) < len(trace.comm):
        return None
    starts = [start for start, _ in trace.issued]
    found: list[Span | None] = [None] * len(axes)
    together: dict[int, range] = {}
    for launched, (start, stop) in sorted(known):
        last = bisect_right(starts, launched) - 1
        if last < 0:
            return None
        if last not in together:
            first = last
            if launched >= trace.issued[last][1]:
                while first and found[first - 1] is None and axes[first - 1] == axes[last]:
                    first -= 1
            together[last] = range(first, last + 1)
        for i in together[last]:
            began, ended = found[i] or (start, stop)
            found[i] = min(began, start), max(ended, stop)
    return found
