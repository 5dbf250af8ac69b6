"""Stragglers: ranks that arrive last or delay a step in more repetitions than chance explains.

A case votes for the rank that is late in most of its iterations, once per repetition.
All ranks of an operation should arrive together. A rank that is late in most iterations of most
repetitions has less compute, a slower link or a busy core.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parbench.bench.results.records import Stragglers as RecordedStragglers
from parbench.bench.results.records import Timeline
from parbench.bench.results.runs import Run, load_timeline
from parbench.bench.results.stats import median
from parbench.bench.text import UserError
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.timelines import measure_local_seconds

MIN_ITERATION_SHARE = 0.5
"""A case votes for a rank that arrives last in more than this fraction of its iterations."""
MIN_TIME_SHARE = 0.1
"""A rank's delay counts only if it exceeds this fraction of the duration of an iteration."""
MIN_SKEW_SECONDS = 5e-4
"""The arrival skew (last minus first arrival) that the barrier before an operation may explain."""
MIN_SLOWDOWN = 1.1
"""The smallest ratio of a slow rank's local time to the median local time of other ranks."""
MIN_EXTREME_SLOWDOWN = 2.0
"""A rank with this ratio is rarely slow by chance."""
MIN_VOTE_SHARE = 2 / 3
"""A repetition names a rank if at least this share of the votes of its cases are for that rank."""
MAX_CHANCE = 0.07
"""The largest probability that votes for random ranks make any rank late in as many repetitions.

A rank with a larger probability is not reported. The probability is 0.0625 for one of two ranks in
all of five repetitions.
"""


class StragglerVote(NamedTuple):
    """The rank that is late in one case and repetition, with its delay."""

    rank: int
    """The late rank: it arrives last in most iterations, or delays a profiled step."""
    seconds: float
    """The delay in seconds.

    For a rank that arrives last, it is the time from the first to the last arrival, the median over
    iterations. For a rank that delays a profiled step, it is its local time minus the median
    local time of the other ranks.
    """
    time_share: float
    """The delay relative to another time.

    For a rank that arrives last, it is the delay over the duration of an iteration, as a fraction.
    For a rank that delays a step, it is its local time over the median local time of the other
    ranks, a ratio above 1.
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
    """The delay in seconds: the median over the cases and repetitions in which the rank is late.

    ``StragglerVote.seconds`` defines the delay in one case and repetition.
    """
    time_share: float
    """The relative delay: the median of ``StragglerVote.time_share`` over the same cases.

    For a rank that arrives last, it is a fraction of the duration of an iteration. For a rank that
    delays a step, it is its local time over the median of the other ranks, above 1.
    """

    def describe_repetitions(self) -> str:
        """Return the number of repetitions that show the rank as late: ``4 of 5 repetitions``."""
        return f"{self.repetitions} of {self.of_repetitions} repetitions"


def find_last_arriving_rank(results: Sequence[CaseResult]) -> Straggler | None:
    """Return the rank that arrives last at operations in more repetitions than chance explains.

    An arrival counts only if it is later than the first arrival by more than 0.5 ms and by more
    than 10 % of the operation's duration. ``results`` are measured cases of one run. None if chance
    may explain the late arrivals.
    """
    votes: dict[int, list[StragglerVote]] = defaultdict(list)
    repetitions = set()
    for result in results:
        skews = result.by_repetition("skew")
        durations = result.by_repetition(result.headline)
        for record in result.measured:
            seconds = durations.get(record.repetition)
            if record.arrival is None or seconds is None:
                continue
            repetitions.add(record.repetition)
            rank = record.arrival.late_rank
            skew = skews.get(record.repetition, 0.0)
            is_late = skew > max(MIN_SKEW_SECONDS, MIN_TIME_SHARE * seconds)
            if rank is not None and is_late and (record.arrival.share or 0) > MIN_ITERATION_SHARE:
                votes[record.repetition].append(StragglerVote(rank, skew, skew / seconds))
    num_ranks = max((result.world.size for result in results), default=1)
    return elect_straggler(votes, len(repetitions), num_ranks)


def find_delaying_rank(run: Run, result: CaseResult) -> Straggler | None:
    """Return the rank that delays a step in more repetitions than chance explains.

    It has the longest local time, without exposed communication: it computes longer, or its host is
    late. ``result`` is a training step, whose traces are in the folder of ``run``. In the returned
    ``Straggler``, ``seconds`` is the rank's local time in a profiled step minus the median of the
    other ranks, and ``time_share`` is the quotient of both, above 1. None if no rank takes over
    10 % longer than this median, or if chance may explain the repetitions in which a rank does.
    """
    votes: dict[int, list[StragglerVote]] = {}
    num_timelines = 0
    for record in result.measured:
        try:
            timeline = load_timeline(run, record)
        except UserError:
            continue
        if timeline:
            num_timelines += 1
            vote = _vote_for_slowest(timeline)
            if vote:
                votes[record.repetition] = [vote]
    num_ranks = result.world.size
    if all(vote.time_share >= MIN_EXTREME_SLOWDOWN for [vote] in votes.values()):
        num_ranks *= 4  # Chance picks a rank with this delay at most as often as one of these.
    return elect_straggler(votes, num_timelines, num_ranks)


def _vote_for_slowest(timeline: Timeline) -> StragglerVote | None:
    """Return the rank with the longest local time in one profiled step, with its delay.

    None if this time is at most 10 % longer than the median of the other ranks, or if the timeline
    has only one rank.
    """
    seconds = {rank.rank: measure_local_seconds(rank) for rank in timeline.ranks}
    if len(seconds) < 2:
        return None
    slowest = max(seconds, key=lambda rank: seconds[rank])
    others = median([value for rank, value in seconds.items() if rank != slowest])
    if not others or seconds[slowest] <= MIN_SLOWDOWN * others:
        return None
    return StragglerVote(slowest, seconds[slowest] - others, seconds[slowest] / others)


def elect_straggler(
    votes_by_repetition: Mapping[int, Sequence[StragglerVote]], num_repetitions: int, num_ranks: int
) -> Straggler | None:
    """Return the rank that is late in more repetitions than chance explains, None without one.

    A rank is late in a repetition if at least two thirds of the votes in this repetition are for
    the rank. The result is the rank that is late in most repetitions. None if votes for random
    ranks would make any rank late in as many repetitions with a probability above 7 %. The
    probability is bounded by the binomial probability for one rank times the number of ranks.

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


def find_arrival(result: CaseResult) -> RecordedStragglers | None:
    """Return the arrivals of ranks at a case: the rank that is most often last, and how often.

    They are from the first repetition that recorded arrival times, None without such a repetition.
    """
    return next((record.arrival for record in result.measured if record.arrival), None)
