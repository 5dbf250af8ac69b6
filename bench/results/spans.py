"""Spans of time as sets: union, intersection and difference, and by them where the wall time of a step went."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # start and stop in nanoseconds, the stop not included


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the disjoint spans, in order, that cover the same time; neighbours are joined, empty spans dropped.

    Linear in sorted spans (so are the other functions of spans), as sorting is then.
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
    mine, theirs = union(a), union(b)
    if not mine:
        return []
    edges = [mine[0][0], *(edge for span in theirs for edge in span), mine[-1][1]]
    outside = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    return intersection(mine, outside)


def gaps(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the time of ``within`` that no span covers."""
    return difference([within], spans)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a step went: the wall is the sum of all the rest but communication that others hide."""

    compute_seconds: float
    exposed_comm_seconds: Mapping[str, float]
    hidden_comm_seconds: float
    copy_seconds: float
    idle_seconds: float
    wall_seconds: float
    residual_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """All communication that nothing hides."""
        return sum(self.exposed_comm_seconds.values())

    @property
    def overlap(self) -> float | None:
        """The share of communication that is hidden, None where there is none (as HolisticTraceAnalysis counts)."""
        total = self.hidden_comm_seconds + self.exposed_seconds
        return self.hidden_comm_seconds / total if total else None


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
    wall_seconds = length([wall]) / 1e9 if measured_wall_seconds is None else measured_wall_seconds
    return Breakdown(
        compute_seconds=length(computing) / 1e9,
        exposed_comm_seconds={axis: length(spans) / 1e9 for axis, spans in exposed.items()},
        hidden_comm_seconds=length(intersection((one for of in owned.values() for one in of), busy)) / 1e9,
        copy_seconds=length(copying) / 1e9,
        idle_seconds=length(idle) / 1e9,
        wall_seconds=wall_seconds,
        residual_seconds=wall_seconds - covered / 1e9,
    )


def _first_started(spans_by_axis: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """Return disjoint spans by axis: at any time the running operation that started first has it; axes in order tie."""
    tagged = [(start, order, stop) for order, spans in enumerate(spans_by_axis.values()) for start, stop in spans]
    owned: list[list[Span]] = [[] for _ in spans_by_axis]
    reached = min(tagged, default=(0, 0, 0))[0]
    for start, order, stop in sorted(tagged):
        if (begin := max(start, reached)) < stop:
            owned[order].append((begin, stop))
            reached = stop
    return dict(zip(spans_by_axis, owned, strict=True))
