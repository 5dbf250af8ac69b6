"""The levels of a series of times, and how its newest runs compare with the runs before them.

Levels come from optimal partitioning (Jackson et al. 2005) of times that are clipped near the median of their
neighbors, so that single outliers are no levels. Neighboring levels that do not differ significantly are joined. Of all
series of a check, steps and rises of the newest run are selected by the false discovery rate (Benjamini & Hochberg
1995).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.stats import median
from parbench.reports.compare.statistics import Difference, rank_test, t_tail

Logs = NDArray[np.float64]
MIN_POOLED_SERIES = 5  # Fewer series do not estimate how runs vary in general.
FALSE_DISCOVERY_RATE = 0.01
ROBUST_DEVIATIONS = (
    3 * 1.4826
)  # times the median absolute deviation: three standard deviations of a normal
PENALTY = (
    2.0  # of one more level, in variances times the logarithm of the number of runs (Schwarz 1978)
)
STRONG_EVIDENCE = 6.0  # of twice the logarithm of the Bayes factor, here for levels against a line
MAX_EXCEEDING_SHARE = (
    1 / 20
)  # of the number of runs: past values, over all series, as far above their level as a rise


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What counts as a step: the threshold as a fraction, the significance levels, and the numbers of runs."""

    floor: float = 0.03
    level: float = 0.01
    rank_level: float = 0.05
    min_side: int = 3
    min_values: int = 8
    window: int = 30


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Run-to-run variation pooled over series: the autocorrelation of neighboring runs, and a prior variance that
    counts as ``df`` values next to a series' own (Smyth 2004)."""

    rho: float = 0.0
    df: float = 0.0
    variance: float = 0.0

    def inflation(self, n: int) -> float:
        """Return the variance of the mean of ``n`` runs relative to that of independent runs."""
        return (
            1 + 2 * math.fsum((1 - lag / n) * self.rho**lag for lag in range(1, n))
            if self.rho
            else 1.0
        )

    def moderate(self, squares: float, df: float) -> float:
        """Return the variance from a series' sum of squares and its degrees of freedom, moderated by the prior."""
        return (squares + self.df * self.variance) / (df + self.df)


UNKNOWN_NOISE = Noise()


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Values ``start`` to ``stop`` (exclusive) of one level; ``seconds`` is their median."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The change from an earlier level to the newest one, as a fraction, with its 95 % interval.

    A drift has a ``slope`` per run (log), and its ``change`` is that over all runs. ``p_value`` includes all splits.
    """

    at: int
    change: float
    p_value: float
    low: float
    high: float
    slope: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result for one series: a step or drift, whether it is significant among all series, and the fraction by
    which the newest run alone is significantly above the last level."""

    shift: Shift | None = None
    is_significant: bool = False
    rise: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Rise:
    """The newest run above the last level (log), and the deviations of all runs before, in standard deviations."""

    above: float
    p_value: float
    deviations: float
    past_deviations: Logs


def judge_series(
    series: Sequence[Logs], rules: Sequence[StepRule], *, newest_is_candidate: bool = False
) -> list[Judgement]:
    """Return a judgement for each series from the logarithms of its times, oldest first.

    With ``newest_is_candidate`` the newest value is a run that is compared with the others and not one of them: only
    its rise above the last level, and above the run before it, counts.
    """
    noise = estimate_noise(series)
    pairs = list(zip(series, rules, strict=True))
    shifts: list[Shift | None] = [None] * len(series)
    if not newest_is_candidate:
        shifts = [newest_shift(np.exp(logs).tolist(), rule, noise) for logs, rule in pairs]
    is_significant = _discover([shift.p_value if shift else 1.0 for shift in shifts])
    rises = [
        _find_rise(logs, rule, noise, above_last_run=newest_is_candidate) for logs, rule in pairs
    ]
    is_rise = _discover([rise.p_value if rise else 1.0 for rise in rises])
    past = np.concatenate([rise.past_deviations for rise in rises if rise] or [np.zeros(0)])
    max_exceeding = MAX_EXCEEDING_SHARE * (max(map(len, series), default=1) - 1)
    judgements = []
    for shift, significant, rise, rises_significantly in zip(
        shifts, is_significant, rises, is_rise, strict=True
    ):
        fraction = None
        if (
            rise
            and rises_significantly
            and not significant
            and (past >= rise.deviations).sum() <= max_exceeding
        ):
            fraction = math.expm1(rise.above)
        judgements.append(Judgement(shift=shift, is_significant=significant, rise=fraction))
    return judgements


