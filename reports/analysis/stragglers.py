"""Stragglers: ranks that arrive last or finish last in more repetitions than chance explains.

All ranks of an operation should arrive together. A rank that is late in most iterations of most
repetitions has less compute, a slower link or a busy core.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parbench.bench.results.records import Record
from parbench.bench.results.records import Stragglers as RecordedStragglers
from parbench.bench.results.runs import Run, load_rank_samples
from parbench.bench.results.stats import median
from parbench.bench.text import UserError
from parbench.reports.analysis.case_results import CaseResult

MIN_ITERATION_SHARE = 0.5
"""A record names a rank that is last in more than this share of its iterations."""
MIN_TIME_SHARE = 0.1
"""A delay is relevant if it exceeds this share of the time of the case."""
MIN_VOTE_SHARE = 2 / 3
"""The share of a repetition's cases that must name the same rank."""
MAX_CHANCE = 0.07
"""The largest probability that chance names a rank as often.

The probability is 0.0625 for one of two ranks in all of five repetitions.
"""
MAX_BARRIER_SKEW_SECONDS = 5e-4
"""The skew that the barrier before an operation may cause, at most its transfer time."""
SYMMETRIC_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations in which all ranks do the same work, so that they should finish together."""


class StragglerVote(NamedTuple):
    """A rank that a case of one repetition names, and the delay of the rank."""

    rank: int
    seconds: float
    time_share: float
    """The delay relative to the time of the case."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that more repetitions name than chance explains, with its median delay."""

    rank: int
    repetitions: int
    of_repetitions: int
    seconds: float
    time_share: float

    def describe_repetitions(self) -> str:
        """Return the number of repetitions that name the rank: ``4 of 5 repetitions``."""
        return f"{self.repetitions} of {self.of_repetitions} repetitions"


def find_last_arriving_rank(results: Sequence[CaseResult]) -> Straggler | None:
    """Return the rank that arrives last by more than a barrier explains, None if there is none."""
    transfers = [result.value("transfer") for result in results]
    known_transfers = [seconds for seconds in transfers if seconds]
    barrier_skew = min([MAX_BARRIER_SKEW_SECONDS, *known_transfers]) if known_transfers else 0.0

    def read_delay(record: Record, arrival: RecordedStragglers) -> tuple[int | None, float]:
        skew = _get_value(record, "skew")
        is_named = (arrival.share or 0.0) > MIN_ITERATION_SHARE and skew > barrier_skew
        return arrival.late_rank if is_named else None, skew

    return _find_straggler(results, read_delay)


def find_last_finishing_rank(run: Run, results: Sequence[CaseResult]) -> Straggler | None:
    """Return the rank that finishes last where all ranks do the same, None without such a rank."""
    symmetric = [
        result
        for result in results
        if result.case.short_name in SYMMETRIC_OPERATIONS or not result.is_communication
    ]

    def read_delay(record: Record, arrival: RecordedStragglers) -> tuple[int | None, float]:
        rank = arrival.last_out_rank
        if rank is None or (arrival.last_out_share or 0.0) <= MIN_ITERATION_SHARE:
            return None, 0.0
        return rank, _compute_exit_delay(run, record, rank)

    return _find_straggler(symmetric, read_delay)


def _find_straggler(
    results: Sequence[CaseResult],
    read_delay: Callable[[Record, RecordedStragglers], tuple[int | None, float]],
) -> Straggler | None:
    """Return the rank that records name more often than chance, None if there is none.

    ``read_delay`` gives the rank that a record names and its delay in seconds.
    """
    votes: dict[int, list[StragglerVote]] = defaultdict(list)
    repetitions = set()
    for result in results:
        for record in result.measured:
            seconds = _get_value(record, result.headline)
            if record.arrival and seconds:
                repetitions.add(record.repetition)
                rank, delay = read_delay(record, record.arrival)
                if rank is not None and delay > MIN_TIME_SHARE * seconds:
                    vote = StragglerVote(rank, delay, delay / seconds)
                    votes[record.repetition].append(vote)
    num_ranks = max((result.world.size for result in results), default=1)
    return elect_straggler(votes, len(repetitions), num_ranks)


def elect_straggler(
    votes_by_repetition: Mapping[int, Sequence[StragglerVote]], num_repetitions: int, num_ranks: int
) -> Straggler | None:
    """Return the rank that repetitions name more often than chance, None if there is none.

    If every repetition named a random rank, the number that name one of ``num_ranks`` ranks would
    be binomial. The bound for any rank is the sum over all ranks.
    """
    named: Counter[int] = Counter()
    for votes in votes_by_repetition.values():
        [(rank, count)] = Counter(vote.rank for vote in votes).most_common(1)
        if count >= MIN_VOTE_SHARE * len(votes):
            named[rank] += 1
    if not named:
        return None
    from scipy.special import bdtrc  # type: ignore[import-untyped]

    [(rank, count)] = named.most_common(1)
    if num_ranks * bdtrc(count - 1, num_repetitions, 1 / num_ranks) > MAX_CHANCE:
        return None
    own_votes = [
        vote for votes in votes_by_repetition.values() for vote in votes if vote.rank == rank
    ]
    return Straggler(
        rank=rank,
        repetitions=count,
        of_repetitions=num_repetitions,
        seconds=median([vote.seconds for vote in own_votes]),
        time_share=median([vote.time_share for vote in own_votes]),
    )


def _get_value(record: Record, name: str) -> float:
    """Return a metric of a record, 0 if it is unknown."""
    metric = record.metrics.get(name)
    return (metric and metric.value) or 0.0


def _compute_exit_delay(run: Run, record: Record, rank: int) -> float:
    """Return the median seconds from the last exit of all other ranks to the exit of ``rank``.

    The result is negative if another rank is later, and 0 without samples of at least two ranks.
    """
    try:
        samples = load_rank_samples(run, record)
    except UserError:
        return 0.0
    ranks = list(samples.get("ranks", ()))
    if rank not in ranks or len(ranks) < 2 or "exit_ns" not in samples:
        return 0.0
    index = ranks.index(rank)
    exits = samples["exit_ns"]
    last_other_exits = np.delete(exits, index, axis=0).max(axis=0)
    return float(np.median(exits[index] - last_other_exits)) / 1e9


def find_arrival(result: CaseResult) -> RecordedStragglers | None:
    """Return the arrivals of the first repetition that recorded them, None without any."""
    arrivals = [record.arrival for record in result.measured if record.arrival]
    return arrivals[0] if arrivals else None


def compute_arrival_delays(run: Run, result: CaseResult) -> dict[int, float]:
    """Return the median seconds from the first arrival to the arrival of each rank.

    The delay of a repetition is the median over its iterations. Damaged samples are left out.
    """
    delays: dict[int, list[float]] = defaultdict(list)
    for record in result.measured:
        try:
            samples = load_rank_samples(run, record)
        except UserError:
            continue
        if "arrival_ns" in samples:
            arrivals = samples["arrival_ns"]
            medians = np.median(arrivals - arrivals.min(axis=0), axis=1) / 1e9
            for rank, seconds in zip(samples["ranks"].tolist(), medians.tolist(), strict=True):
                delays[rank].append(seconds)
    return {rank: median(delays[rank]) for rank in sorted(delays)}
