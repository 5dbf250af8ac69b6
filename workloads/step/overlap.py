"""Where a step's time goes, from passes beside the timed one.

Steps with and without communication in turns, whose difference is what communication costs (ECT), and traced steps with
and without it, whose spans add up to the wall.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from parbench.bench.results.details import CommunicationDetails, CountedCall
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.records import RankTimeline, Timeline
from parbench.bench.results.spans import (
    Breakdown,
    Span,
    compute_breakdown,
    difference,
    gaps,
    intersection,
    length,
    union,
)
from parbench.bench.results.stats import median
from parbench.bench.results.step_trace import StepTrace, build_rank_timeline
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.step.call_spans import spans_of_calls
from parbench.workloads.step.layout import Grouped
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step, trace_step
from parbench.workloads.step.sent_bytes import OTHER, SentCall, Silenced, counted, fake_twins
from parbench.workloads.step.turns import (
    cross_fitted,
    mean_rank,
    paired_difference,
    paired_overhead,
    slowest,
)

_MOST_INTERVALS = 200_000
_MOST_WATCHING = 0.05
ByKind = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One rank's steps: walls and traced arithmetic in seconds by kind, what traces say, and that of median wall.

    What silences communication looks at every operator, which takes time; a watched step is looked at in the same way
    and communicates, so that the difference is communication's alone. ``comm`` are the spans of each call and
    ``unseen`` the axes with unseen calls in each plain trace; see ``Seen``.
    """

    calls: tuple[SentCall, ...]
    members: dict[str, list[int]]
    walls: dict[str, list[float]]
    arithmetic: dict[str, list[float]]
    breakdowns: list[Breakdown]
    comm: list[list[Span | None]]
    unseen: list[set[str]]
    wait_seconds: list[float]
    middle: int
    timeline: RankTimeline
    kernels: list[int | None]