def _discover(p_values: Sequence[float]) -> list[bool]:
    """Return which p-values are discoveries (Benjamini & Hochberg)."""
    if min(p_values, default=1.0) > FALSE_DISCOVERY_RATE:
        return [False] * len(p_values)
    from scipy.stats import false_discovery_control  # type: ignore[import-untyped]

    return [
        bool(adjusted <= FALSE_DISCOVERY_RATE) for adjusted in false_discovery_control(p_values)
    ]


def _find_rise(logs: Logs, rule: StepRule, noise: Noise, *, above_last_run: bool) -> _Rise | None:
    """Return how far the newest value is above the last level of those before it; None for too few values."""
    past = logs[:-1]
    if len(past) < rule.min_values - 1:
        return None
    levels = segments(np.exp(past).tolist(), rule, noise)
    medians = np.concatenate(
        [np.full(level.stop - level.start, math.log(level.seconds)) for level in levels]
    )
    residuals = past - medians
    limit = _clip_limit(residuals)
    count = levels[-1].stop - levels[-1].start
    df = len(past) - len(levels)
    variance = noise.moderate(float((residuals.clip(-limit, limit) ** 2).sum()), df)
    base = float(medians[-1])
    if above_last_run:
        base = max(base, float(past[-1]))
    above = float(logs[-1]) - base
    p_value = 1.0
    if variance > 0 and above > math.log1p(rule.floor):
        # The variance of a median is pi/2 times that of a mean.
        error = math.sqrt(variance * (1 + math.pi / 2 * noise.inflation(count) / count))
        p_value = t_tail(above / error, df + noise.df)
    deviation = math.sqrt(variance) or 1.0
    return _Rise(
        above=above,
        p_value=p_value,
        deviations=above / deviation,
        past_deviations=residuals / deviation,
    )


def segments(
    values: Sequence[float], rule: StepRule, noise: Noise = UNKNOWN_NOISE
) -> tuple[Segment, ...]:
    """Return the levels of values above zero, in order: one if nothing changed, none of no values."""
    if not values:
        return ()
    logs = np.log(values)
    bounds = _partition(logs, rule.min_side)
    while len(bounds) > 2:
        p_values = [
            _p_value_of_step(logs[start:middle], logs[middle:stop], rule, noise)
            for start, middle, stop in zip(bounds, bounds[1:], bounds[2:], strict=False)
        ]
        weakest = max(range(len(p_values)), key=p_values.__getitem__)
        if p_values[weakest] <= rule.level:
            break
        del bounds[weakest + 1]
    return tuple(Segment(start=a, stop=b, seconds=median(values[a:b])) for a, b in pairwise(bounds))


def _partition(logs: Logs, min_side: int) -> list[int]:
    """Return the bounds of levels that minimize the squares around their means plus a penalty per level."""
    n = len(logs)
    if n < 2 * min_side:
        return [0, n]
    deviation = 1.4826 / math.sqrt(2) * float(np.median(np.abs(np.diff(logs))))
    neighbors = np.lib.stride_tricks.sliding_window_view(np.pad(logs, 2, mode="edge"), 5)
    middle = np.median(neighbors, axis=1)
    clipped = middle + (logs - middle).clip(-3 * deviation, 3 * deviation)
    penalty = PENALTY * max(deviation, 1e-4) ** 2 * math.log(n)
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (clipped, clipped**2))
    costs = np.full(n + 1, math.inf)
    costs[0] = 0.0
    starts = [0] * (n + 1)
    for stop in range(min_side, n + 1):
        start = np.arange(stop - min_side + 1)
        within = squares[stop] - squares[start] - (sums[stop] - sums[start]) ** 2 / (stop - start)
        total = costs[start] + within + penalty
        starts[stop] = int(total.argmin())
        costs[stop] = total[starts[stop]]
    bounds = [n]
    while bounds[0]:
        bounds.insert(0, starts[bounds[0]])
    return bounds


