"""Stragglers: ranks that arrive last or finish last in more repetitions than chance explains.

A case votes for the rank that is late in most of its iterations, once per repetition.
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
"""A record votes for a rank that is last in more than this share of its iterations."""
MIN_TIME_SHARE = 0.1
"""A rank's delay counts only if it exceeds this share of the duration of the case."""
MIN_VOTE_SHARE = 2 / 3
"""A repetition names a rank if at least this share of the votes of its cases are for that rank."""
MAX_CHANCE = 0.07
"""The largest probability with which random ranks would give one rank as many repetitions.

The probability is 0.0625 for one of two ranks in all of five repetitions.
"""
MAX_BARRIER_SKEW_SECONDS = 5e-4
"""The arrival skew that the barrier before an operation explains, at most the transfer time."""
SYMMETRIC_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations in which all ranks do the same work, so that they should finish together."""


class StragglerVote(NamedTuple):
    """The rank that one case shows as late in one repetition, with its delay.

    A rank is late because it arrives last or finishes last in most iterations, or because it
    computes longest in the profiled step.
    """

    rank: int
    """The late rank."""
    seconds: float
    """The delay of the rank.

    For a rank that arrives last: its arrival minus the first arrival. For a rank that finishes
    last: its exit minus the last exit of the other ranks. Both are medians over iterations. For a
    rank that computes longest: its compute time minus the median of the other ranks.
    """
    time_share: float
    """The delay over the duration of an iteration of the case, as a fraction.

    Only for a rank that computes longest: its compute time over the median of the other ranks, such
    as 1.3.
    """


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is late in more repetitions than random ranks would explain."""

    rank: int
    """The late rank."""
    repetitions: int
    """The number of repetitions in which most cases show this rank as late."""
    of_repetitions: int
    """The number of repetitions that recorded the times of ranks."""
    seconds: float
    """The median of ``StragglerVote.seconds`` over the cases and repetitions that show the rank."""
    time_share: float
    """The median of ``StragglerVote.time_share`` over the cases and repetitions that show the rank.

    It is the delay over the duration of an iteration. Only for a rank that computes longest, it is
    its compute time over the median of the other ranks.
    """

    def describe_repetitions(self) -> str:
        """Return the number of repetitions that show the rank as late: ``4 of 5 repetitions``."""
        return f"{self.repetitions} of {self.of_repetitions} repetitions"


def find_last_arriving_rank(results: Sequence[CaseResult]) -> Straggler | None:
    """Return the rank that arrives last at operations, clearly later than a barrier explains.

    ``results`` are measured cases of one run. None if chance may explain the late arrivals.
    """
    transfers = [result.value("transfer") for result in results]
    known_transfers = [seconds for seconds in transfers if seconds]
    barrier_skew = min([MAX_BARRIER_SKEW_SECONDS, *known_transfers]) if known_transfers else 0.0

    def read_delay(record: Record, arrival: RecordedStragglers) -> tuple[int | None, float]:
        """Return the rank that most often arrives last in a record, and the skew in seconds.

        The skew is the last arrival minus the first, the median over iterations. The rank is None
        if no rank is last in over half of the iterations, or if a barrier explains the skew.
        """
        skew = _get_value(record, "skew")
        is_named = (arrival.share or 0.0) > MIN_ITERATION_SHARE and skew > barrier_skew
        return arrival.late_rank if is_named else None, skew

    return _find_straggler(results, read_delay)


def find_last_finishing_rank(run: Run, results: Sequence[CaseResult]) -> Straggler | None:
    """Return the rank that finishes last in cases in which all ranks do the same work.

    These are symmetric collectives and training steps among ``results``, the measured cases. None
    if chance may explain the late ranks. The exit times of ranks are read from the folder of
    ``run``.
    """
    symmetric = [
        result
        for result in results
        if result.case.short_name in SYMMETRIC_OPERATIONS or not result.is_communication
    ]

    def read_delay(record: Record, arrival: RecordedStragglers) -> tuple[int | None, float]:
        """Return the rank that most often leaves last in a record, and its delay in seconds.

        The delay is the median over iterations of the time since the last other rank left. The rank
        is None if no rank is last in over half of the iterations.
        """
        rank = arrival.last_out_rank
        if rank is None or (arrival.last_out_share or 0.0) <= MIN_ITERATION_SHARE:
            return None, 0.0
        return rank, _compute_exit_delay(run, record, rank)

    return _find_straggler(symmetric, read_delay)


def _find_straggler(
    results: Sequence[CaseResult],
    read_delay: Callable[[Record, RecordedStragglers], tuple[int | None, float]],
) -> Straggler | None:
    """Return the rank that is late in more repetitions than chance explains, None without one.

    ``results`` are the measured cases of a run. ``read_delay`` takes a record (one case in one
    repetition) and its arrivals. It returns the late rank, or None, and the delay in seconds. A
    delay of at most 10 % of the duration of an iteration does not count.
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
    """Return the rank that is late in more repetitions than chance explains, None without one.

    A rank is late in a repetition if at least two thirds of the votes in this repetition are for
    the rank. The result is the rank that is late in most repetitions. Chance is ruled out if random
    ranks would give one rank as many repetitions with a probability of at most 7 %. The probability
    for one rank is binomial, and the sum over all ranks is its bound for any rank.

    Args:
        votes_by_repetition: the votes, one for each case with a late rank, keyed by repetition.
        num_repetitions: the number of repetitions that could have votes.
        num_ranks: the number of ranks of the run.
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
    """Return the value of the metric ``name`` in a record, 0 if it is unknown."""
    metric = record.metrics.get(name)
    return (metric and metric.value) or 0.0


def _compute_exit_delay(run: Run, record: Record, rank: int) -> float:
    """Return the median delay in seconds with which a rank leaves after the last other rank.

    The median is over the iterations of one record. The result is negative if another rank leaves
    later, and 0 without exit times of at least two ranks.
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
    """Return the ranks that most often arrive last and leave last in a case.

    They are from the first repetition that recorded arrival times. None if none did.
    """
    arrivals = [record.arrival for record in result.measured if record.arrival]
    return arrivals[0] if arrivals else None


def compute_arrival_delays(run: Run, result: CaseResult) -> dict[int, float]:
    """Return the delay of each rank's arrival after the first rank, in seconds, keyed by rank.

    A delay is a median over iterations, and then the median of these over repetitions. Corrupt
    sample files are left out, and the result is empty without sample files.
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
