"""The time of a step: compute, exposed communication, idle time, and waiting for slower ranks.

Steps with and without communication are interleaved. Their difference is the effective
communication time (ECT). The spans of profiled steps add up to the wall time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

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
from parbench.bench.results.stats import Estimate, estimate_mean
from parbench.bench.results.step_trace import StepTrace, TimedCall, build_rank_timeline
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.probes.call_spans import find_call_spans
from parbench.workloads.probes.probe import (
    ResetFn,
    Step,
    repeat_within_budget,
    slowest,
    time_step,
    trace_step,
)
from parbench.workloads.probes.sent_bytes import (
    OTHER,
    Groups,
    NoCommMode,
    SentCall,
    make_fake_groups,
    record_calls,
)

_MAX_INTERVALS = 200_000
"""The maximum number of intervals of a timeline over all ranks. A larger timeline is left out."""


@dataclass(frozen=True)
class MatchedTrace:
    """The communication in one profiled step of one rank, matched with its recorded calls."""

    spans: list[Span | None]
    """The start and stop (ns) of each recorded call, in order of issue.

    An entry is None for a call to which no communication in the trace belongs, although the trace
    and the calls match. The list is empty if they do not match, so that the time of every call is
    unknown.
    """
    named: list[TimedCall]
    """All communication in the trace, with mesh axis, operation and bytes.

    If the trace and the calls do not match, operation and bytes are unknown.
    """
    unseen: set[str]
    """The mesh axes that have calls without a time in the trace, such as calls the profiler missed.

    The exposed communication of these axes and the idle time are then unknown. Calls on groups of
    one rank do not count, because they send nothing. If the trace and the calls do not match, all
    axes with calls are in the set if the trace has no communication at all, and otherwise none.
    """

    def group_by_axis(self) -> dict[str, list[Span]]:
        """Return the start and stop (ns) of all communication in the trace, keyed by mesh axis."""
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for call in self.named:
            spans[call.axis].append(call.span)
        return dict(spans)


@dataclass(frozen=True, kw_only=True)
class RankTimings:
    """The times of steps that one rank runs after the benchmark, to explain its step time.

    Steps are of three kinds. A step without communication runs in a dispatch mode of torch, which
    intercepts every operator. An instrumented step runs in this mode too, but communicates, so that
    both have the overhead of the mode. A profiled step runs under torch's profiler.
    """

    calls: tuple[SentCall, ...]
    """The communication calls of one step on this rank, in order of issue."""
    ranks_by_axis: dict[str, list[int]]
    """The global ranks of this rank's process group, keyed by mesh axis."""
    wall_seconds: dict[str, list[float]]
    """The seconds of each step, by kind: instrumented and without_comm, in the same rounds."""
    matched: list[MatchedTrace]
    """The communication in each profiled step, in order of the steps."""
    median_step: int
    """The index of the profiled step whose wall time, the maximum over ranks, is the median.

    It is the same on all ranks.
    """
    breakdown: Breakdown
    """Compute, exposed communication, copies and idle time of the median step on this rank."""
    phases: dict[str, float]
    """The seconds of the median step's phases on this rank, keyed by metric.

    A phase is a range that the step names, such as forward. See ``measure_phases`` for the metrics.
    """
    timeline: RankTimeline
    """The compute, communication and phases of the median step on this rank, for a timeline."""