def _p_value_of_step(before: Logs, after: Logs, rule: StepRule, noise: Noise) -> float:
    """Return the p-value of equal levels, over all possible splits.

    It is 1 within the threshold, if the rank test disagrees, and if less than three quarters of either side are on
    their side of the middle, because two outliers of three runs are no level.
    """
    medians = float(np.median(before)), float(np.median(after))
    if abs(medians[1] - medians[0]) <= math.log1p(rule.floor):
        return 1.0
    is_above = [side > sum(medians) / 2 for side in (before, after)]
    low, high = is_above if medians[0] < medians[1] else (is_above[1], is_above[0])
    if low.mean() > 0.25 or high.mean() < 0.75:
        return 1.0
    if rank_test(before.tolist(), after.tolist()) > rule.rank_level:
        return 1.0
    splits = max(1, len(before) + len(after) - 2 * rule.min_side + 1)
    return min(1.0, splits * difference(before, after, noise).p_beyond(0.0))


def newest_shift(
    values: Sequence[float], rule: StepRule, noise: Noise = UNKNOWN_NOISE
) -> Shift | None:
    """Return how the newest level differs from the fastest before it, or, where it is that, from the last one.

    Where a line describes the values better than levels do they drift, unless there are steps relative to that line.
    """
    levels = segments(values, rule, noise)
    line = find_trend(values, levels, rule, noise)
    if line is None or line.slope is None:
        return _newest_step(values, levels, rule, noise)
    detrended = [value / math.exp(line.slope * i) for i, value in enumerate(values)]
    return _newest_step(detrended, segments(detrended, rule, noise), rule, noise) or line


def _newest_step(
    values: Sequence[float], levels: Sequence[Segment], rule: StepRule, noise: Noise
) -> Shift | None:
    if (
        len(levels) < 2 or levels[-1].start < rule.min_values - rule.min_side
    ):  # a few first runs are no level
        return None
    *earlier, newest = levels
    fastest = min(earlier, key=lambda level: level.seconds)
    base = fastest if newest.seconds > fastest.seconds else earlier[-1]
    change = math.log(newest.seconds / base.seconds)
    if abs(change) <= math.log1p(rule.floor):
        return None
    before, after = (np.log(values[level.start : level.stop]) for level in (base, newest))
    found = difference(before, after, noise)
    splits = max(1, len(values) - 2 * rule.min_side + 1)
    return _make_shift(newest.start, change, found, splits * found.p_beyond(0.0))


def _make_shift(
    at: int, change: float, found: Difference, p_value: float, slope: float | None = None
) -> Shift:
    low, high = (math.expm1(change + sign * found.reach) for sign in (-1, 1))
    return Shift(
        at=at, change=math.expm1(change), p_value=min(1.0, p_value), low=low, high=high, slope=slope
    )


def find_trend(
    values: Sequence[float], levels: Sequence[Segment], rule: StepRule, noise: Noise = UNKNOWN_NOISE
) -> Shift | None:
    """Return by how much values grow along a line, if that is above the threshold, significant, and better than levels.

    Levels, or one step, even an insignificant one, have to be better than the line by Schwarz's criterion (1978) and by
    ``STRONG_EVIDENCE`` (Kass & Raftery 1995) to be preferred. A line costs two parameters, a step its height and place.
    """
    n = len(values)
    if n < rule.min_values:
        return None
    logs, places = np.log(values), np.arange(n) - (n - 1) / 2
    weight = float(places @ places)
    residuals = logs - np.median(logs) - places * float(places @ logs) / weight
    limit = _clip_limit(residuals)
    logs = logs - residuals + residuals.clip(-limit, limit)
    slope = float(places @ logs) / weight
    if abs(slope) * (n - 1) <= math.log1p(rule.floor):
        return None

    def score(squares: float, num_parameters: int) -> float:
        return n * math.log(max(squares, 1e-300)) + num_parameters * math.log(n)

    line_squares = float(((logs - logs.mean()) ** 2).sum()) - slope**2 * weight
    parts = [logs[level.start : level.stop] for level in levels]
    level_squares = math.fsum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    other_scores = (
        score(level_squares, 2 * len(levels) - 1),
        score(_squares_around_best_step(logs), 3),
    )
    if score(line_squares, 2) >= min(other_scores) + STRONG_EVIDENCE:
        return None
    df = n - 1 - noise.inflation(n)
    variance = noise.moderate(line_squares, df) * noise.inflation(n)
    found = Difference(
        value=slope * (n - 1), error=(n - 1) * math.sqrt(variance / weight), df=df + noise.df
    )
    p_value = found.p_beyond(0.0)
    return _make_shift(0, slope * (n - 1), found, p_value, slope) if p_value <= rule.level else None


