"""Where a step's time, bytes and memory go, from passes of their own beside the timed one.

A pass that counts what is sent; steps with and without communication in turns, whose difference is what communication
costs (ECT); traced steps with and without it, whose spans add up to the wall; and a pass that looks at memory.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from bench.results.details import Calls, Communication
from bench.results.metrics import MetricValue, values
from bench.results.stats import median, within_launch
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.communication_pattern import sent_bytes
from workloads.step.intervals import Breakdown, Span, break_down, difference, gaps, intersection, length, union
from workloads.step.layout import Layout
from workloads.step.memory_report import Footprint
from workloads.step.merged_timeline import merged_timeline
from workloads.step.sent_bytes import OTHER, Call, Silenced, counted, fake_twins
from workloads.step.trace import Trace, trace_step

_REPEATS = (3, 12)

Begin = Callable[[], None]
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """One rank's steps: plain ones' walls in seconds and traces, and both of ``watched`` and ``silenced`` ones.

    What silences communication looks at every operator, which takes time; a watched step is looked at in the same way
    and communicates, so that the difference is communication's alone.
    """

    plain: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    silenced: list[float] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    watched_traces: list[Trace] = field(default_factory=list)
    silenced_traces: list[Trace] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank tells the others of its traced steps."""

    breakdowns: list[Breakdown]
    comm: list[list[Span]]
    wait_seconds: list[float]
    compute_slowdown_seconds: float
    plain: list[float]
    watched: list[float]
    silenced: list[float]
    traced_walls: list[float]


def explain(world: World, layout: Layout, step: Step, begin: Begin, memory: Footprint, seconds: float) -> Explanation:
    """Return what a step sends, how its time divides and, as ``memory`` says, what it holds; every rank takes part."""
    begin()
    calls = counted(step, layout.axes)
    passes = _take(world, layout, step, begin, seconds)
    told = world.gather(_seen(world, passes, calls))
    middle = _middle(told)
    times = _times(told, layout, middle)
    metrics = {**_bytes(calls, layout), **times, **_peers(told, calls, layout, world), **memory.metrics}
    plain = median([max(walls) for walls in zip(*(seen.plain for seen in told), strict=True)])
    details = {**Communication(comm_calls=_summed(calls), plain_step_seconds=plain).as_details, **memory.details}
    shown = merged_timeline(world, passes.traces[middle], _axes_of(passes.traces[middle], calls), calls)
    return Explanation(metrics=metrics, details=details, notes=memory.notes, timeline=shown)


def _take(world: World, layout: Layout, step: Step, begin: Begin, seconds: float) -> Passes:
    """Take steps of all kinds in turns, as many as there is time for; without any, once."""
    twins = fake_twins(layout.axes)
    passes = Passes()
    least = _REPEATS[0] if seconds > 0 else 1
    try:
        began, done, wanted = time.perf_counter(), 0, _REPEATS[1]
        while done < wanted:
            _take_each(world, step, begin, passes, twins)
            done += 1
            affordable = int(seconds / ((time.perf_counter() - began) / done))
            wanted = int(world.decide([max(least, min(_REPEATS[1], affordable))])[0])
    finally:
        for twin in twins.values():
            dist.destroy_process_group(twin)
    return passes


def _take_each(world: World, step: Step, begin: Begin, passes: Passes, twins: Mapping[str, dist.ProcessGroup]) -> None:
    begin()
    passes.plain.append(_timed(step, world))
    begin()
    passes.traces.append(trace_step(step, world.device))
    for groups, walls, traces in (
        ({}, passes.watched, passes.watched_traces),
        (twins, passes.silenced, passes.silenced_traces),
    ):
        begin()
        with Silenced(groups):
            walls.append(_timed(step, world))
        begin()
        with Silenced(groups):
            traces.append(trace_step(step, world.device))


def _timed(step: Step, world: World) -> float:
    began = time.perf_counter()
    step()
    world.sync()
    return time.perf_counter() - began


def _seen(world: World, passes: Passes, calls: Sequence[Call]) -> Seen:
    beside = [length(trace.compute) for trace in passes.watched_traces]
    alone = [length(trace.compute) for trace in passes.silenced_traces]
    return Seen(
        breakdowns=[_broken_down(trace, calls) for trace in passes.traces],
        comm=[trace.comm for trace in passes.traces],
        wait_seconds=[_waited(trace) for trace in passes.traces],
        compute_slowdown_seconds=(median(beside) - median(alone)) / 1e9,
        plain=passes.plain,
        watched=passes.watched,
        silenced=passes.silenced,
        traced_walls=[trace.wall_seconds for trace in passes.traces],
    )


def _broken_down(trace: Trace, calls: Sequence[Call]) -> Breakdown:
    by_axis: dict[str, list[Span]] = {}
    for axis, span in zip(_axes_of(trace, calls), trace.comm, strict=True):
        by_axis.setdefault(axis, []).append(span)
    return break_down(trace.step, trace.compute, by_axis, trace.copies, measured_wall_seconds=trace.wall_seconds)


def _axes_of(trace: Trace, calls: Sequence[Call]) -> list[str]:
    """Return the axis of each communication of a trace: a step makes the same calls in the same order each time."""
    if len(trace.comm) == len(calls):
        return [call.axis for call in calls]
    axes = {call.axis for call in calls}
    return [axes.pop() if len(axes) == 1 else OTHER] * len(trace.comm)


