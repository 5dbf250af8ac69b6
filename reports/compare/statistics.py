"""The statistics by which two runs are compared. Pure.

All take one value a repetition, the unit of replication (Hunold & Carpen-Amarie, arXiv 1505.07734).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from parbench.bench.results.stats import CONFIDENCE, t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


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


@dataclass(frozen=True, kw_only=True)
class Differences:
    """What changed between two runs in each series and in all together; of a repetition, ``noise`` is the deviation."""

    common: Difference
    own: tuple[Difference, ...]
    noise: tuple[float, ...]
    autocorrelation: float


Repetitions = Mapping[int, float]  # what each repetition told, by its number
_LEAST_VARIANCE = 1e-12  # repetitions that agree to a millionth differ by a millionth
_RHOS = tuple(i / 50 for i in range(49))
_USUAL_RHO, _USUAL_WEIGHT = (
    0.2,
    4,
)  # what repetitions are taken to correlate by before they tell, and as how many series


@cache
def _design(n: int, m: int, rho: float) -> tuple[float, float, float, float]:
    """Return what repetitions, base's before new's, correlated by ``rho`` with the next, make of a variance of one.

    These are the squares' sum within both sides, its degrees of freedom (Box 1954), the share in it of the products
    of neighbours, and the variance of the difference of both means.
    """
    import numpy as np

    places = np.arange(n + m)
    covariance = rho ** np.abs(places[:, None] - places)
    within = np.eye(n + m) - np.where(
        (places[:, None] < n) == (places < n), np.where(places < n, 1 / n, 1 / m), 0.0
    )
    contrast = np.where(places < n, -1 / n, 1 / m)
    centred = within @ covariance
    neighbours = np.diagonal(centred @ within, 1).sum() - (centred @ within)[n - 1, n]
    squares = np.trace(centred)
    df = squares**2 / (centred * centred.T).sum()
    return (
        float(squares),
        float(df),
        float(neighbours / squares),
        float(contrast @ covariance @ contrast),
    )


def differences(base: Sequence[Repetitions], new: Sequence[Repetitions]) -> Differences:
    """Return how series differ, of at least two repetitions above and below; both sides are taken as equally noisy.

    A repetition has a part that all series share and one of each series' own. The shared one is judged by its own
    scatter;
    the variances of the others are drawn to each other as far as they resemble each other (Smyth 2004). Errors are
    those of repetitions that correlate with the next: by half a standard error more than all series together tell, as
    few
    repetitions hide it; what is shared by half an error less than it tells itself, if that is more.
    """
    import numpy as np

    columns = [sorted({repetition for one in side for repetition in one}) for side in (base, new)]
    logs = np.array(
        [
            [
                one.get(repetition, math.nan)
                for one, names in zip(pair, columns, strict=True)
                for repetition in names
            ]
            for pair in zip(base, new, strict=True)
        ]
    )
    n, m = map(len, columns)
    known = ~np.isnan(logs)
    sides = [np.nanmean(side, axis=1, keepdims=True) for side in (logs[:, :n], logs[:, n:])]
    changes = (sides[1] - sides[0])[:, 0]
    rests = np.where(known, logs - np.repeat(np.hstack(sides), (n, m), axis=1), 0.0)
    counts = [(int(one[:n].sum()), int(one[n:].sum())) for one in known]
    squares = (rests**2).sum(axis=1) + _LEAST_VARIANCE
    scales = np.maximum(
        squares, np.median(squares)
    )  # what is noisy counts less, and the quiet half alike

    shared = (rests / scales[:, None]).sum(axis=0) / (known / scales[:, None]).sum(axis=0)
    shared_squares = float((shared**2).sum()) + _LEAST_VARIANCE
    level, level_shared = _autocorrelations(rests / np.sqrt(scales)[:, None], known, shared, n)
    of_squares, df_shared, _, of_change = _design(n, m, level_shared)
    shared_variance = shared_squares / of_squares * of_change
    value = float((changes / scales).sum() / (1 / scales).sum())
    common = Difference(value=value, error=math.sqrt(shared_variance), df=df_shared)
    designs = np.array([_design(*count, level) for count in counts])
    noise = tuple(
        math.sqrt(square / (sum(count) - 2)) for square, count in zip(squares, counts, strict=True)
    )
    if len(base) == 1:
        return Differences(common=common, own=(common,), noise=noise, autocorrelation=level)

    loads = (rests @ shared) / ((shared**2 * known).sum(axis=1) + _LEAST_VARIANCE)
    own_squares = ((rests - loads[:, None] * shared * known) ** 2).sum(axis=1) + _LEAST_VARIANCE
    dfs = np.maximum(
        designs[:, 1] - 1, 0.5
    )  # one is spent on how much of what is shared a series takes
    variances, own_dfs = _moderated(own_squares * designs[:, 1] / designs[:, 0] / dfs, dfs)
    of_own, of_shared = variances * designs[:, 3], loads**2 * shared_variance
    errors = of_own + of_shared
    their_dfs = errors**2 / (of_own**2 / own_dfs + of_shared**2 / df_shared)  # Satterthwaite's
    found = zip(changes.tolist(), np.sqrt(errors).tolist(), their_dfs.tolist(), strict=True)
    own = tuple(Difference(value=change, error=error, df=df) for change, error, df in found)
    return Differences(common=common, own=own, noise=noise, autocorrelation=level)


def _autocorrelations(
    rests: "Floats", known: "Bools", shared: "Floats", n: int
) -> tuple[float, float]:
    """Return how a repetition correlates with the next: as taken for each series, and for what they share."""
    import numpy as np

    def products(values: "Floats") -> float:
        pairs = values[..., :-1] * values[..., 1:]
        return float(
            pairs.sum() - pairs[..., n - 1].sum()
        )  # the last of base and the first of new are apart

    own = (rests - rests.sum(axis=0) / known.sum(axis=0)) * known if len(rests) > 1 else rests
    each, m = (own**2).sum(axis=1) + _LEAST_VARIANCE, rests.shape[1] - n
    told_shared = products(shared) / float((shared**2).sum() + _LEAST_VARIANCE)
    others = float(each.sum() ** 2 / (each**2).sum()) - 1  # as many series as would tell as much,
    others *= float(each.sum() / ((rests**2).sum() + _LEAST_VARIANCE))  # if nothing were shared
    told = (
        others * products(own) / float(each.sum())
        + told_shared
        + _USUAL_WEIGHT * _design(n, m, _USUAL_RHO)[2]
    )
    weight, error = others + 1 + _USUAL_WEIGHT, 1 / math.sqrt(n + m - 2)
    expected = [
        _design(n, m, rho)[2] for rho in _RHOS
    ]  # few repetitions of one level seem to correlate negatively

    def level(share: float) -> float:
        return round(float(np.interp(share, expected, _RHOS)), 2)

    own_level = level(told / weight + error / math.sqrt(weight) / 2)
    return own_level, max(own_level, level(told_shared - error / 2))


def _moderated(variances: "Floats", dfs: "Floats") -> "tuple[Floats, Floats]":
    """Return variances drawn to the one that all resemble, and their degrees of freedom (Smyth 2004)."""
    import numpy as np
    from scipy.special import digamma, polygamma

    logs = np.log(variances) - digamma(dfs / 2) + np.log(dfs / 2)
    excess = logs.var(ddof=1) - polygamma(1, dfs / 2).mean()
    grid = np.geomspace(0.1, dfs.sum(), 200)
    prior_df = float(grid[np.abs(polygamma(1, grid / 2) - excess).argmin()])
    prior = math.exp(logs.mean() + digamma(prior_df / 2) - math.log(prior_df / 2))
    return (prior_df * prior + dfs * variances) / (prior_df + dfs), prior_df + dfs


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


def simes(p_values: Sequence[float]) -> float:
    """Return the p-value of a family in which nothing moved, from its members' (Simes 1986)."""
    from scipy.stats import false_discovery_control

    return float(min(false_discovery_control(p_values)))


def discoveries_in_families(
    families: Sequence[Sequence[float]], q: float
) -> tuple[tuple[bool, ...], ...]:
    """Return which p-values fall if a share ``q`` of those that fall may be false: families, then their members.

    Members are tested at the share of families that fell, so a family falls exactly if one of its members does
    (Benjamini & Hochberg 1995; Benjamini & Bogomolov 2014).
    """
    from scipy.stats import false_discovery_control

    if not families:
        return ()
    adjusted = [false_discovery_control(family) for family in families]
    fallen = false_discovery_control([min(family) for family in adjusted]) <= q
    share = q * sum(fallen) / len(families)
    pairs = zip(adjusted, fallen, strict=True)
    return tuple(tuple(bool(fell and p <= share) for p in family) for family, fell in pairs)
