"""One traced step of all ranks, brought to one clock."""

from collections.abc import Sequence

from bench.results.records import COMM, COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from bench.world.world import World
from workloads.step.intervals import Span, difference, intersection
from workloads.step.sent_bytes import Call
from workloads.step.trace import Trace

_MOST_INTERVALS = 200_000


def merged_timeline(world: World, trace: Trace, axes: Sequence[str], calls: Sequence[Call]) -> Timeline | None:
    """Return the step of every rank; None where it has too many intervals to keep. Every rank takes part.

    ``axes`` are those of the trace's communication. Compute and copies are as the breakdown counts them: disjoint, and
    copies only where nothing is computed.
    """
    began_ns = trace.began_ns - world.clock.offsets_ns[world.global_rank]
    all_began = world.gather(began_ns)
    mine = rank_timeline(world.rank, trace, axes, _operations(trace, calls), began_ns - min(all_began))
    timeline = Timeline(
        clock=world.clock.method,
        uncertainty_seconds=world.clock.uncertainty_ns / 1e9,
        ranks=tuple(world.gather(mine)),
    )
    return timeline if sum(len(rank.intervals) for rank in timeline.ranks) <= _MOST_INTERVALS else None


def rank_timeline(
    rank: int, trace: Trace, axes: Sequence[str], operations: Sequence[str], late_ns: int
) -> RankTimeline:
    """Return one rank's step, which began ``late_ns`` after the first rank's."""

    def at(stamp: int) -> float:
        return (stamp - trace.step[0] + late_ns) / 1e3

    def interval(stream: str, name: str, span: Span) -> Interval:
        return Interval(stream, name, at(span[0]), at(span[1]))

    computing = intersection(trace.compute, [trace.step])
    copying = difference(intersection(trace.copies, [trace.step]), computing)
    found = [interval(PHASE, name, span) for name, span in trace.phases]
    found += [interval(COMPUTE, COMPUTE, span) for span in computing]
    found += [interval(COPY, COPY, span) for span in copying]
    for axis, operation, span in zip(axes, operations, trace.comm, strict=True):
        found += [interval(f"{COMM} {axis}", operation, part) for part in intersection([span], [trace.step])]
    return RankTimeline(rank=rank, start_us=at(trace.step[0]), stop_us=at(trace.step[1]), intervals=tuple(found))


def _operations(trace: Trace, calls: Sequence[Call]) -> list[str]:
    """Return what each communication is, where the trace can be held against the calls."""
    if len(calls) == len(trace.comm):
        return [call.op for call in calls]
    return ["communication"] * len(trace.comm)