def _waited(trace: Trace) -> float:
    """Return the seconds in which the host issued communication, or did nothing while some was under way."""
    still = gaps(trace.busy, trace.step)
    return length(union([*trace.called, *intersection(still, union(trace.comm))])) / 1e9


def _bytes(calls: Sequence[Call], layout: Layout) -> dict[str, MetricValue]:
    """Return what a rank sends by axis, the closed form, and their ratio."""
    sent: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)
    metrics: dict[str, MetricValue] = {}
    for axis in dict.fromkeys([*layout.axes, *sent]):
        expected = layout.expected_bytes.get(axis)
        metrics |= values({f"bytes_sent.{axis}": float(sent[axis])}, "ring-optimal")
        if expected is not None:
            ratio = sent[axis] / expected if expected else None
            metrics |= values({f"bytes_expected.{axis}": expected, f"bytes_ratio.{axis}": ratio})
    return metrics


def _middle(told: Sequence[Seen]) -> int:
    """Return which traced step has the median wall, that of the slowest rank."""
    walls = [max(seen.breakdowns[i].wall_seconds for seen in told) for i in range(len(told[0].breakdowns))]
    return sorted(range(len(walls)), key=lambda i: walls[i])[(len(walls) - 1) // 2]


def _times(told: Sequence[Seen], layout: Layout, middle: int) -> dict[str, MetricValue]:
    """Return how the wall of a traced step divides on the slowest rank, in the iteration of median wall."""
    slowest = max(told, key=lambda seen: seen.breakdowns[middle].wall_seconds)
    one = slowest.breakdowns[middle]
    how = f"the slowest rank's traced step of median wall, of {len(slowest.breakdowns)}"
    # where spans were not told apart by axis, an axis' 0 would be untrue
    axes = () if OTHER in one.exposed_comm_seconds else layout.axes
    exposed = {f"exposed_comm.{axis}": one.exposed_comm_seconds.get(axis, 0.0) for axis in axes}
    exposed |= {f"exposed_comm.{axis}": seconds for axis, seconds in one.exposed_comm_seconds.items()}
    parts = {
        "compute": one.compute_seconds,
        **exposed,
        "exposed_copy": one.copy_seconds,
        "idle": one.idle_seconds,
        "residual": one.residual_seconds,
        "comm_wait": slowest.wait_seconds[middle],
    }
    plain, watched, silenced, traced = (
        [max(walls) for walls in zip(*(getattr(seen, name) for seen in told), strict=True)]
        for name in ("plain", "watched", "silenced", "traced_walls")
    )
    step = within_launch(watched)
    return {
        **values(parts, how),
        **values({"ect": step.value - within_launch(silenced).value}, f"{step.method}, in turns"),
        **values({"compute_slowdown": max(seen.compute_slowdown_seconds for seen in told)}, "medians, max rank"),
        **values({"tracing_overhead": median(traced) / median(plain) - 1}, "medians"),
    }


def _peers(told: Sequence[Seen], calls: Sequence[Call], layout: Layout, world: World) -> dict[str, MetricValue]:
    """Return how long communication itself takes, and how long a rank waits in it for a peer to come.

    A call takes as long as on the rank of its group where it took least; what another rank spends before that in it, it
    waits. Calls at the same time count once.
    """
    if layout.staged or any(len(comm) != len(calls) for seen in told for comm in seen.comm):
        return {}  # ranks make other calls, or the trace cannot be held against them
    mine = {name: dist.get_process_group_ranks(group) for name, group in layout.axes.items()}
    members = world.gather(mine)
    iterations = range(len(told[0].comm))
    split = [[_split(told, calls, members[rank], rank, i) for i in iterations] for rank in range(len(told))]
    how = f"traced steps, median of {len(iterations)}, the rank with the most"
    found = {
        f"comm_transfer.{name}": max(median([parts.transfer.get(name, 0.0) for parts in of]) for of in split)
        for name in layout.axes
    }
    return values(found | {"straggler_wait": max(median([parts.skew for parts in of]) for of in split)}, how)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Seconds of one rank's traced step in which communication moved, by axis, and in which it waited for a peer."""

    transfer: dict[str, float]
    skew: float


def _split(
    told: Sequence[Seen], calls: Sequence[Call], members: dict[str, list[int]], rank: int, iteration: int
) -> _Parts:
    moving: dict[str, list[Span]] = {}
    waiting: list[Span] = []
    for k, call in enumerate(calls):
        peers = members.get(call.axis, range(len(told)))
        least = min(stop - start for start, stop in (told[peer].comm[iteration][k] for peer in peers))
        start, stop = told[rank].comm[iteration][k]
        moving.setdefault(call.axis, []).append((stop - least, stop))
        waiting.append((start, stop - least))
    everything = [span for spans in moving.values() for span in spans]
    return _Parts(
        transfer={axis: length(spans) / 1e9 for axis, spans in moving.items()},
        skew=length(difference(waiting, everything)) / 1e9,
    )


def _summed(calls: Sequence[Call]) -> tuple[Calls, ...]:
    """Return equal calls together, with how often they were made."""
    counts = Counter(replace(call, peer=None) for call in calls).items()
    return tuple(Calls(axis=c.axis, op=c.op, num_bytes=c.num_bytes, ranks=c.ranks, count=n) for c, n in counts)
