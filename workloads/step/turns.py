"""Estimates over the interleaved turns of all ranks, without the bias of a maximum over ranks.

The largest difference of many ranks is above zero even if each true difference is zero. So a
difference is taken between maxima or means over ranks, turn by turn. The rank with the maximum is
chosen from one half of the turns, and its value is taken from the other half (Cox, Biometrika 1975;
cross-fitting, Chernozhukov et al., arXiv 1608.00060). Intervals are Student's t over turns. Arrays
hold ranks, each with its turns.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

# Ranks import this module before they measure. Otherwise `stats` would import scipy meanwhile.
import scipy.special  # type: ignore[import-untyped]  # noqa: F401

from parbench.bench.results.stats import Estimate, ValueKind, estimate_mean

ByRank = Sequence[Sequence[float]]
"""Values indexed by rank and then by turn, a round of one step of each kind on all ranks."""


def slowest(by_rank: ByRank) -> list[float]:
    """Return the maximum over ranks for each turn, in order.

    A turn is one round of steps, and ``by_rank[rank][turn]`` the seconds of a rank's step in it.
    """
    return [max(turn) for turn in zip(*by_rank, strict=True)]


def compare_turns(
    first: Sequence[float],
    second: Sequence[float],
    compare: Callable[[float, float], float],
    kind: ValueKind,
) -> Estimate | None:
    """Return the mean of ``compare(first[turn], second[turn])`` over turns, with its interval.

    A turn is a round in which one step of each kind runs. ``first`` and ``second`` have the seconds
    of two kinds of step in these turns, such as with and without communication. ``kind`` is the
    range of possible values of the result, which limits its confidence interval. The result is None
    for one turn, which is mostly noise.
    """
    if len(first) < 2:
        return None
    comparisons = [compare(a, b) for a, b in zip(first, second, strict=True)]
    return estimate_mean(comparisons, "pairs of turns", kind)


def compute_overhead(seconds: float, baseline: float) -> float:
    """Return the relative increase of ``seconds`` over ``baseline``, such as 0.1 for 10 %.

    Both are the seconds of a step, for example with and without profiling.
    """
    return seconds / baseline - 1


def choose_ranks(by_rank: ByRank) -> list[int]:
    """Return, for each turn, the rank whose sum over the other half of the turns is largest.

    A turn is a round of one step of each kind on all ranks. The halves are the turns with even and
    with odd index. For a single turn, the result is rank 0. ``by_rank[rank][turn]`` is a rank's
    value in a turn, such as seconds of waiting.
    """
    ranks = range(len(by_rank))
    maximum_of_odd_turns = max(ranks, key=lambda rank: sum(by_rank[rank][1::2]))
    maximum_of_even_turns = max(ranks, key=lambda rank: sum(by_rank[rank][0::2]))
    choices = (maximum_of_odd_turns, maximum_of_even_turns)
    return [choices[turn % 2] for turn in range(len(by_rank[0]))]


def cross_fitted(by_rank: ByRank) -> Estimate:
    """Return an estimate of the largest of the ranks' mean values, without the bias of a maximum.

    ``by_rank[rank][turn]`` is a rank's value in a turn (a round of steps on all ranks), zero or
    above, such as seconds of waiting. One half of the turns decides which rank is largest, and the
    values of this rank in the other half are averaged. With one turn, this is not possible, and the
    result is the mean over ranks.
    """
    if len(by_rank[0]) < 2:
        method = "mean over ranks of one turn, which cannot choose a rank"
        return Estimate(value=fmean(turns[0] for turns in by_rank), method=method)
    turns = [by_rank[rank][turn] for turn, rank in enumerate(choose_ranks(by_rank))]
    return estimate_mean(turns, "turns, of a rank chosen by the others", "from zero")
