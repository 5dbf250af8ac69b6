"""Spans of time as sets, and the breakdown of the time of a step."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

Span = tuple[int, int]
"""A span of time: its start and its stop in nanoseconds of one clock. The stop is excluded."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Return sorted disjoint spans that cover the same time as ``spans``.

    Spans that touch are joined, and empty ones are dropped. Raises ``ValueError`` for a span that
    stops before it starts. This and the other functions take linear time if spans are sorted.
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
    """Return the total time in ns that the spans cover. Overlapping time counts once."""
    return sum(stop - start for start, stop in union(spans))


def difference(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return sorted disjoint spans of the time that ``a`` covers and ``b`` does not."""
    holes = deque(union(b))
    remaining: list[Span] = []
    for start, stop in union(a):
        while holes and holes[0][0] < stop:
            hole_start, hole_stop = holes[0]
            if start < hole_start:
                remaining.append((start, hole_start))
            start = max(start, hole_stop)
            if hole_stop > stop:
                break  # the hole may reach into the next span
            holes.popleft()
        if start < stop:
            remaining.append((start, stop))
    return remaining


def intersection(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return sorted disjoint spans of the time that both ``a`` and ``b`` cover."""
    spans = union(a)
    return difference(spans, difference(spans, b))


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The parts of the wall time of one step on one rank.

    The wall time is the sum of all other parts except hidden communication.
    """

    compute_seconds: float
    """The time in which the rank computes."""
    exposed_comm_seconds: Mapping[str, float]
    """The time of communication during which the rank neither computes nor copies, by mesh axis."""
    hidden_comm_seconds: float
    """The time of communication, on any axis, during which the rank computes or copies."""
    copy_seconds: float
    """The time of copies during which the rank does not compute."""
    idle_seconds: float
    """The time in which the rank neither computes, copies nor communicates."""
    wall_seconds: float
    """The duration of the step."""

    @property
    def exposed_seconds(self) -> float:
        """The time of exposed communication, sum over all axes."""
        return sum(self.exposed_comm_seconds.values())

    @property
    def overlap(self) -> float | None:
        """The fraction of the time of communication that computation or copies hide.

        The definition is that of HolisticTraceAnalysis. None if there is no communication.
        """
        total = self.hidden_comm_seconds + self.exposed_seconds
        return self.hidden_comm_seconds / total if total else None


def compute_breakdown(
    wall: Span,
    compute: Sequence[Span],
    comm_by_axis: Mapping[str, Sequence[Span]],
    copies: Sequence[Span],
) -> Breakdown:
    """Divide a step of one rank into compute, copies, exposed communication and idle time.

    ``wall`` is the span of the step, to which all other spans are clipped. ``compute``,
    ``copies`` and ``comm_by_axis`` are the spans in which the rank computes, copies and
    communicates, the latter by mesh axis. Computation hides copies, and both hide communication.
    Time in which several axes are exposed counts for the first of them in ``comm_by_axis``, so that
    the sum over axes is |union of communication - compute - copies|.
    """
    computing = intersection(compute, [wall])
    copying = difference(intersection(copies, [wall]), computing)
    busy = union([*computing, *copying])
    idle = difference([wall], busy)
    exposed = {}
    for axis, spans in comm_by_axis.items():
        exposed[axis] = intersection(spans, idle)
        idle = difference(idle, exposed[axis])
    hidden = intersection(chain.from_iterable(comm_by_axis.values()), busy)
    return Breakdown(
        compute_seconds=length(computing) / 1e9,
        exposed_comm_seconds={axis: length(spans) / 1e9 for axis, spans in exposed.items()},
        hidden_comm_seconds=length(hidden) / 1e9,
        copy_seconds=length(copying) / 1e9,
        idle_seconds=length(idle) / 1e9,
        wall_seconds=length([wall]) / 1e9,
    )
