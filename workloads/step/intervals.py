"""Spans of time as sets: union, intersection, difference, and where the wall time of a step went."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # start and stop in nanoseconds, the stop not included

_NANOSECONDS = 1_000_000_000


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the disjoint spans, in order, that cover the same time; neighbours are joined, empty spans dropped.

    Linear in sorted spans (so are the other functions here), as sorting is then.
    """
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop < start:
            raise ValueError(f"stop({stop}) < start({start})")
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(spans: Iterable[Span]) -> int:
    """Return the nanoseconds that spans cover, each counted once."""
    return sum(stop - start for start, stop in union(spans))


def intersection(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return the time that is in both."""
    ours, theirs = union(a), union(b)
    common: list[Span] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, stop = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if start < stop:
            common.append((start, stop))
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return the time that is in ``a`` and not in ``b``."""
    theirs = union(b)
    left: list[Span] = []
    j = 0
    for start, stop in union(a):
        while j < len(theirs) and theirs[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(theirs) and theirs[k][0] < stop:
            if at < theirs[k][0]:
                left.append((at, theirs[k][0]))
            at = theirs[k][1]
            k += 1
        if at < stop:
            left.append((at, stop))
        j = max(j, k - 1)  # the last one looked at may reach into the next span
    return left


def gaps(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the time of ``within`` that no span covers."""
    return difference([within], spans)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a step went: the wall is the sum of all the rest."""

    compute_seconds: float
    exposed_comm_seconds: Mapping[str, float]
    copy_seconds: float
    idle_seconds: float
    wall_seconds: float
    residual_seconds: float


def break_down(
    wall: Span,
    compute: Sequence[Span],
    comm_by_axis: Mapping[str, Sequence[Span]],
    copies: Sequence[Span],
    *,
    measured_wall_seconds: float | None = None,
) -> Breakdown:
    """Return the breakdown of ``wall``; spans are clipped to it, compute hides copies, and both hide communication.

    Where several axes are exposed the time is that of the operation which started first, so that the sum over axes is
    |union of communication - compute - copies|. Where the wall was measured by another clock too, that is the wall and
    the residual is what the spans do not explain of it; else the residual is 0 by construction.
    """
    computing = intersection(compute, [wall])
    copying = difference(intersection(copies, [wall]), computing)
    busy = union([*computing, *copying])
    owned = _first_started(comm_by_axis)
    exposed = {axis: difference(intersection(spans, [wall]), busy) for axis, spans in owned.items()}
    idle = gaps([*busy, *(span for spans in exposed.values() for span in spans)], wall)
    covered = sum(length(spans) for spans in [computing, copying, idle, *exposed.values()])
    wall_seconds = _seconds(length([wall])) if measured_wall_seconds is None else measured_wall_seconds
    return Breakdown(
        compute_seconds=_seconds(length(computing)),
        exposed_comm_seconds={axis: _seconds(length(spans)) for axis, spans in exposed.items()},
        copy_seconds=_seconds(length(copying)),
        idle_seconds=_seconds(length(idle)),
        wall_seconds=wall_seconds,
        residual_seconds=wall_seconds - _seconds(covered),
    )


def _first_started(spans_by_axis: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """Return disjoint spans by axis: at any time the running operation that started first has it; axes in order tie."""
    tagged = [
        (start, order, stop, axis)
        for order, (axis, spans) in enumerate(spans_by_axis.items())
        for start, stop in sorted(spans)
    ]
    owned: dict[str, list[Span]] = {axis: [] for axis in spans_by_axis}
    reached: int | None = None
    for start, _, stop, axis in sorted(tagged):
        begin = start if reached is None else max(start, reached)
        if begin < stop:
            owned[axis].append((begin, stop))
            reached = stop
    return owned


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / _NANOSECONDS
