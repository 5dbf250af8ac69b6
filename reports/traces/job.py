"""The traced steps of a job: the time of each rank and the collectives that ranks share.

The clocks of hosts are aligned by collectives, which end at about the same time on all their ranks.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

from parbench.bench.machine.machine import count_available_cores
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.results.records import Timeline
from parbench.bench.results.spans import (
    Breakdown,
    Span,
    compute_breakdown,
    difference,
    intersection,
    length,
)
from parbench.bench.results.step_trace import CallFacts, StepTrace, TimedCall, build_rank_timeline
from parbench.bench.text import UserError
from parbench.reports.traces.rank_trace import Source, Window, list_trace_files, read_rank

POINT_TO_POINT = {"send", "recv", "sendrecv"}


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of communication on one rank, with its span on the clock of this rank."""

    facts: CallFacts
    span: Span

    @property
    def label(self) -> str:
        """The operation and the group of ranks."""
        group = self.facts.group or (f"{self.facts.size} ranks" if self.facts.size else "")
        return f"{self.facts.op} {group}".strip()

    @property
    def is_point_to_point(self) -> bool:
        """True for sends and receives."""
        return self.facts.op in POINT_TO_POINT


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A collective with its span on each of its ranks."""

    call: TracedCall
    """The call of one of the ranks."""
    step: int
    spans: Mapping[int, Span]
    """The span of each rank, on the common clock of the job."""
    queued_ns: Mapping[int, int]
    """The time in which each rank's call waited for the previous one on the same group."""

    @property
    def last_rank(self) -> int:
        """The rank that arrives last."""
        return max(self.spans, key=lambda rank: self.spans[rank][0])

    @property
    def transfer_ns(self) -> int:
        """The time of the transfer in nanoseconds: the shortest time of the call on any rank.

        On other ranks, the rest of the call is waiting.
        """
        return min(
            stop - start - self.queued_ns[rank] for rank, (start, stop) in self.spans.items()
        )

    @property
    def busbw(self) -> float | None:
        """The bus bandwidth in B/s by the convention of nccl-tests."""
        facts = self.call.facts
        factor = get_busbw_factor(facts.op, facts.size) if facts.size else None
        if factor is None or facts.num_bytes is None or self.transfer_ns <= 0:
            return None
        return factor * facts.num_bytes / self.transfer_ns * 1e9


