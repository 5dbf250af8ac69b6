"""The profiled steps of a job: the time of each rank and the collectives that ranks share.

The clocks of hosts are aligned by collectives, which end at about the same time on all their ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from parbench.bench.machine.machine import count_available_cores
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import Timeline
from parbench.bench.results.spans import Span, difference, intersection, length
from parbench.bench.results.step_trace import TimedCall, build_rank_timeline
from parbench.bench.text import UserError
from parbench.reports.traces.rank_trace import (
    UNMARKED,
    TracedCall,
    TracedRank,
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
    """The time of the transfer in ns: the duration of the call, minimum over ranks.

    The time in which a call is queued behind the previous call of its group does not count. On the
    other ranks, the rest of the duration is waiting.
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
    """The collectives that several traced ranks made, with times on the common clock of the job.

    Empty if the clocks of the hosts cannot be aligned.
    """
    offsets_ns: Mapping[int, int]
    """The common clock minus the clock of each rank in ns, keyed by rank.

    Empty if the clocks of the hosts cannot be aligned.
    """
    clock_error_ns: int | None
    """The uncertainty of the common clock in ns: 0 for one host, None without a common clock."""
    notes: tuple[str, ...]
    """Sentences about what the traces lack and how clocks were aligned."""

    @property
    def num_steps(self) -> int:
        """The number of steps that each rank has."""
        return len(self.ranks[0].steps)

    @property
    def step_seconds(self) -> float:
        """The step time of the job in seconds: the mean over steps, on the slowest rank."""
        return max(rank.compute_mean(lambda parts: parts.wall_seconds) for rank in self.ranks)


def read_job(paths: Sequence[Path]) -> TracedJob:
    """Read the trace files of the ranks of one job, in parallel on all cores.

    ``paths`` are files and folders. Raises ``UserError`` if a file is not a trace, if two files are
    of the same rank, or if the ranks have no step in common.
    """
    files = list_trace_files(paths)
    num_readers = min(len(files), count_available_cores())
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
    names = [{step.name for step in rank.steps} for rank in ranks]
    common = set.intersection(*names)
    if not common:
        raise UserError("the traces have no step in common: pass traces of the same steps")
    ranks = [
        replace(rank, steps=tuple(step for step in rank.steps if step.name in common))
        for rank in ranks
    ]
    shared_calls = _match_calls(ranks)
    offsets_ns, error_ns = _align_clocks(ranks, shared_calls)
    aligned_calls = []
    for shared in shared_calls if offsets_ns else ():
        spans = {}
        for rank, (start, stop) in shared.spans.items():
            spans[rank] = start + offsets_ns[rank], stop + offsets_ns[rank]
        aligned_calls.append(replace(shared, spans=spans))
    return TracedJob(
        ranks=tuple(ranks),
        shared_calls=tuple(aligned_calls),
        offsets_ns=offsets_ns,
        clock_error_ns=error_ns,
        notes=tuple(_describe_limits(ranks, error_ns)),
    )


def compute_waits(job: TracedJob) -> dict[int, float]:
    """Return the seconds per step in which the other ranks wait for each rank, keyed by that rank.

    Another rank waits from its arrival at a collective until the awaited rank arrives as the last
    one. Time in which the waiting rank computes or copies does not count. Its waits for one rank
    are summed over the collectives of a step. The result is the median of these sums over the
    waiting ranks, then over steps. Empty for a single rank, or without collectives on a common
    clock.
    """
    spans: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for shared in job.shared_calls:
        late_rank = shared.last_rank
        arrival = shared.spans[late_rank][0]
        for number, (start, _) in shared.spans.items():
            offset = job.offsets_ns[number]
            spans[late_rank, number, shared.step].append((start - offset, arrival - offset))
    waits: dict[int, float] = {}
    for late in job.ranks if job.shared_calls else ():
        by_step = []
        for index in range(job.num_steps):
            waits_ns = []
            for rank in job.ranks:
                if rank is not late:
                    step = rank.steps[index]
                    waiting = intersection(spans[late.rank, rank.rank, index], [step.step])
                    waits_ns.append(length(difference(waiting, step.busy)))
            by_step.append(median(waits_ns) / 1e9)
        waits[late.rank] = median(by_step)
    return waits