@dataclass(frozen=True)
class OverlapProbe:
    """Measures a step's compute, exposed communication, idle time and waiting for slower ranks."""

    world: World
    """All ranks of the step."""
    axes: Groups
    """This rank's process groups, keyed by mesh axis."""
    share = 1.0
    """The weight of this probe in the time budget of all probes."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> RankTimings:
        """Run steps of three kinds in rounds, and return the times of this rank.

        The kinds are without communication, instrumented (with communication, but in the same mode
        of torch as a step without it), and profiled. A round has one step of each. Rounds repeat
        within ``budget_seconds``, at least once. All ranks call it.
        """
        world = self.world
        reset()
        calls = record_calls(step, self.axes)
        fake_groups = make_fake_groups(self.axes)
        groups_by_kind: dict[str, Groups] = {"instrumented": {}, "without_comm": fake_groups}
        walls: dict[str, list[float]] = {kind: [] for kind in groups_by_kind}
        traces: list[StepTrace] = []

        def run_round() -> None:
            """Run a step with and one without communication, then a profiled step."""
            # The order alternates (ABBA), so that a drift has the same effect on both kinds.
            kinds = list(groups_by_kind)
            if len(traces) % 2:
                kinds.reverse()
            for kind in kinds:
                reset()
                with NoCommMode(groups_by_kind[kind]):
                    walls[kind].append(time_step(step, world))
            reset()
            traces.append(trace_step(step, world.device))

        try:
            repeat_within_budget(world, budget_seconds, run_round)
        finally:
            for group in fake_groups.values():
                dist.destroy_process_group(group)
        matched = [match_spans_to_calls(trace, calls) for trace in traces]
        walls_of_slowest = slowest(world.gather([trace.seconds for trace in traces]))
        median_step = walls_of_slowest.index(median_low(walls_of_slowest))
        trace = traces[median_step]
        start_ns = trace.start_ns - world.clock.offsets_ns[world.global_rank]
        late_ns = start_ns - min(world.gather(start_ns))
        return RankTimings(
            calls=calls,
            ranks_by_axis={
                axis: dist.get_process_group_ranks(group) for axis, group in self.axes.items()
            },
            wall_seconds=walls,
            matched=matched,
            median_step=median_step,
            breakdown=compute_breakdown(
                trace.step, trace.compute, matched[median_step].group_by_axis(), trace.copies
            ),
            phases=measure_phases(trace, matched[median_step]),
            timeline=build_rank_timeline(world.rank, trace, matched[median_step].named, late_ns),
        )

    def summarize(self, samples: Sequence[RankTimings]) -> Explanation:
        """Return metrics of a step's time, its communication calls and a timeline of all ranks.

        Metrics are the parts of the step's time, and the waiting for slower ranks. ``samples`` are
        the times of all ranks, by global rank. The calls are those of rank 0 in a step. The
        timeline is that of the median profiled step. It is left out if it has too many intervals.
        """
        first = samples[0]
        metrics = {
            **self._summarize_breakdown(samples),
            **make_values(
                {"ect": compute_ect([sample.wall_seconds for sample in samples])},
                "the slowest rank of each round",
            ),
            **summarize_waiting(samples, self.axes),
        }
        notes = []
        unseen = set[str]().union(*(sample.matched[first.median_step].unseen for sample in samples))
        if unseen:
            axes = ", ".join(sorted(unseen))
            notes.append(
                f"exposed communication and idle are unknown: the profiler missed calls on {axes}"
            )
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
        """Return the parts of the median profiled step's wall time, as metrics of the slowest rank.

        The slowest rank is the one with the longest wall time in this step. The keys are names of
        metrics: ``compute``, ``exposed_copy``, ``idle`` and the phases in seconds,
        ``exposed_comm.AXIS`` for the seconds of exposed communication on a mesh axis, and
        ``overlap`` for the fraction of the communication time that compute or copies hide. If the
        trace lacks calls, idle time, overlap and the exposed communication of the axes of these
        calls are unknown (None).
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
        }
        parts |= {f"exposed_comm.{axis}": seconds for axis, seconds in exposed.items()}
        parts |= slowest_rank.phases
        num_steps = len(slowest_rank.matched)
        return make_values(
            parts, f"the slowest rank of the median profiled step, of {num_steps} steps"
        )


