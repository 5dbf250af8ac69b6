"""Tests that the history's levels use."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from parbench.bench.results.stats import CONFIDENCE, t_quantile


def t_tail(t: float, df: float) -> float:
    """Return P(T > t) of Student's t, for any ``df`` above zero."""
    from scipy.special import stdtr  # type: ignore[import-untyped]

    return float(stdtr(df, -t))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of new minus that of base with its standard error, and that error's degrees of freedom."""

    value: float
    error: float
    df: float

    @property
    def reach(self) -> float:
        """Half the 95 % interval."""
        return t_quantile(0.5 + CONFIDENCE / 2, self.df) * self.error

    def p_beyond(self, floor: float) -> float:
        """Return the two-sided p-value of a difference no larger than ``floor``: small if it is surely larger."""
        beyond = abs(self.value) - floor
        return (
            min(1.0, 2 * t_tail(beyond / self.error, self.df)) if self.error else float(beyond <= 0)
        )

    def detectable(self, floor: float, level: float) -> float:
        """The smallest difference that is beyond ``floor`` at this level in four of five such comparisons."""
        power = 0.88  # for 0.8, as the error is itself estimated
        return (
            floor + (t_quantile(1 - level / 2, self.df) + t_quantile(power, self.df)) * self.error
        )


def rank_test(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the two-sided p-value of Mann-Whitney's test: exact, ties included, up to 24 values, normal above."""
    if len(base) + len(new) > 24:
        from scipy.stats import mannwhitneyu  # type: ignore[import-untyped]  # here, as most do without

        return float(mannwhitneyu(base, new, method="asymptotic").pvalue)
    values = [*base, *new]
    ordered = sorted(values)  # the ranks are doubled, so that those of equal values are whole
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) + 1 for value in values]
    ways, seen = _rank_sums(tuple(sorted(ranks)), len(base)), sum(ranks[: len(base)])
    return min(1.0, 2 * min(sum(ways[: seen + 1]), sum(ways[seen:])) / sum(ways))


@cache
def _rank_sums(ranks: tuple[int, ...], chosen: int) -> list[int]:
    """Return in how many ways ``chosen`` of these ranks add up to 0, 1, 2, ...; scipy's exact test knows no ties."""
    import numpy as np

    ways = np.zeros((chosen + 1, sum(ranks) + 1), dtype=int)
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    return [*map(int, ways[chosen])]
