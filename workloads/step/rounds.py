"""Estimates over rounds of steps, in which all ranks run one step of each kind.

The largest difference of many ranks is above zero even if each true difference is zero. So a
difference is taken between maxima over ranks, round by round. Intervals are Student's t over
rounds.
"""

from collections.abc import Callable, Sequence

# Ranks import this module before they measure. Otherwise `stats` would import scipy meanwhile.
import scipy.special  # type: ignore[import-untyped]  # noqa: F401

from parbench.bench.results.stats import Estimate, estimate_mean


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the maximum over ranks for each round of steps, in order.

    ``by_rank[rank][round]`` is the seconds of a rank's step in a round.
    """
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]


def compare_rounds(
    first: Sequence[float],
    second: Sequence[float],
    compare: Callable[[float, float], float],
) -> Estimate | None:
    """Return the mean of ``compare(first[round], second[round])`` over rounds, with its 95 % CI.

    ``first`` and ``second`` have the seconds of two kinds of step in the same rounds, such as with
    and without communication. The result is None for fewer than two rounds. The interval is missing
    for two rounds.
    """
    if len(first) < 2:
        return None
    comparisons = [compare(a, b) for a, b in zip(first, second, strict=True)]
    return estimate_mean(comparisons, "rounds", "difference")