def summarize_waiting(
    samples: Sequence[RankTimings], axes: Iterable[str]
) -> dict[str, MetricValue]:
    """Return metrics of the time of transfers, and of waiting for slower ranks in calls.

    They are ``comm_transfer.AXIS`` for each of the mesh ``axes``, the mean over ranks, and
    ``straggler_wait`` of the rank that waits longest. Both are in seconds, as means over profiled
    steps. ``samples`` are the times of all ranks. The result is empty if ranks make different
    calls, as in a pipeline, or if a trace does not match its calls.
    """
    calls = {tuple((call.axis, call.op) for call in sample.calls) for sample in samples}
    traces = [trace for sample in samples for trace in sample.matched]
    num_calls = len(samples[0].calls)
    is_matched = all(len(trace.spans) == num_calls and not trace.unseen for trace in traces)
    if len(calls) > 1 or not is_matched:
        return {}
    steps = range(len(samples[0].matched))
    transfers: defaultdict[str, float] = defaultdict(float)
    waits = []
    for rank in range(len(samples)):
        times = [split_transfer_and_wait(samples, rank, step) for step in steps]
        waits.append(fmean(wait for _, wait in times))
        for seconds_by_axis, _ in times:
            for axis, seconds in seconds_by_axis.items():
                transfers[axis] += seconds / len(traces)
    method = f"mean of {len(steps)} profiled steps"
    return {
        **make_values({"straggler_wait": max(waits)}, f"{method}, maximum over ranks"),
        **make_values(
            {f"comm_transfer.{axis}": transfers[axis] for axis in axes}, f"{method} and of ranks"
        ),
    }


def compute_ect(walls: Sequence[Mapping[str, Sequence[float]]]) -> Estimate | None:
    """Return the effective communication time in seconds, None for fewer than two rounds of steps.

    It is the time by which a step with communication takes longer than one without. Both run in a
    ``TorchDispatchMode``, whose cost is then in both. In each round, the maxima over ranks are
    compared. The result is the mean over rounds, with a 95 % interval by Student's t from three
    rounds on. ``walls`` has, for each rank, the seconds of its step in each round, keyed by kind:
    instrumented and without_comm.
    """
    with_comm = slowest([rank["instrumented"] for rank in walls])
    without_comm = slowest([rank["without_comm"] for rank in walls])
    if len(with_comm) < 2:
        return None
    differences = [first - second for first, second in zip(with_comm, without_comm, strict=True)]
    return estimate_mean(differences, "rounds", "difference")


def match_spans_to_calls(trace: StepTrace, calls: Sequence[SentCall]) -> MatchedTrace:
    """Return the start and stop of each communication call of a step, from a profiled step.

    Times are in ns on the clock of the trace. The entry of a call that the trace lacks is None.
    ``trace`` is the profiled step on this rank. ``calls`` are the calls that were recorded in
    another step. Every step makes the same calls in the same order. A call on a group of one rank
    sends nothing and may be missing in the trace.
    """
    spans = find_call_spans(trace, [call.axis for call in calls])
    if spans is None:
        axes = {call.axis for call in calls}
        axis = axes.pop() if len(axes) == 1 else OTHER
        named = [TimedCall(axis, "communication", event.span) for event in trace.comm]
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


def measure_phases(trace: StepTrace, matched: MatchedTrace) -> dict[str, float]:
    """Return the seconds of each phase of a profiled step on this rank, keyed by metric.

    A phase is a range that the step names, such as forward. The metrics are ``phase_time.PHASE``,
    ``phase_compute.PHASE``, ``phase_exposed.PHASE`` (communication that neither compute nor copies
    hide) and ``phase_idle.PHASE``. A phase that runs several times has the sum. The metrics
    ``phase_exposed`` and ``phase_idle`` are missing if the trace lacks communication calls.
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
    """Split the communication time of one rank in one profiled step into transfer and waiting.

    The first result is the seconds of transfer, keyed by mesh axis. The second is the seconds of
    waiting for slower ranks, over all axes. Every rank of a group makes the same call. The rank on
    which the call is shortest arrived last, so that its time is the transfer. On other ranks, the
    part of the call before this transfer is waiting. Time of concurrent calls counts once.
    ``samples`` are the times of all ranks, and ``step`` is the index of the profiled step.
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
