"""Stragglers: ranks that arrive last or finish last in more repetitions than chance explains.

All ranks of an operation should arrive together. A rank that is late in most iterations of most
repetitions has less compute, a slower link or a busy core.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parbench.bench.results.records import Record
from parbench.bench.results.records import Stragglers as RecordedStragglers
from parbench.bench.results.runs import Run
from parbench.bench.results.samples import load_rank_samples
from parbench.bench.results.stats import median
from parbench.bench.text import UserError
from parbench.reports.case_results import CaseResult

MIN_ITERATION_SHARE = 0.5
"""A repetition names a rank that is the last one in more of its iterations."""
MIN_TIME_SHARE = 0.1
"""A delay is relevant if it is a larger share of the time of the case."""
MIN_VOTE_SHARE = 2 / 3
"""A repetition names the rank that so many of its cases name."""
MAX_CHANCE = 0.07
"""The probability that chance names a rank as often. Two ranks in five repetitions have 0.0625."""
MAX_BARRIER_SKEW_SECONDS = 5e-4
"""The skew that the barrier before an operation may cause, at most its transfer time."""
SYMMETRIC_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations in which all ranks do the same work, so that they should finish together."""


class StragglerVote(NamedTuple):
    """A rank that a case of one repetition names, and by how much it is late."""

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

    @property
    def repetition_share(self) -> str:
        return f"{self.repetitions} of {self.of_repetitions} repetitions"


def find_late_rank(rows: Sequence[CaseResult]) -> Straggler | None:
    """Return the rank that arrives last, by more than a barrier explains."""
    transfers = [row.value("transfer") for row in rows]
    known_transfers = [seconds for seconds in transfers if seconds]
    barrier_skew = min([MAX_BARRIER_SKEW_SECONDS, *known_transfers]) if known_transfers else 0.0
    votes: dict[int, list[StragglerVote]] = defaultdict(list)
    for record, arrival, seconds in _iterate_arrivals(rows):
        skew = _get_value(record, "skew")
        is_usually_last = (arrival.share or 0.0) > MIN_ITERATION_SHARE
        is_relevant = skew > max(MIN_TIME_SHARE * seconds, barrier_skew)
        if arrival.late_rank is not None and is_usually_last and is_relevant:
            vote = StragglerVote(arrival.late_rank, skew, skew / seconds)
            votes[record.repetition].append(vote)
    return _elect_among_rows(votes, rows)


def find_last_rank(run: Run, rows: Iterable[CaseResult]) -> Straggler | None:
    """Return the rank that finishes last in operations and steps in which ranks do the same."""
    symmetric_rows = [
        row
        for row in rows
        if row.case.short_name in SYMMETRIC_OPERATIONS or not row.is_communication
    ]
    votes: dict[int, list[StragglerVote]] = defaultdict(list)
    for record, arrival, seconds in _iterate_arrivals(symmetric_rows):
        rank = arrival.last_out_rank
        if rank is None or (arrival.last_out_share or 0.0) <= MIN_ITERATION_SHARE:
            continue
        delay = _compute_exit_delay(run, record, rank)
        if delay > MIN_TIME_SHARE * seconds:
            votes[record.repetition].append(StragglerVote(rank, delay, delay / seconds))
    return _elect_among_rows(votes, symmetric_rows)


def _elect_among_rows(
    votes: Mapping[int, Sequence[StragglerVote]], rows: Sequence[CaseResult]
) -> Straggler | None:
    repetitions = {record.repetition for record, *_ in _iterate_arrivals(rows)}
    num_ranks = max((row.world.size for row in rows), default=1)
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


def _iterate_arrivals(
    rows: Iterable[CaseResult],
) -> Iterator[tuple[Record, RecordedStragglers, float]]:
    """Yield the records with arrivals on one clock, and the time of each in seconds."""
    for row in rows:
        for record in row.measured:
            seconds = _get_value(record, row.headline)
            if record.arrival and seconds:
                yield record, record.arrival, seconds


def _get_value(record: Record, name: str) -> float:
    """Return a metric of a record, 0 if it is unknown."""
    metric = record.metrics.get(name)
    return (metric and metric.value) or 0.0


def _compute_exit_delay(run: Run, record: Record, rank: int) -> float:
    """Return the median seconds from the last exit of all other ranks to that of ``rank``.

    It is negative if another rank is later, and 0 without samples of at least two ranks.
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


def compute_arrival_delays(run: Run, row: CaseResult) -> dict[int, float]:
    """Return the median delay in seconds of each rank's arrival relative to the first rank's.

    The delay of a repetition is the median over its iterations. Damaged samples are left out.
    """
    delays: dict[int, list[float]] = defaultdict(list)
    for record in row.measured:
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