class Overlap:
    """The probe of a step's time: compute, communication that nothing hides, idle, what a rank waits for.

    ``notes_of`` says what there is to say of a plain step that takes so many seconds.
    """

    share = 1.0

    def __init__(
        self,
        world: World,
        layout: Grouped,
        notes_of: Callable[[float], tuple[str, ...]] = lambda _: (),
    ) -> None:
        self._world, self._layout, self._notes_of = world, layout, notes_of

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float) -> Observed:
        """Take steps of all kinds in turns, as many as there is time for; without any, once."""
        world = self._world
        begin()
        calls = counted(step, self._layout.axes)
        twins = fake_twins(self._layout.axes)
        looks: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "plain": nullcontext,
            "watched": lambda: Silenced({}),
            "silenced": lambda: Silenced(twins),
        }
        walls: dict[str, list[float]] = {kind: [] for kind in looks}
        traces: dict[str, list[StepTrace]] = {kind: [] for kind in looks}

        def turn() -> None:
            # there and back again: what drifts meanwhile weighs on all kinds alike
            for kind, look in list(looks.items())[:: -1 if len(traces["plain"]) % 2 else 1]:
                begin()
                with look():
                    walls[kind].append(time_step(step, world))
                begin()
                with look():
                    traces[kind].append(trace_step(step, world.device))

        try:
            repeat_within_budget(world, budget_seconds, turn)
        finally:
            for twin in twins.values():
                dist.destroy_process_group(twin)
        plain = traces["plain"]
        walls["traced"] = [trace.wall_seconds for trace in plain]
        middle, late_ns = self._middle(plain)
        seen = [held_against(trace, calls) for trace in plain]
        return Observed(
            calls=calls,
            members={
                name: dist.get_process_group_ranks(group)
                for name, group in self._layout.axes.items()
            },
            walls=walls,
            arithmetic={
                kind: [length(trace.compute) / 1e9 for trace in traces[kind]] for kind in looks
            },
            breakdowns=[broken_down(*one) for one in zip(plain, seen, strict=True)],
            comm=[one.spans for one in seen],
            unseen=[one.unseen for one in seen],
            wait_seconds=[waited(trace) for trace in plain],
            middle=middle,
            timeline=build_rank_timeline(world.rank, plain[middle], seen[middle].named, late_ns),
            kernels=[trace.kernels for trace in plain],
        )

    def summarize(self, told: Sequence[Observed]) -> Explanation:
        """Return how the time divides, what was sent, and the traced step of all ranks on one clock."""
        calls, clock = told[0].calls, self._world.clock
        plain = median(slowest([seen.walls["plain"] for seen in told]))
        counts = Counter(replace(call, peer=None) for call in calls).items()
        summed = tuple(
            CountedCall(axis=c.axis, op=c.op, num_bytes=c.num_bytes, ranks=c.ranks, count=n)
            for c, n in counts
        )
        timeline = Timeline(
            clock=clock.method,
            uncertainty_seconds=clock.uncertainty_ns / 1e9,
            ranks=tuple(one.timeline for one in told),
        )
        shown = sum(len(rank.intervals) for rank in timeline.ranks) <= _MOST_INTERVALS
        times, middle = self._times(told), told[0].middle
        missed = sorted({axis for one in told for axis in one.unseen[middle]})
        unknown = f"exposed, idle and wait are unknown: the profiler saw not all calls on {', '.join(missed)}"
        return Explanation(
            metrics={**times, **self._peers(told), **kernels_of([one.kernels for one in told])},
            details=CommunicationDetails(comm_calls=summed, plain_step_seconds=plain).as_details,
            notes=(
                *self._notes_of(plain),
                *([unknown] if missed else []),
                *doubts_of_ect(self._world.device, times["watching_overhead"].value),
            ),
            timeline=timeline if shown else None,
        )

    def _middle(self, traces: Sequence[StepTrace]) -> tuple[int, int]:
        """Return which traced step has the median wall, that of the slowest rank, and how much later it began here."""
        offset_ns = self._world.clock.offsets_ns[self._world.global_rank]
        mine = [(trace.wall_seconds, trace.start_ns - offset_ns) for trace in traces]
        told = self._world.gather(mine)
        walls = [max(wall for wall, _ in step) for step in zip(*told, strict=True)]
        middle = sorted(range(len(walls)), key=lambda i: walls[i])[(len(walls) - 1) // 2]
        return middle, mine[middle][1] - min(
            start_ns for _, start_ns in (one[middle] for one in told)
        )

    def _times(self, told: Sequence[Observed]) -> dict[str, MetricValue]:
        """Return how the wall of a traced step divides on the slowest rank, in the iteration of median wall."""
        middle = told[0].middle
        last = max(told, key=lambda seen: seen.breakdowns[middle].wall_seconds)
        one = last.breakdowns[middle]
        how = f"the slowest rank's traced step of median wall, of {len(last.breakdowns)}"
        # where spans were not told apart by axis, an axis' 0 would be untrue, as is any where calls were not seen
        axes, unseen = (
            () if OTHER in one.exposed_comm_seconds else self._layout.axes,
            last.unseen[middle],
        )
        exposed = {**dict.fromkeys(axes, 0.0), **one.exposed_comm_seconds, **dict.fromkeys(unseen)}
        parts = {
            "compute": one.compute_seconds,
            **{f"exposed_comm.{axis}": seconds for axis, seconds in exposed.items()},
            "exposed_copy": one.copy_seconds,
            "overlap": None if unseen else one.overlap,
            "idle": None if unseen else one.idle_seconds,
            "residual": one.residual_seconds,
            "comm_wait": None if unseen else last.wait_seconds[middle],
        }
        return {
            **make_values(parts, how),
            **differences([seen.walls for seen in told], [seen.arithmetic for seen in told]),
        }

    def _peers(self, told: Sequence[Observed]) -> dict[str, MetricValue]:
        """Return how long communication itself takes, and how long a rank waits in it for a peer to come."""
        calls, comms = told[0].calls, [comm for seen in told for comm in seen.comm]
        unseen = any(axes for seen in told for axes in seen.unseen)
        if (
            self._layout.holds_stage_only
            or unseen
            or any(len(comm) != len(calls) for comm in comms)
        ):
            return {}  # ranks make other calls, or the trace cannot be held against them
        split = [
            [_moved_and_waited(told, rank, i) for i in range(len(told[0].comm))]
            for rank in range(len(told))
        ]
        moved = {
            f"comm_transfer.{name}": cross_fitted(
                [[one.get(name, 0.0) for one, _ in turns] for turns in split]
            )
            for name in self._layout.axes
        }
        waited = cross_fitted([[seconds for _, seconds in turns] for turns in split])
        return make_values(moved | {"straggler_wait": waited}, "traced steps")


def kernels_of(told: Sequence[Sequence[int | None]]) -> dict[str, MetricValue]:
    """Return the kernels of a step, of all ranks' traced ones; unknown where not all steps ran as many."""
    known = [[count for count in steps if count is not None] for steps in told]
    if not all(known):
        return {}
    alike = all(len(set(steps)) == 1 for steps in known)
    return make_values(
        {"kernels": sum(steps[0] for steps in known) / len(known) if alike else None},
        "mean over ranks",
    )


def differences(walls: Sequence[ByKind], arithmetic: Sequence[ByKind]) -> dict[str, MetricValue]:
    """Return what communication and looking at a step cost, of all ranks' seconds by kind of step, turn by turn."""
    wall = {kind: slowest([one[kind] for one in walls]) for kind in walls[0]}
    watched, silenced = (
        mean_rank([one[kind] for one in arithmetic]) for kind in ("watched", "silenced")
    )
    each = "" if len(watched) > 1 else ", one turn tells none"
    found = {
        "ect": paired_difference(wall["watched"], wall["silenced"]),
        "tracing_overhead": paired_overhead(wall["traced"], wall["plain"]),
        "watching_overhead": paired_overhead(wall["watched"], wall["plain"]),
    }
    slowdown = {"compute_slowdown": paired_difference(watched, silenced)}
    return make_values(found, f"the slowest rank of each turn{each}") | make_values(
        slowdown, f"mean over ranks{each}"
    )


def doubts_of_ect(device: torch.device, watching: float | None) -> tuple[str, ...]:
    """Return what to say of an ECT whose device waits for a host that is held up by looking at every operator."""
    if device.type != "cuda" or watching is None or watching <= _MOST_WATCHING:
        return ()
    longer = f"the watched step takes {1 + watching:.2f} times as long as a plain one"
    return (
        f"ect is a lower bound: {longer}, and where a device waits for its host communication is hidden",
    )


@dataclass(frozen=True)
class Seen:
    """A trace's communication: the span of each call, None of one not seen, or none if they cannot be told apart; all
    that was seen, with axis and operation; and the axes with calls that were not."""

    spans: list[Span | None]
    named: list[tuple[str, str, Span]]
    unseen: set[str]


def held_against(trace: StepTrace, calls: Sequence[SentCall]) -> Seen:
    """Hold a trace against the calls of a step, which makes the same in the same order each time.

    A call on a group of one rank moves nothing, and need not be seen.
    """
    spans = spans_of_calls(trace, [call.axis for call in calls])
    if spans is None:
        axes = {call.axis for call in calls}
        axis = axes.pop() if len(axes) == 1 else OTHER
        missed = set() if trace.comm else {call.axis for call in calls if call.ranks > 1}
        return Seen([], [(axis, "communication", span) for span in trace.comm], missed)
    together: dict[tuple[str, Span], list[str]] = {}
    for call, span in zip(calls, spans, strict=True):
        if span is not None:
            together.setdefault((call.axis, span), []).append(call.op)
    named = [(axis, " + ".join(dict.fromkeys(ops)), span) for (axis, span), ops in together.items()]
    return Seen(
        spans,
        named,
        {c.axis for c, span in zip(calls, spans, strict=True) if span is None and c.ranks > 1},
    )


def broken_down(trace: StepTrace, seen: Seen) -> Breakdown:
    by_axis: dict[str, list[Span]] = {}
    for axis, _, span in seen.named:
        by_axis.setdefault(axis, []).append(span)
    return compute_breakdown(
        trace.step, trace.compute, by_axis, trace.copies, measured_wall_seconds=trace.wall_seconds
    )


def waited(trace: StepTrace) -> float:
    """Return the seconds in which the host issued communication, or did nothing while some was under way.

    Of a device, whose host runs ahead and at the end stands still for whatever is left, those when it did nothing else.
    """
    comm = intersection(trace.comm, [trace.step])
    if trace.issue_spans is not None:
        return length(difference(comm, [*trace.compute, *trace.copies])) / 1e9
    still = gaps(trace.host_busy, trace.step)
    return length(union([*trace.host_comm, *intersection(still, comm)])) / 1e9


def _moved_and_waited(
    told: Sequence[Observed], rank: int, iteration: int
) -> tuple[dict[str, float], float]:
    """Return the seconds of one rank's traced step in which communication moved, by axis, and waited for a peer.

    A call takes as long as on the rank of its group where it took least; what another rank spends before that in it, it
    waits. Calls at the same time count once, and one of a single rank, which may not be seen, not at all.
    """
    moving: dict[str, list[Span]] = {}
    waiting: list[Span] = []
    for k, call in enumerate(told[rank].calls):
        peers = told[rank].members.get(call.axis, range(len(told)))
        spans = {
            peer: span
            for peer in (rank, *peers)
            if (span := told[peer].comm[iteration][k]) is not None
        }
        if rank not in spans:
            continue
        least = min(stop - start for start, stop in spans.values())
        start, stop = spans[rank]
        moving.setdefault(call.axis, []).append((stop - least, stop))
        waiting.append((start, stop - least))
    everything = [span for spans in moving.values() for span in spans]
    moved = {axis: length(spans) / 1e9 for axis, spans in moving.items()}
    return moved, length(difference(waiting, everything)) / 1e9