def _squares_around_best_step(logs: Logs) -> float:
    """Return the sum of squares around the two means of the best split."""
    n, centered = len(logs), logs - logs.mean()
    before = np.arange(1, n)
    between = centered.cumsum()[:-1] ** 2 * n / (before * (n - before))
    return max(float(centered @ centered) - float(between.max(initial=0.0)), 0.0)


def difference(before: Logs, after: Logs, noise: Noise = UNKNOWN_NOISE) -> Difference:
    """Return the difference of two levels by Student's t, after clipping at three robust deviations of both sides.

    Autocorrelation (AR(1)) increases the variance of each mean and decreases the degrees of freedom (Bartlett 1946).
    """
    residuals = [side - np.median(side) for side in (before, after)]
    limit = _clip_limit(np.concatenate(residuals))
    ours, theirs = (side.clip(-limit, limit) for side in residuals)
    n, m = len(ours), len(theirs)
    inflation_n, inflation_m = noise.inflation(n), noise.inflation(m)
    own_df = max(n - inflation_n + m - inflation_m, 1.0)
    df = own_df * (1 - noise.rho**2) / (1 + noise.rho**2)
    own_variance = float(n * ours.var() + m * theirs.var()) / own_df
    variance = noise.moderate(df * own_variance, df)
    value = float(np.median(after) - np.median(before) + theirs.mean() - ours.mean())
    return Difference(
        value=value,
        error=math.sqrt(variance * (inflation_n / n + inflation_m / m)),
        df=df + noise.df,
    )


def _clip_limit(residuals: Logs) -> float:
    """Return three robust standard deviations."""
    return ROBUST_DEVIATIONS * float(np.median(np.abs(residuals)))


def estimate_noise(series: Sequence[Logs]) -> Noise:
    """Return the variation of runs, pooled over series, from differences of runs one and two apart.

    Such differences are insensitive to steps (Chakar, Lebarbier, Levy-Leduc & Robin 2017). Outliers are left out, and
    an autocorrelation within two standard errors of zero is none.
    """
    squares, counts = [], []
    for logs in series:
        if len(logs) < 4:
            continue
        means = []
        for lag in (1, 2):
            apart = np.abs(logs[lag:] - logs[:-lag])
            means.append(float(np.mean(apart[apart <= ROBUST_DEVIATIONS * np.median(apart)] ** 2)))
        if means[0] > 0:
            squares.append(means)
            counts.append(len(logs) - 2)
    if len(squares) < MIN_POOLED_SERIES:
        return Noise()
    one, two = np.array(squares).T
    rho = float((two / (one + two)).sum() / (one / (one + two)).sum()) - 1
    rho = min(rho, 0.95) if rho > 3 / math.sqrt(sum(counts)) else 0.0
    variances = one / 2 / (1 - rho)
    df, variance = _estimate_prior(variances, 2 / 3 * sum(counts) / len(counts))
    return Noise(rho=rho, df=df, variance=variance)


def _estimate_prior(variances: Logs, df: float) -> tuple[float, float]:
    """Return the degrees of freedom and the variance of the prior of variances of ``df`` each (Smyth 2004)."""

    def log_bias(
        degrees: float,
    ) -> float:  # of the logarithm of a mean square; the first terms of Stirling's series
        return -1 / degrees - 1 / (3 * degrees * degrees)

    logs = np.log(variances)
    excess = float(logs.var(ddof=1)) - (2 / df + 2 / df**2)
    prior_df = (1 + math.sqrt(1 + 2 * excess)) / excess if excess > 0.05 else 40.0
    return prior_df, math.exp(float(logs.mean()) - log_bias(df) + log_bias(prior_df))