def build_timeline(job: TracedJob) -> Timeline:
    """Return the timeline of all ranks in the last profiled step, on the common clock of the job.

    Without a common clock, the step starts at 0 on each rank.
    """
    starts = {}
    for rank in job.ranks:
        local_start = rank.steps[-1].step[0]
        starts[rank.rank] = local_start + job.offsets_ns.get(rank.rank, -local_start)
    timelines = []
    for rank in job.ranks:
        step = rank.steps[-1]
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


def _match_calls(ranks: Sequence[TracedRank]) -> list[SharedCall]:
    """Return the collectives that all traced ranks of a process group made.

    Their times are on each rank's own clock.

    The ranks of a group make the same calls in the same order, so the k-th call of a step on one
    rank is the k-th on another. Calls whose group is unknown are left out, as are sends and
    receives.
    """
    calls: dict[_CallKey, dict[int, TracedCall]] = defaultdict(dict)
    transfers_ns: dict[_CallKey, list[int]] = defaultdict(list)
    for rank in ranks:
        counts = Counter[tuple[object, ...]]()
        group_stops: dict[object, int] = defaultdict(int)
        for step_number, step in enumerate(rank.steps):
            for call in step.calls:
                group = call.facts.ranks or call.facts.group
                if group is None or call.is_point_to_point:
                    continue
                start, stop = call.span
                kind = step_number, call.facts.op, group
                key = *kind, counts[kind]
                counts[kind] += 1
                calls[key][rank.rank] = call
                transfers_ns[key].append(max(0, stop - max(start, group_stops[group])))
                group_stops[group] = max(stop, group_stops[group])
    traced_ranks = {rank.rank for rank in ranks}
    shared_calls = []
    for key, by_rank in calls.items():
        first = next(iter(by_rank.values()))
        if len(by_rank) > 1 and by_rank.keys() == traced_ranks & set(
            first.facts.ranks or traced_ranks
        ):
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
    """Return (offset of each rank's clock, error of the common clock) in ns.

    Offsets are keyed by rank. A time on the clock of a rank plus the offset is the time on the
    common clock, which is the clock of the first rank's host. The clock of another host is aligned
    by the median difference between the ends of the collectives that both hosts share. The error is
    the median absolute deviation from this median, the maximum over hosts. If a host shares no
    collective with the first one, the offsets are empty and the error is None.
    """
    hosts = {rank.rank: rank.host or str(rank.rank) for rank in ranks}
    reference = hosts[ranks[0].rank]
    differences: dict[str, list[int]] = defaultdict(list)
    for shared in shared_calls:
        ends = {hosts[rank]: stop for rank, (_, stop) in shared.spans.items()}
        if reference in ends:
            for host, end in ends.items():
                differences[host].append(ends[reference] - end)
    shifts = {reference: 0}
    error_ns = 0
    for host, values in differences.items():
        shifts[host] = round(median(values))
        deviation = median(abs(value - shifts[host]) for value in values)
        error_ns = max(error_ns, round(deviation))
    if not shifts.keys() >= set(hosts.values()):
        return {}, None
    return {rank: shifts[host] for rank, host in hosts.items()}, error_ns


def _describe_limits(ranks: Sequence[TracedRank], error_ns: int | None) -> Iterator[str]:
    """Yield sentences about limits of the traces: unmarked steps, the clock, and different jobs.

    ``error_ns`` is the error of the common clock, None if the clocks of the hosts cannot be
    aligned.
    """
    if ranks[0].steps[0].name == UNMARKED:
        yield "no step is marked with profiler.step(): the recording counts as one step"
    if error_ns is None:
        yield "the hosts share no collective to align their clocks: late ranks are unknown"
    elif len({rank.host for rank in ranks}) > 1:
        yield (
            "the hosts' clocks are aligned by the ends of collectives, within "
            f"{format_seconds(error_ns / 1e9)}"
        )
    elif max(rank.steps[0].step[0] for rank in ranks) > min(
        rank.steps[-1].step[1] for rank in ranks
    ):
        yield "the ranks' steps do not overlap in time: the traces may be of different jobs"
