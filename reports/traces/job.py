"""The profiled steps of a job: the time of each rank and the collectives that ranks share.

The clocks of hosts are aligned by collectives, which end at about the same time on all their ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from parbench.bench.machine.machine import count_available_cores
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.results.records import Timeline
from parbench.bench.results.spans import Span, difference, intersection, length
from parbench.bench.results.step_trace import TimedCall, build_rank_timeline
from parbench.bench.text import UserError
from parbench.reports.traces.rank_trace import (
    TracedCall,
    TracedRank,
    TracedStep,
    list_trace_files,
    read_rank,
)

_CallKey = tuple[int, str, tuple[int, ...] | str, int]
"""Identifies a collective on all ranks: step, operation, group, and number among equal calls.

The step is an index. The group is its ranks or, if they are unknown, its name. The number counts
the calls of this operation in this group and step from 0.
"""


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A collective with its start and end on each of its ranks that have a trace."""

    call: TracedCall
    """The call of one of the ranks, for its operation, group and bytes."""
    step: int
    """The index of the step among the steps that all ranks traced."""
    spans: Mapping[int, Span]
    """The start and end in ns on the common clock of the job, keyed by rank."""
    transfer_ns: int
    """The time of the transfer in ns: the shortest duration of the call on any rank.

    On other ranks, the rest of the call is waiting. The time in which a call is queued behind the
    previous one of its group does not count.
    """

    @property
    def last_rank(self) -> int:
        """The global rank that starts the call last, so that the others wait for it."""
        return max(self.spans, key=lambda rank: self.spans[rank][0])

    @property
    def busbw(self) -> float | None:
        """The bus bandwidth of the transfer in B/s by the convention of nccl-tests.

        None if the operation has no bus bandwidth, or if the bytes, ranks or transfer time are
        unknown.
        """
        facts = self.call.facts
        factor = get_busbw_factor(facts.op, facts.size) if facts.size else None
        if factor is None or facts.num_bytes is None or self.transfer_ns <= 0:
            return None
        return factor * facts.num_bytes / self.transfer_ns * 1e9


@dataclass(frozen=True, kw_only=True)
class TracedJob:
    """The profiled steps of the ranks of a job that have traces, and their common collectives."""

    ranks: tuple[TracedRank, ...]
    """The traced ranks in ascending order, each with the steps that all of them traced."""
    shared_calls: tuple[SharedCall, ...]
    """The collectives that several traced ranks made, on their common clock. Empty without one."""
    offsets_ns: Mapping[int, int]
    """The common clock minus the clock of each rank in ns, keyed by rank.

    Empty if the clocks of the hosts cannot be aligned.
    """
    clock_error_ns: int | None
    """The uncertainty of the common clock in ns, None if the clocks cannot be aligned."""
    notes: tuple[str, ...]
    """Sentences about what the traces lack and how clocks were aligned."""

    @property
    def num_steps(self) -> int:
        """The number of steps that each rank has."""
        return len(self.ranks[0].steps)

    @property
    def hosts(self) -> dict[int, str | None]:
        """The name of the host of each traced rank, keyed by rank.

        None if the trace does not state it.
        """
        return {rank.rank: rank.host for rank in self.ranks}

    def find_reach(self, call: TracedCall) -> str | None:
        """Return ``within a node`` or ``between nodes`` by the hosts of a call's ranks.

        None if the ranks are unknown, or if the known ranks share a host and another host is
        unknown.
        """
        hosts = {self.hosts.get(rank) for rank in call.facts.ranks or ()}
        if len(hosts - {None}) > 1:
            return "between nodes"
        return None if None in hosts or not hosts else "within a node"

    @property
    def step_seconds(self) -> float:
        """The step time of the job in seconds: the maximum over ranks, then the median over steps."""
        return median(
            max(rank.steps[step].parts.wall_seconds for rank in self.ranks)
            for step in range(self.num_steps)
        )


def read_job(paths: Sequence[Path]) -> TracedJob:
    """Read the trace files of the ranks of one job, in parallel on all cores.

    ``paths`` are files and folders. Raises ``UserError`` if a file is not a trace, if two files are
    of the same rank, or if the ranks have no step in common.
    """
    files = list_trace_files(paths)
    num_readers = min(len(files), count_available_cores())
    if num_readers == 1:
        return join_ranks([read_rank(file) for file in files])
    with ProcessPoolExecutor(num_readers, mp_context=get_context("fork")) as executor:
        return join_ranks(list(executor.map(read_rank, files)))


