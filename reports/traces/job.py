"""The traced steps of a job: the time of each rank and the collectives that ranks share.

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
"""The step, the operation and the group of a call, and its number among such calls."""


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A collective with its span on each of its ranks."""

    call: TracedCall
    """The call of one of the ranks."""
    step: int
    spans: Mapping[int, Span]
    """The span of each rank, on the common clock of the job."""
    transfer_ns: int
    """The time of the transfer in nanoseconds: the shortest time of the call on any rank.

    On other ranks, the rest of the call is waiting. The time in which a call is queued behind the
    previous one of its group does not count.
    """

    @property
    def last_rank(self) -> int:
        """The rank that arrives last."""
        return max(self.spans, key=lambda rank: self.spans[rank][0])

    @property
    def busbw(self) -> float | None:
        """The bus bandwidth in B/s by the convention of nccl-tests."""
        facts = self.call.facts
        factor = get_busbw_factor(facts.op, facts.size) if facts.size else None
        if factor is None or facts.num_bytes is None or self.transfer_ns <= 0:
            return None
        return factor * facts.num_bytes / self.transfer_ns * 1e9


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
        return {rank.rank: rank.host for rank in self.ranks}

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
        return join_ranks([read_rank(file) for file in files])
    with ProcessPoolExecutor(num_readers, mp_context=get_context("fork")) as executor:
        return join_ranks(list(executor.map(read_rank, files)))


def join_ranks(ranks: Sequence[TracedRank]) -> TracedJob:
    """Return the job of these ranks, with the steps that all of them traced.

    Raises ``UserError`` if two files are of the same rank, or if there is no common step.
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
    """Return the offset of each rank's clock and the error of the common clock, in nanoseconds.

    Hosts are joined by the median difference between the ends of their collectives. There are no
    offsets and the error is None if a host shares no collective with the other hosts.
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
    """Return a collective with its spans on the common clock of the job."""
    spans = {}
    for rank, (start, stop) in shared.spans.items():
        spans[rank] = start + offsets_ns[rank], stop + offsets_ns[rank]
    return replace(shared, spans=spans)


def _compute_idle_wait(step: TracedStep, waits: Sequence[Span]) -> float:
    """Return the seconds of waits within a step in which the rank is not busy."""
    return length(difference(intersection(waits, [step.step]), step.busy)) / 1e9


def _describe_limits(ranks: Sequence[TracedRank], error_ns: int | None) -> list[str]:
    """Return notes about what the traces lack."""
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
