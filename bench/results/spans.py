"""Spans of time as sets, and the breakdown of the time of a step."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

Span = tuple[int, int]
"""Start and stop in nanoseconds. The stop is not included."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Return sorted disjoint spans that cover the same time.

    Adjacent spans are joined and empty ones dropped. This and the other functions take linear time
    for sorted spans.
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
    """Return the total ns that spans cover. Overlapping time counts once."""
    return sum(stop - start for start, stop in union(spans))


def difference(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return the spans of time that ``a`` covers and ``b`` does not."""
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
    """Return the spans of time that both ``a`` and ``b`` cover."""
    spans = union(a)
    return difference(spans, difference(spans, b))


def gaps(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the parts of ``within`` that no span covers."""
    return difference([within], spans)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The parts of the time of a step.

    The wall time is the sum of all other parts except hidden communication.
    """

    compute_seconds: float
    """The time in which the rank computes."""
    exposed_comm_seconds: Mapping[str, float]
    """The communication that neither computation nor copies hide, by the name of the axis."""
    hidden_comm_seconds: float
    """The communication on all axes that computation or copies hide."""
    copy_seconds: float
    """The copies that computation does not hide."""
    idle_seconds: float
    """The time in which the rank neither computes, copies nor communicates."""
    wall_seconds: float
    residual_seconds: float
    """The part of the wall time that the spans do not explain."""

    @property
    def exposed_seconds(self) -> float:
        """The seconds of exposed communication on all axes."""
        return sum(self.exposed_comm_seconds.values())

    @property
    def overlap(self) -> float | None:
        """The share of communication that is hidden, as HolisticTraceAnalysis defines it.

        None if there is no communication.
        """
        total = self.hidden_comm_seconds + self.exposed_seconds
        return self.hidden_comm_seconds / total if total else None


def compute_breakdown(
    wall: Span,
    compute: Sequence[Span],
    comm_by_axis: Mapping[str, Sequence[Span]],
    copies: Sequence[Span],
    *,
    measured_wall_seconds: float | None = None,
) -> Breakdown:
    """Return the breakdown of ``wall``, to which all spans are clipped.

    Computation hides copies, and both hide communication. Time in which several axes are exposed
    counts for the operation that started first, so that the sum over axes is
    |union of communication - compute - copies|.

    ``measured_wall_seconds`` is the wall time by another clock. Then the residual is the part of it
    that the spans do not explain. Otherwise the residual is 0.
    """
    computing = intersection(compute, [wall])
    copying = difference(intersection(copies, [wall]), computing)
    busy = union([*computing, *copying])
    comm = _assign_to_first_started(comm_by_axis)
    exposed = {axis: difference(intersection(spans, [wall]), busy) for axis, spans in comm.items()}
    idle = gaps([*busy, *chain.from_iterable(exposed.values())], wall)
    hidden = intersection(chain.from_iterable(comm.values()), busy)
    covered = sum(length(spans) for spans in (computing, copying, idle, *exposed.values()))
    wall_seconds = measured_wall_seconds
    if wall_seconds is None:
        wall_seconds = length([wall]) / 1e9
    return Breakdown(
        compute_seconds=length(computing) / 1e9,
        exposed_comm_seconds={axis: length(spans) / 1e9 for axis, spans in exposed.items()},
        hidden_comm_seconds=length(hidden) / 1e9,
        copy_seconds=length(copying) / 1e9,
        idle_seconds=length(idle) / 1e9,
        wall_seconds=wall_seconds,
        residual_seconds=wall_seconds - covered / 1e9,
    )


def _assign_to_first_started(
    spans_by_axis: Mapping[str, Sequence[Span]],
) -> dict[str, list[Span]]:
    """Return disjoint spans by axis, in which time belongs to the running span that started first.

    If two start together, the order of the axes decides.
    """
    operations = []
    for order, spans in enumerate(spans_by_axis.values()):
        operations += [(start, order, stop) for start, stop in spans]
    operations.sort()
    assigned: list[list[Span]] = [[] for _ in spans_by_axis]
    end = operations[0][0] if operations else 0
    for start, order, stop in operations:
        begin = max(start, end)
        if begin < stop:
            assigned[order].append((begin, stop))
            end = stop
    return dict(zip(spans_by_axis, assigned, strict=True))