def join_ranks(ranks: Sequence[TracedRank]) -> TracedJob:
    """Return the job that these ranks form, with only the steps that all of them traced.

    Raises ``UserError`` if two files are of the same rank, or if the ranks have no step in common.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    for first, second in pairwise(ranks):
        if first.rank == second.rank:
            raise UserError(
                f"{first.path} and {second.path} are both of rank {first.rank}: "
                "pass one trace per rank, all of the same job"
            )
    ranks = _keep_common_steps(ranks)
    shared_calls = _match_calls(ranks)
    offsets_ns, error_ns = _align_clocks(ranks, shared_calls)
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
    """Return the seconds that the other ranks only wait for each rank, keyed by the awaited rank.

    There is a value for each step in order. Another rank waits from its arrival at a collective
    until the awaited rank arrives as the last one. Time in which it computes or copies does not
    count. Its waits are summed over the collectives of the step. The value is the median of these
    sums over the other ranks. Empty for a single rank, or without collectives on a common clock.
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
    """Return the timeline of all ranks in one step, which is of median duration on the first rank.

    Without a common clock, all ranks start at 0.
    """
    step_number = job.ranks[0].median_step
    starts = {}
    for rank in job.ranks:
        local_start = rank.steps[step_number].step[0]
        # Without a common clock, all ranks start at 0.
        starts[rank.rank] = local_start + job.offsets_ns.get(rank.rank, -local_start)
    timelines = []
    for rank in job.ranks:
        step = rank.steps[step_number]
        comm = [
            TimedCall(call.label, call.facts.op, call.span, call.facts.num_bytes)
            for call in step.calls
        ]
        late_ns = starts[rank.rank] - min(starts.values())
        timelines.append(build_rank_timeline(rank.rank, step, comm, late_ns))
    hosts = {rank.host for rank in job.ranks}
    return Timeline(
        clock="one host" if len(hosts) == 1 else "ends of collectives",
        uncertainty_seconds=(job.clock_error_ns or 0) / 1e9,
        ranks=tuple(timelines),
    )


def _keep_common_steps(ranks: Sequence[TracedRank]) -> list[TracedRank]:
    """Return the ranks with only the steps that all of them traced, by the names of steps.

    Raises ``UserError`` if the ranks have no step in common.
    """
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
    """Return the collectives that all traced ranks of a group made, on each rank's own clock.

    The ranks of a group make the same calls in the same order, so the k-th call of a step on one
    rank is the k-th on another. Calls whose group is unknown are left out, as are sends and
    receives.
    """
    calls: dict[_CallKey, dict[int, TracedCall]] = defaultdict(dict)
    transfers_ns: dict[_CallKey, list[int]] = defaultdict(list)
    for rank in ranks:
        counts = Counter[tuple[object, ...]]()
        group_stops: dict[object, int] = {}
        for step_number, step in enumerate(rank.steps):
            for call in step.calls:
                group = call.facts.ranks or call.facts.group
                if group is None or call.is_point_to_point:
                    continue
                start, stop = call.span
                previous_stop = group_stops.get(group, start)
                group_stops[group] = max(stop, previous_stop)
                kind = step_number, call.facts.op, group
                key = *kind, counts[kind]
                counts[kind] += 1
                calls[key][rank.rank] = call
                transfers_ns[key].append(stop - max(start, min(previous_stop, stop)))
    traced_ranks = {rank.rank for rank in ranks}
    shared_calls = []
    for key, by_rank in calls.items():
        first = next(iter(by_rank.values()))
        group_ranks = set(first.facts.ranks or traced_ranks) & traced_ranks
        if len(by_rank) > 1 and by_rank.keys() == group_ranks:
            shared = SharedCall(
                call=first,
                step=key[0],
                spans={rank: call.span for rank, call in by_rank.items()},
                transfer_ns=min(transfers_ns[key]),
            )
            shared_calls.append(shared)
    return shared_calls


def _align_clocks(
    ranks: Sequence[TracedRank], shared_calls: Sequence[SharedCall]
) -> tuple[dict[int, int], int | None]:
    """Return the offset of each rank's clock, keyed by rank, and the error of the common clock.

    Both are in ns. A time of the rank plus its offset is the time on the common clock. The clocks
    of two hosts are aligned by the median difference between the ends of their collectives. The
    error is the median absolute deviation from this median, the maximum over pairs of hosts. If a
    host shares no collective with the other hosts, the offsets are empty and the error is None.
    """
    hosts = {rank.rank: rank.host or str(rank.rank) for rank in ranks}
    bases = {rank.rank: rank.base_ns for rank in ranks}
    differences: dict[tuple[str, str], list[int]] = defaultdict(list)
    for shared in shared_calls:
        ends = {hosts[rank]: stop + bases[rank] for rank, (_, stop) in shared.spans.items()}
        for first, second in permutations(ends, 2):
            differences[first, second].append(ends[first] - ends[second])
    reference = hosts[ranks[0].rank]
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
    """Return a collective with its times moved from the clock of each rank to the common clock.

    ``offsets_ns`` is keyed by rank.
    """
    spans = {}
    for rank, (start, stop) in shared.spans.items():
        spans[rank] = start + offsets_ns[rank], stop + offsets_ns[rank]
    return replace(shared, spans=spans)


def _compute_idle_wait(step: TracedStep, waits: Sequence[Span]) -> float:
    """Return the seconds of a rank's waits within a step in which it neither computes nor copies.

    ``waits`` are spans in ns on the clock of this rank.
    """
    return length(difference(intersection(waits, [step.step]), step.busy)) / 1e9


def _describe_limits(ranks: Sequence[TracedRank], error_ns: int | None) -> list[str]:
    """Return sentences about missing ranks, unknown groups, and the accuracy of the common clock.

    They begin with the notes on each rank's file. ``error_ns`` is the error of the common clock,
    None if the clocks of the hosts cannot be aligned.
    """
    notes = [f"rank {rank.rank}: {note}" for rank in ranks for note in rank.notes]
    world_size = max(rank.world_size or 0 for rank in ranks)
    if world_size > len(ranks):
        notes.append(
            f"traces of {len(ranks)} of {world_size} ranks: a late rank may be among the others"
        )
    if len({rank.host for rank in ranks}) > 1:
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
