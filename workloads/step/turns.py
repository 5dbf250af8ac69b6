"""What turns of all ranks tell: the bias of a maximum over ranks is kept out of it. Nothing here knows what was timed.

The largest of many ranks' differences is above zero though each is zero in truth. A difference is therefore taken
between maxima or means over ranks, turn by turn, and a rank that has the most is chosen by one half of the turns and
heard in the other (Cox, Biometrika 1975; cross-fitting, Chernozhukov et al., arXiv 1608.00060). Intervals are Student's
t over turns; one turn has none. Arrays hold ranks, each with its turns.
"""

from collections.abc import Sequence
from statistics import fmean

# Ranks import this module before they measure, the functions of `stats` would import scipy in between.
import scipy.special  # type: ignore[import-untyped]  # noqa: F401

from parbench.bench.results.stats import Estimate, mean_of

ByRank = Sequence[Sequence[float]]


def slowest(by_rank: ByRank) -> list[float]:
    return [max(turn) for turn in zip(*by_rank, strict=True)]


def mean_rank(by_rank: ByRank) -> list[float]:
    return [fmean(turn) for turn in zip(*by_rank, strict=True)]


def paired_difference(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Return how much more one takes than the other in the same turns; None of one turn, which is mostly noise."""
    less = [a - b for a, b in zip(one, other, strict=True)]
    return mean_of(less, "turns' differences", "difference") if len(less) > 1 else None


def paired_factor(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Return how many times as long one takes as the other in the same turns; None of one turn."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return mean_of(ratios, "turns' ratios", "factor") if len(ratios) > 1 else None


def paired_overhead(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Return the factor less 1."""
    more = [a / b - 1 for a, b in zip(one, other, strict=True)]
    return mean_of(more, "turns' ratios less 1", "excess") if len(more) > 1 else None


def chosen(by_rank: ByRank) -> list[int]:
    """Return for each turn who has the most in the other half of the turns, even or odd; of one turn the first."""
    ranks = range(len(by_rank))
    halves = [max(ranks, key=lambda rank: sum(by_rank[rank][start::2])) for start in (1, 0)]
    return [halves[turn % 2] for turn in range(len(by_rank[0]))]


def cross_fitted(by_rank: ByRank) -> Estimate:
    """Return what the rank with the most has, zero or above; of one turn, which cannot choose, the mean over ranks."""
    if len(by_rank[0]) < 2:
        return Estimate(value=mean_rank(by_rank)[0], method="mean over ranks of one turn, which cannot choose a rank")
    turns = [by_rank[rank][turn] for turn, rank in enumerate(chosen(by_rank))]
    return mean_of(turns, "turns, of a rank chosen by the others", "from zero")
