"""The time of a step: compute, exposed communication, idle time, and waiting for slower ranks.

Steps with and without communication are interleaved. Their difference is the effective
communication time (ECT). The spans of profiled steps add up to the wall time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from operator import sub
from statistics import median_low

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
    length,
)
from parbench.bench.results.stats import median
from parbench.bench.results.step_trace import StepTrace, TimedCall, build_rank_timeline
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.step.call_spans import find_call_spans
from parbench.workloads.step.probe import (
    ResetFn,
    Step,
    repeat_within_budget,
    time_step,
    trace_step,
)
from parbench.workloads.step.sent_bytes import (
    OTHER,
    Groups,
    NoCommMode,
    SentCall,
    make_fake_groups,
    record_calls,
)
from parbench.workloads.step.turns import (
    compare_turns,
    compute_overhead,
    cross_fitted,
    slowest,
)

_MAX_INTERVALS = 200_000
"""The maximum number of intervals of a timeline over all ranks. A larger timeline is left out."""
_MAX_DISPATCH_OVERHEAD = 0.05
"""The relative slowdown of instrumented steps above which ``ect`` gets a caveat."""
SecondsByKind = Mapping[str, Sequence[float]]
"""The seconds of one rank's steps by kind: uninstrumented, instrumented, without_comm, profiled."""


@dataclass(frozen=True)
class MatchedTrace:
    """The communication in one profiled step of one rank, matched with its recorded calls."""

    spans: list[Span | None]
    """The start and stop (ns) of each recorded call, in order of issue.

    An entry is None for a call that the trace does not have. The list is empty if the trace and the
    calls do not match.
    """
    named: list[TimedCall]
    """All communication in the trace, with mesh axis, operation and bytes.

    If the trace and the calls do not match, operation and bytes are unknown.
    """
    unseen: set[str]
    """The mesh axes with calls that the trace does not have, without groups of one rank."""

    def group_by_axis(self) -> dict[str, list[Span]]:
        """Return the start and stop (ns) of all communication in the trace, keyed by mesh axis."""
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for call in self.named:
            spans[call.axis].append(call.span)
        return dict(spans)


@dataclass(frozen=True, kw_only=True)
class RankTimings:
    """The times of one rank's steps, which are the sample of ``OverlapProbe``.

    A step without communication runs in a dispatch mode, which handles every operator. An
    instrumented step runs in the same mode with communication, so that both have its overhead.
    """

    calls: tuple[SentCall, ...]
    """The communication calls of one step on this rank, in order of issue."""
    ranks_by_axis: dict[str, list[int]]
    """The global ranks of this rank's process group, keyed by mesh axis."""
    wall_seconds: dict[str, list[float]]
    """The seconds of each step, by kind: uninstrumented, instrumented, without_comm, profiled.

    All lists have the same length, because one step of each kind runs before the next of any kind.
    """
    matched: list[MatchedTrace]
    """The communication in each profiled step, in order of the steps."""
    median_step: int
    """The index of the profiled step whose wall time, the maximum over ranks, is the median.

    It is the same on all ranks.
    """
    breakdown: Breakdown
    """Compute, exposed communication, copies and idle time of the median step on this rank."""
    phases: dict[str, float]
    """The seconds of the median step's phases, such as forward, keyed by name of the metric."""
    timeline: RankTimeline
    """The compute, communication and phases of the median step on this rank, for a timeline."""