class _CallKey(NamedTuple):
    """Identifies the same call on several ranks."""

    step: int
    op: str
    group: object
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """A step of one rank: its spans within the window, and the breakdown of its time."""

    name: str
    window: Span
    compute: list[Span]
    copies: list[Span]
    calls: list[TracedCall]
    phases: list[tuple[str, Span]]
    parts: Breakdown

    @property
    def busy(self) -> list[Span]:
        """The spans of computation and copies, which hide communication."""
        return [*self.compute, *self.copies]


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """The traced steps of one rank in order."""

    source: Source
    steps: tuple[TracedStep, ...]

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.source.rank

    @property
    def calls(self) -> Iterator[TracedCall]:
        """The communication calls of all steps of this rank."""
        return (call for step in self.steps for call in step.calls)

    @property
    def median_step(self) -> int:
        """The index of the step of median duration."""
        order = sorted(range(len(self.steps)), key=lambda step: self.steps[step].parts.wall_seconds)
        return order[(len(order) - 1) // 2]

    def compute_median(self, get_part: Callable[[Breakdown], float]) -> float:
        """Return the median over steps of a part of the breakdown."""
        return median(get_part(step.parts) for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class TracedJob:
    """The traces of all ranks of a job."""

    ranks: tuple[TracedRank, ...]
    shared_calls: tuple[SharedCall, ...]
    offsets_ns: Mapping[int, int]
    """The common clock minus the clock of each rank, keyed by rank. Empty if unknown."""
    clock_error_ns: int | None
    """The uncertainty of the common clock, None if the clocks cannot be aligned."""
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The number of traced steps of each rank."""
        return len(self.ranks[0].steps)

    @property
    def hosts(self) -> dict[int, str | None]:
        """The host of each traced rank."""
        return {rank.rank: rank.source.host for rank in self.ranks}

    def find_reach(self, call: TracedCall) -> str | None:
        """Return the reach of a call, within a node or between nodes. None if it is unknown."""
        hosts = {self.hosts.get(rank) for rank in call.facts.ranks or ()}
        if len(hosts - {None}) > 1:
            return "between nodes"
        return None if None in hosts or not hosts else "within a node"

    @property
    def step_seconds(self) -> float:
        """The median over steps of the slowest rank's step time in seconds."""
        return median(
            max(rank.steps[step].parts.wall_seconds for rank in self.ranks)
            for step in range(self.num_steps)
        )


def read_job(paths: Sequence[Path]) -> TracedJob:
    """Read the files of a job's ranks, in parallel on all cores.

    Raises ``UserError`` if a file is not a trace, or if two files are of the same rank.
    """
    files = list_trace_files(paths)
    num_readers = min(len(files), count_available_cores())
    if num_readers == 1:
        return join_ranks([read_rank_steps(file) for file in files])
    with ProcessPoolExecutor(num_readers, mp_context=get_context("fork")) as executor:
        return join_ranks(list(executor.map(read_rank_steps, files)))


def read_rank_steps(path: Path) -> TracedRank:
    """Read a rank's file and divide its steps into their parts."""
    rank_trace = read_rank(path)
    trace = rank_trace.trace
    all_facts = trace.facts or [None] * len(trace.comm)
    calls = [
        TracedCall(facts or CallFacts("communication"), span)
        for facts, span in zip(all_facts, trace.comm, strict=True)
    ]
    steps = tuple(_build_step(window, trace, calls) for window in rank_trace.steps)
    return TracedRank(source=rank_trace.source, steps=steps)


def join_ranks(ranks: Sequence[TracedRank]) -> TracedJob:
    """Return the job of these ranks, with the steps that all of them traced.

    Raises ``UserError`` if two files are of the same rank, or if there is no common step.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    for first, second in pairwise(ranks):
        if first.rank == second.rank:
            raise UserError(
                f"{first.source.path} and {second.source.path} are both of rank {first.rank}: "
                "pass one trace per rank, all of the same job"
            )
    ranks = _keep_common_steps(ranks)
    shared_calls = _match_calls(ranks)
    offsets_ns, error_ns = _align_clocks([rank.source for rank in ranks], shared_calls)
    if not offsets_ns:
        shared_calls = []
    return TracedJob(
        ranks=tuple(ranks),
        shared_calls=tuple(_shift_clock(call, offsets_ns) for call in shared_calls),
        offsets_ns=offsets_ns,
        clock_error_ns=error_ns,
        notes=tuple(_describe_limits(ranks, error_ns)),
    )


def compute_waits(job: TracedJob) -> dict[int, list[float]]:
    """Return the seconds in which the other ranks only wait for a rank, by rank and then by step.

    A value is the median over the other ranks of the time in which they have nothing else to do.
    """
    spans: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for shared in job.shared_calls:
        late_rank = shared.last_rank
        arrival = shared.spans[late_rank][0]
        for rank, (start, _) in shared.spans.items():
            offset = job.offsets_ns[rank]
            spans[late_rank, rank, shared.step].append((start - offset, arrival - offset))
    waits: dict[int, list[float]] = {}
    if len(job.ranks) < 2 or not job.shared_calls:
        return waits
    for late in job.ranks:
        others = [rank for rank in job.ranks if rank is not late]
        waits[late.rank] = [
            median(
                _compute_idle_wait(rank.steps[step], spans[late.rank, rank.rank, step])
                for rank in others
            )
            for step in range(job.num_steps)
        ]
    return waits


def build_timeline(job: TracedJob) -> Timeline:
    """Return the timeline of all ranks in the first rank's step of median duration."""
    step_number = job.ranks[0].median_step
    starts = {}
    for rank in job.ranks:
        local_start = rank.steps[step_number].window[0]
        # Without a common clock, all ranks start at 0.
        starts[rank.rank] = local_start + job.offsets_ns.get(rank.rank, -local_start)
    timelines = []
    for rank in job.ranks:
        step = rank.steps[step_number]
        trace = StepTrace(
            step=step.window,
            wall_seconds=step.parts.wall_seconds,
            compute=step.compute,
            copies=step.copies,
            phases=step.phases,
        )
        comm = [
            TimedCall(call.label, call.facts.op, call.span, call.facts.num_bytes)
            for call in step.calls
        ]
        late_ns = starts[rank.rank] - min(starts.values())
        timelines.append(build_rank_timeline(rank.rank, trace, comm, late_ns))
    hosts = {rank.source.host for rank in job.ranks}
    return Timeline(
        clock="one host" if len(hosts) == 1 else "ends of collectives",
        uncertainty_seconds=(job.clock_error_ns or 0) / 1e9,
        ranks=tuple(timelines),
    )


def _build_step(window: Window, trace: StepTrace, all_calls: Sequence[TracedCall]) -> TracedStep:
    """Return a step of a rank, with the parts of its trace within the window."""
    start, stop = span = window.span
    calls = [call for call in all_calls if start <= call.span[0] < stop]
    compute = intersection(_select_near(trace.compute, span), [span])
    copies = intersection(_select_near(trace.copies, span), [span])
    comm: dict[str, list[Span]] = defaultdict(list)
    for call in calls:
        comm[call.label].append(call.span)
    return TracedStep(
        name=window.name,
        window=span,
        compute=compute,
        copies=copies,
        calls=calls,
        phases=[phase for phase in trace.phases if start <= phase[1][0] < stop],
        parts=compute_breakdown(span, compute, comm, copies),
    )


def _select_near(spans: Sequence[Span], window: Span) -> Sequence[Span]:
    """Return the sorted, disjoint spans that may overlap a window."""
    first = max(bisect_left(spans, (window[0], window[0])) - 1, 0)
    return spans[first : bisect_left(spans, (window[1], window[1]))]


def _keep_common_steps(ranks: Sequence[TracedRank]) -> list[TracedRank]:
    """Return the ranks with only the steps that all of them traced."""
    names_by_rank = {rank.rank: [step.name for step in rank.steps] for rank in ranks}
    common = set.intersection(*map(set, names_by_rank.values()))
    if not common:
        ranges = [
            f"rank {rank}: {names[0]} to {names[-1]}" for rank, names in names_by_rank.items()
        ]
        raise UserError(
            f"the ranks' traces have no step in common ({', '.join(ranges)}): "
            "pass traces of the same steps"
        )
    return [
        replace(rank, steps=tuple(step for step in rank.steps if step.name in common))
        for rank in ranks
    ]


def _match_calls(ranks: Sequence[TracedRank]) -> list[SharedCall]:
    """Return the calls that all traced ranks of a group made, on each rank's own clock.

    The ranks of a group make the same calls in the same order, so the k-th call of a step on one
    rank is the k-th on another.
    """
    calls: dict[_CallKey, dict[int, tuple[TracedCall, int]]] = defaultdict(dict)
    for rank in ranks:
        counts: Counter[_CallKey] = Counter()
        group_stops: dict[object, int] = {}
        for step_number, step in enumerate(rank.steps):
            for call in step.calls:
                group = call.facts.ranks or call.facts.group
                if group is None or call.is_point_to_point:
                    continue
                start, stop = call.span
                previous_stop = group_stops.get(group, start)
                group_stops[group] = max(stop, previous_stop)
                key = _CallKey(step_number, call.facts.op, group)
                queued_ns = max(min(previous_stop, stop) - start, 0)
                calls[key._replace(number=counts[key])][rank.rank] = call, queued_ns
                counts[key] += 1
    traced_ranks = {rank.rank for rank in ranks}
    shared_calls = []
    for key, by_rank in calls.items():
        first = next(call for call, _ in by_rank.values())
        group_ranks = set(first.facts.ranks or traced_ranks) & traced_ranks
        if len(by_rank) > 1 and by_rank.keys() == group_ranks:
            shared = SharedCall(
                call=first,
                step=key.step,
                spans={rank: call.span for rank, (call, _) in by_rank.items()},
                queued_ns={rank: queued_ns for rank, (_, queued_ns) in by_rank.items()},
            )
            shared_calls.append(shared)
    return shared_calls


def _align_clocks(
    sources: Sequence[Source], shared_calls: Sequence[SharedCall]
) -> tuple[dict[int, int], int | None]:
    """Return the offset of each rank's clock and the error of the common clock, in nanoseconds.

    Hosts are joined by the median difference between the ends of their collectives. There are no
    offsets and the error is None if a host shares no collective with the other hosts.
    """
    hosts = {source.rank: source.host or str(source.rank) for source in sources}
    bases = {source.rank: source.base_ns for source in sources}
    differences: dict[tuple[str, str], list[int]] = defaultdict(list)
    for shared in shared_calls:
        ends = {hosts[rank]: stop + bases[rank] for rank, (_, stop) in shared.spans.items()}
        for first, second in permutations(ends, 2):
            differences[first, second].append(ends[first] - ends[second])
    reference = hosts[sources[0].rank]
    shifts = {reference: 0}
    error_ns = 0
    pending = [reference]
    while pending:
        aligned = pending.pop()
        for (first, second), values in differences.items():
            if first != aligned or second in shifts:
                continue
            middle = round(median(values))
            shifts[second] = shifts[first] + middle
            deviation = median(abs(value - middle) for value in values)
            error_ns = max(error_ns, round(deviation))
            pending.append(second)
    if not shifts.keys() >= set(hosts.values()):
        return {}, None
    return {rank: bases[rank] + shifts[host] for rank, host in hosts.items()}, error_ns


def _shift_clock(shared: SharedCall, offsets_ns: Mapping[int, int]) -> SharedCall:
    """Return a collective with its spans on the common clock of the job."""
    spans = {}
    for rank, (start, stop) in shared.spans.items():
        spans[rank] = start + offsets_ns[rank], stop + offsets_ns[rank]
    return replace(shared, spans=spans)


def _compute_idle_wait(step: TracedStep, waits: Sequence[Span]) -> float:
    """Return the seconds of waits within a step in which the rank is not busy."""
    return length(difference(intersection(waits, [step.window]), step.busy)) / 1e9


def _describe_limits(ranks: Sequence[TracedRank], error_ns: int | None) -> list[str]:
    """Return notes about what the traces lack."""
    sources = [rank.source for rank in ranks]
    notes = [f"rank {source.rank}: {note}" for source in sources for note in source.notes]
    world_size = max((source.world_size or 0 for source in sources), default=0)
    if world_size > len(sources):
        notes.append(
            f"traces of {len(sources)} of {world_size} ranks: a late rank may be among the others"
        )
    if len({source.host for source in sources}) > 1:
        if error_ns is None:
            notes.append("the hosts share no collective to align their clocks: skew is unknown")
        else:
            notes.append(
                "the hosts' clocks are aligned by the ends of collectives, "
                f"within {error_ns / 1e3:.0f} us"
            )
    calls = (call.facts for rank in ranks for call in rank.calls)
    if any(facts.ranks is None and facts.group is None for facts in calls):
        notes.append("some collectives record no group: their skew is unknown")
    return notes