@dataclass(frozen=True)
class OverlapProbe:
    """Measures a step's compute, exposed communication, idle time and waiting for slower ranks."""

    world: World
    axes: Groups
    """This rank's process groups, keyed by mesh axis."""
    _: KW_ONLY
    ranks_differ: bool = False
    """True if ranks make different calls, as the stages of a pipeline do."""
    list_notes: Callable[[float], Sequence[str]] = lambda seconds: ()
    """Returns notes about an uninstrumented step, from its median seconds."""
    share = 1.0
    """The weight of this probe in the time budget of all probes."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> RankTimings:
        """Run interleaved steps of all four kinds within ``budget_seconds``, at least one of each.

        Returns the times of this rank. All ranks call it.
        """
        world = self.world
        reset()
        calls = record_calls(step, self.axes)
        fake_groups = make_fake_groups(self.axes)
        modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "uninstrumented": nullcontext,
            "instrumented": lambda: NoCommMode({}),
            "without_comm": lambda: NoCommMode(fake_groups),
        }
        walls: dict[str, list[float]] = {kind: [] for kind in modes}
        traces: list[StepTrace] = []

        def run_all_kinds() -> None:
            """Run one step of each kind: three unprofiled kinds, then the profiled one.

            The order of the first three alternates from round to round.
            """
            # The order alternates (ABBA), so that a drift has the same effect on all kinds.
            kinds = list(modes)
            if len(traces) % 2:
                kinds.reverse()
            for kind in kinds:
                reset()
                with modes[kind]():
                    walls[kind].append(time_step(step, world))
            reset()
            traces.append(trace_step(step, world.device))

        try:
            repeat_within_budget(world, budget_seconds, run_all_kinds)
        finally:
            for group in fake_groups.values():
                dist.destroy_process_group(group)
        walls["profiled"] = [trace.wall_seconds for trace in traces]
        matched = [match_spans_to_calls(trace, calls) for trace in traces]
        walls_of_slowest = slowest(world.gather(walls["profiled"]))
        median_step = walls_of_slowest.index(median_low(walls_of_slowest))
        start_ns = traces[median_step].start_ns - world.clock.offsets_ns[world.global_rank]
        late_ns = start_ns - min(world.gather(start_ns))
        return RankTimings(
            calls=calls,
            ranks_by_axis={
                axis: dist.get_process_group_ranks(group) for axis, group in self.axes.items()
            },
            wall_seconds=walls,
            matched=matched,
            median_step=median_step,
            breakdown=compute_time_breakdown(traces[median_step], matched[median_step]),
            phases=measure_phases(traces[median_step], matched[median_step]),
            timeline=build_rank_timeline(
                world.rank, traces[median_step], matched[median_step].named, late_ns
            ),
        )

    def summarize(self, samples: Sequence[RankTimings]) -> Explanation:
        """Return the parts of a step's time, its communication calls and a timeline of all ranks.

        ``samples`` are the times of all ranks, by global rank. Calls are those of rank 0. The
        timeline is on the clock of rank 0.
        """
        first = samples[0]
        walls = [sample.wall_seconds["uninstrumented"] for sample in samples]
        step_seconds = median(slowest(walls))
        metrics = {
            **self._summarize_breakdown(samples),
            **summarize_differences([sample.wall_seconds for sample in samples]),
            **self._summarize_peers(samples),
        }
        notes = list(self.list_notes(step_seconds))
        unseen = set[str]().union(*(sample.matched[first.median_step].unseen for sample in samples))
        if unseen:
            axes = ", ".join(sorted(unseen))
            notes.append(
                f"exposed communication and idle are unknown: the profiler missed calls on {axes}"
            )
        notes += list_ect_caveats(self.world.device, metrics["watching_overhead"].value)
        counts = Counter(first.calls)
        comm_calls = tuple(
            CountedCall(
                axis=call.axis, op=call.op, num_bytes=call.num_bytes, ranks=call.ranks, count=count
            )
            for call, count in counts.items()
        )
        clock = self.world.clock
        timeline = Timeline(
            clock=clock.method,
            uncertainty_seconds=clock.uncertainty_ns / 1e9,
            ranks=tuple(sample.timeline for sample in samples),
        )
        num_intervals = sum(len(rank.intervals) for rank in timeline.ranks)
        details = CommunicationDetails(comm_calls=comm_calls)
        return Explanation(
            metrics=metrics,
            details=details.as_details,
            notes=tuple(notes),
            timeline=timeline if num_intervals <= _MAX_INTERVALS else None,
        )

    def _summarize_breakdown(self, samples: Sequence[RankTimings]) -> dict[str, MetricValue]:
        """Return the parts of the median profiled step's wall time on its slowest rank, as metrics.

        Their keys are names of metrics, such as ``exposed_comm.dp``. Parts are unknown (None) if
        the trace misses calls.
        """
        slowest_rank = max(samples, key=lambda sample: sample.breakdown.wall_seconds)
        breakdown = slowest_rank.breakdown
        unseen = slowest_rank.matched[slowest_rank.median_step].unseen
        exposed: dict[str, float | None] = {}
        if OTHER not in breakdown.exposed_comm_seconds:  # an axis without a span has none exposed
            exposed |= dict.fromkeys(self.axes, 0.0)
        exposed |= breakdown.exposed_comm_seconds
        exposed |= dict.fromkeys(unseen)
        parts = {
            "compute": breakdown.compute_seconds,
            "exposed_copy": breakdown.copy_seconds,
            "overlap": None if unseen else breakdown.overlap,
            "idle": None if unseen else breakdown.idle_seconds,
            "residual": breakdown.residual_seconds,
        }
        parts |= {f"exposed_comm.{axis}": seconds for axis, seconds in exposed.items()}
        parts |= slowest_rank.phases
        num_steps = len(slowest_rank.matched)
        return make_values(
            parts, f"the slowest rank of the median profiled step, of {num_steps} steps"
        )

    def _summarize_peers(self, samples: Sequence[RankTimings]) -> dict[str, MetricValue]:
        """Return the time of transfers, and the time in calls before the last rank arrives.

        They are the metrics ``comm_transfer.AXIS`` for each mesh axis and ``straggler_wait``, in
        seconds per profiled step. The result is empty if ranks make different calls, or if a trace
        does not match its calls.
        """
        num_calls = len(samples[0].calls)
        traces = [trace for sample in samples for trace in sample.matched]
        is_matched = all(len(trace.spans) == num_calls and not trace.unseen for trace in traces)
        if self.ranks_differ or not is_matched:
            return {}
        steps = range(len(samples[0].matched))
        ranks = range(len(samples))
        times = [[split_transfer_and_wait(samples, rank, step) for step in steps] for rank in ranks]
        values = {"straggler_wait": cross_fitted([[wait for _, wait in turn] for turn in times])}
        for axis in self.axes:
            transfer = [[transfers.get(axis, 0.0) for transfers, _ in turn] for turn in times]
            values[f"comm_transfer.{axis}"] = cross_fitted(transfer)
        return make_values(values, "profiled steps")


def summarize_differences(walls: Sequence[SecondsByKind]) -> dict[str, MetricValue]:
    """Return the exposed communication time and the overheads of measuring, as metrics.

    ``ect`` is the seconds of an instrumented step less those of a step without communication.
    ``tracing_overhead`` and ``watching_overhead`` are the relative slowdowns of profiled and
    instrumented steps. Each is the mean over rounds of one step of each kind, between maxima over
    ranks, and unknown for one round. ``walls`` holds, for each rank, the seconds of its steps by
    kind.
    """
    wall = {kind: slowest([rank[kind] for rank in walls]) for kind in walls[0]}
    values = {"ect": compare_turns(wall["instrumented"], wall["without_comm"], sub, "difference")}
    for name, kind in (("tracing_overhead", "profiled"), ("watching_overhead", "instrumented")):
        values[name] = compare_turns(wall[kind], wall["uninstrumented"], compute_overhead, "excess")
    suffix = "" if len(wall["profiled"]) > 1 else ", one turn has no difference"
    return make_values(values, f"the slowest rank of each turn{suffix}")


def list_ect_caveats(device: torch.device, overhead: float | None) -> tuple[str, ...]:
    """Return a note that ``ect`` is a lower bound, if the dispatch mode makes GPU steps slower.

    ``overhead`` is the relative slowdown of instrumented steps, None if it is unknown. Above 5 %
    the device may wait for the host, which hides communication. Otherwise the result is empty.
    """
    if device.type != "cuda" or overhead is None or overhead <= _MAX_DISPATCH_OVERHEAD:
        return ()
    return (
        f"ect is a lower bound: instrumented steps take {1 + overhead:.2f} times as long as "
        "others, and communication is hidden while the device waits for the host",
    )


def match_spans_to_calls(trace: StepTrace, calls: Sequence[SentCall]) -> MatchedTrace:
    """Find the recorded calls of a step in the trace of a profiled step.

    ``calls`` are in order of issue, which is the same in every step. A call on a group of one rank
    sends nothing, and may be missing in the trace.
    """
    spans = find_call_spans(trace, [call.axis for call in calls])
    if spans is None:
        axes = {call.axis for call in calls}
        axis = axes.pop() if len(axes) == 1 else OTHER
        named = [TimedCall(axis, "communication", span) for span in trace.comm]
        missing = [] if trace.comm else calls
        return MatchedTrace([], named, {call.axis for call in missing if call.ranks > 1})
    unseen = set()
    calls_by_span: defaultdict[tuple[str, Span], list[SentCall]] = defaultdict(list)
    for call, span in zip(calls, spans, strict=True):
        if span is not None:
            calls_by_span[call.axis, span].append(call)
        elif call.ranks > 1:
            unseen.add(call.axis)
    named = []
    for (axis, span), joint_calls in calls_by_span.items():
        ops = [call.op for call in joint_calls]
        # A joint send and receive has the size of what it sends.
        num_bytes = sum(call.num_bytes for call in joint_calls if call.op == ops[0])
        named.append(TimedCall(axis, " + ".join(dict.fromkeys(ops)), span, num_bytes))
    return MatchedTrace(spans, named, unseen)


def compute_time_breakdown(trace: StepTrace, matched: MatchedTrace) -> Breakdown:
    """Return the compute, communication, copy and idle parts of one profiled step's wall time."""
    return compute_breakdown(
        trace.step,
        trace.compute,
        matched.group_by_axis(),
        trace.copies,
        measured_wall_seconds=trace.wall_seconds,
    )


def measure_phases(trace: StepTrace, matched: MatchedTrace) -> dict[str, float]:
    """Return the seconds of each phase of a profiled step, such as forward, on this rank.

    Keys are ``phase_time``, ``phase_compute``, ``phase_exposed`` and ``phase_idle``, each followed
    by a dot and the phase. A phase that runs several times has the sum. The last two keys are
    missing if the trace lacks calls.
    """
    metrics: defaultdict[str, float] = defaultdict(float)
    comm_by_axis = matched.group_by_axis()
    for phase, span in trace.phases:
        part = compute_breakdown(span, trace.compute, comm_by_axis, trace.copies)
        metrics[f"phase_time.{phase}"] += part.wall_seconds
        metrics[f"phase_compute.{phase}"] += part.compute_seconds
        if not matched.unseen:
            metrics[f"phase_exposed.{phase}"] += part.exposed_seconds
            metrics[f"phase_idle.{phase}"] += part.idle_seconds
    return dict(metrics)


def split_transfer_and_wait(
    samples: Sequence[RankTimings], rank: int, step: int
) -> tuple[dict[str, float], float]:
    """Return the transfer and waiting seconds in the calls of one rank in one profiled step.

    The first result is the seconds of transfers keyed by mesh axis, the second the seconds of
    waiting for slower ranks on all axes. The transfer of a call takes as long as the call on the
    rank of its group where it is shortest. The earlier part of the call on another rank is waiting.
    Concurrent calls count once. ``samples`` are the times of all ranks, ``step`` is the index of
    the profiled step.
    """
    sample = samples[rank]
    transfers: defaultdict[str, list[Span]] = defaultdict(list)
    waits: list[Span] = []
    for index, call in enumerate(sample.calls):
        span = sample.matched[step].spans[index]
        if span is None:
            continue
        shortest = length([span])
        for peer in sample.ranks_by_axis.get(call.axis, range(len(samples))):
            peer_span = samples[peer].matched[step].spans[index]
            if peer_span is not None:
                shortest = min(shortest, length([peer_span]))
        start, stop = span
        transfers[call.axis].append((stop - shortest, stop))
        waits.append((start, stop - shortest))
    all_transfers = [span for spans in transfers.values() for span in spans]
    seconds = {axis: length(spans) / 1e9 for axis, spans in transfers.items()}
    return seconds, length(difference(waits, all_transfers)) / 1e9
