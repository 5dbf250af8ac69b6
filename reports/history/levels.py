"""Levels of a series over runs: which level is the newest, and since which run.

Model: the logarithm of the time of a run is the level at that run plus noise. Noise is normal, has
variance v, and consecutive runs correlate by rho (AR(1)), which all series share.

1. Noise: the mean squares of differences of runs one and two apart are 2 v (1 - rho) and
   2 v (1 - rho^2), except at steps. Their ratio is 1 + rho, pooled over series (Chakar et al.,
   Bernoulli 2017). They have 2/3 of the degrees of freedom of n - 1 independent runs (von Neumann
   et al. 1941). Variances shrink toward their common prior (Smyth, Stat. Appl. Genet. Mol. Biol.
   2004). Its weight follows from the variation of their logarithms. The digamma and trigamma
   functions of x are approximated by log x - 1 / (2 x) - 1 / (12 x^2) and 1 / x + 1 / (2 x^2).
2. Outliers are clipped at 3 standard deviations from the median of 7 neighboring runs.
3. Levels: optimal partitioning. A change point reduces the sum of squares by more than z^2 v, where
   z is the normal quantile at the significance level divided by the number of runs (Bonferroni).
4. Test: Student's t of the means of two levels. The variance of a mean of n correlated runs is
   v / n (1 + 2 sum of (1 - lag / n) rho^lag) (Bartlett 1946).
5. Drift: a line has 2 parameters, k levels have 2 k - 1. The line is preferred unless levels are
   better by 6 in Schwarz's criterion, which is strong evidence (Kass & Raftery 1995).
6. Newest run: Student's t of one run and the mean of the last level. Because outliers are not
   normal, at most one in 20 earlier runs may exceed the level of any series as far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.stats import CONFIDENCE, t_quantile
from parbench.reports.stats import find_change_points, select_discoveries

Logs = NDArray[np.float64]
FALSE_DISCOVERY_RATE = 0.01
MIN_POOLED_SERIES = 5  # Fewer series do not estimate how runs vary in general.
MAX_PRIOR_DF = 40.0
MIN_VARIANCE = 1e-8
STRONG_EVIDENCE = 6.0
MAX_EXCEEDING_RUNS = 1 / 20


@dataclass(frozen=True, kw_only=True)
class LevelRule:
    """The smallest change that counts, as a fraction, and how many runs a check needs and uses."""

    threshold: float = 0.03
    significance: float = 0.01
    min_level_runs: int = 3
    min_runs: int = 8
    window: int = 30


@dataclass(frozen=True, kw_only=True)
class RunNoise:
    """The variance of one run, its degrees of freedom, and the correlation with the next run."""

    variance: float = MIN_VARIANCE
    df: float = 1.0
    rho: float = 0.0

    def compute_variance_of_mean(self, n: int) -> float:
        lags = np.arange(1, n)
        inflation = 1 + 2 * float(((1 - lags / n) * self.rho**lags).sum())
        return self.variance * inflation / n


@dataclass(frozen=True, kw_only=True)
class Level:
    """Runs ``start`` to ``stop`` (exclusive) and the mean of their logarithms."""

    start: int
    stop: int
    log: float

    @property
    def num_runs(self) -> int:
        return self.stop - self.start

    @property
    def seconds(self) -> float:
        return math.exp(self.log)


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """The change to the newest level as a fraction, with its 95 % interval.

    A drift has a ``slope``, the change per run. Its change is that over all runs.
    """

    start: int  # the first run of the newest level
    change: float
    low: float
    high: float
    p_value: float
    slope: float | None = None


def _estimate_deviation(values: Logs) -> float:
    """Return the standard deviation of a normal distribution with this third quartile."""
    return float(np.quantile(np.abs(values), 0.75)) / NormalDist().inv_cdf(0.875)


def clip_outliers(logs: Logs) -> Logs:
    """Clip values at 3 robust standard deviations from the median of 7 neighboring runs."""
    if len(logs) < 4:
        return logs
    padded = np.pad(logs, 3, mode="reflect")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7), axis=1)
    limit = 3 * max(_estimate_deviation(logs - medians), math.sqrt(MIN_VARIANCE))
    return np.asarray(medians + (logs - medians).clip(-limit, limit))


def estimate_noise(series: Sequence[Logs]) -> list[RunNoise]:
    """Estimate the noise of each series. Differences beyond 3 standard deviations are excluded."""
    clipped = [clip_outliers(logs) for logs in series]
    squares = [[_mean_square_difference(logs, lag) for lag in (1, 2)] for logs in clipped]
    first, second = np.array(squares).reshape(-1, 2).T
    lengths = np.array([len(logs) for logs in series])
    known = (first > 0) & (lengths >= 4)
    rho, prior, prior_df = 0.0, 0.0, 0.0
    if known.sum() >= MIN_POOLED_SERIES:
        weights = known / np.maximum(first + second, MIN_VARIANCE)
        rho = float((second * weights).sum() / (first * weights).sum()) - 1
        num_differences = int((lengths[known] - 2).sum())
        rho = min(rho, 0.95) if rho > 3 / math.sqrt(num_differences) else 0.0
        prior, prior_df = _estimate_prior(
            first[known] / 2 / (1 - rho), 2 / 3 * num_differences / int(known.sum())
        )
    noises = []
    for logs, square in zip(series, first, strict=True):
        df = max(2 / 3 * (len(logs) - 1), 1.0)
        variance = (df * float(square) / 2 / (1 - rho) + prior_df * prior) / (df + prior_df)
        noise = RunNoise(variance=max(variance, MIN_VARIANCE), df=df + prior_df, rho=rho)
        noises.append(noise)
    return noises


def _estimate_prior(variances: Logs, df: float) -> tuple[float, float]:
    """Return the prior of variances with ``df`` degrees of freedom each, and its own."""
    logs = np.log(variances)
    prior = math.exp(float(logs.mean()) + 1 / df + 1 / (3 * df**2))
    excess = float(logs.var(ddof=1)) - (2 / df + 2 / df**2)
    if excess <= 0:
        return prior, MAX_PRIOR_DF
    return prior, min((1 + math.sqrt(1 + 2 * excess)) / excess, MAX_PRIOR_DF)


def _mean_square_difference(logs: Logs, lag: int) -> float:
    differences = np.abs(logs[lag:] - logs[:-lag])
    if not len(differences):
        return 0.0
    limit = 3 * _estimate_deviation(differences)
    return float(np.mean(differences[differences <= limit] ** 2))


class RunSeries:
    """The log times of a series, oldest first, with their noise and the rule of the check."""

    def __init__(self, logs: Logs, noise: RunNoise, rule: LevelRule) -> None:
        self.logs = logs
        self.noise = noise
        self.rule = rule
        self._clipped = clip_outliers(logs)

    def find_levels(self) -> list[Level]:
        """Return the levels in order: one if nothing changed, none without runs."""
        n = len(self.logs)
        if not n:
            return []
        z = NormalDist().inv_cdf(1 - self.rule.significance / 2 / n)
        penalty = z**2 * n * self.noise.compute_variance_of_mean(n)
        scale = penalty / (2 * math.log(max(n, 2)))
        min_length = self.rule.min_level_runs
        changes = find_change_points(self._clipped.tolist(), scale, min_length=min_length)
        return [
            Level(start=start, stop=stop, log=float(self._clipped[start:stop].mean()))
            for start, stop in pairwise([0, *changes, n])
        ]

    def find_change(self) -> LevelChange | None:
        """Return how the newest level differs from earlier ones, or the drift of the series.

        If there is a drift, only steps relative to it are level changes.
        """
        levels = self.find_levels()
        drift = self._find_drift(levels)
        if drift is None or drift.slope is None:
            return self._compare_newest_level(levels)
        line = math.log1p(drift.slope) * np.arange(len(self.logs))
        detrended = RunSeries(self.logs - line, self.noise, self.rule)
        return detrended._compare_newest_level(detrended.find_levels()) or drift

    def _compare_newest_level(self, levels: Sequence[Level]) -> LevelChange | None:
        """Return the change from the fastest earlier level, or from the last one if slower."""
        if len(levels) < 2 or levels[-1].start < self.rule.min_runs - self.rule.min_level_runs:
            return None
        *earlier, newest = levels
        base = min(earlier, key=lambda level: level.log)
        if newest.log <= base.log:
            base = earlier[-1]
        log_change = newest.log - base.log
        if abs(log_change) <= math.log1p(self.rule.threshold):
            return None
        # Two outliers in three runs are not a level.
        is_above = self.logs > (newest.log + base.log) / 2
        share_above = [is_above[level.start : level.stop].mean() for level in (base, newest)]
        if min(share_above) > 0.2 or max(share_above) < 0.8:
            return None
        variance = sum(
            self.noise.compute_variance_of_mean(level.num_runs) for level in (base, newest)
        )
        return self._make_change(newest.start, log_change, variance)

    def _find_drift(self, levels: Sequence[Level]) -> LevelChange | None:
        """Return the change along a line, if it fits better than the levels."""
        n = len(self.logs)
        places = np.arange(n) - (n - 1) / 2
        weight = float(places @ places)
        slope = float(places @ self._clipped) / max(weight, 1.0)
        if n < self.rule.min_runs or abs(slope) * (n - 1) <= math.log1p(self.rule.threshold):
            return None
        variance = n * self.noise.compute_variance_of_mean(n)
        steps = [self._clipped[level.start : level.stop] - level.log for level in levels]
        level_score = sum(float(step @ step) for step in steps) / variance
        residuals = self._clipped - self._clipped.mean() - slope * places
        line_score = float(residuals @ residuals) / variance
        saved_parameters = 2 * len(levels) - 3
        if line_score >= level_score + saved_parameters * math.log(n) + STRONG_EVIDENCE:
            return None
        drift = self._make_change(0, slope * (n - 1), variance / weight * (n - 1) ** 2, slope)
        return drift if drift.p_value <= self.rule.significance else None

    def _make_change(
        self, start: int, log_change: float, variance: float, slope: float | None = None
    ) -> LevelChange:
        half_width = t_quantile(0.5 + CONFIDENCE / 2, self.noise.df) * math.sqrt(variance)
        places = 1 if slope is not None else len(self.logs)
        return LevelChange(
            start=start,
            change=math.expm1(log_change),
            low=math.expm1(log_change - half_width),
            high=math.expm1(log_change + half_width),
            p_value=min(1.0, places * 2 * self._compute_tail(abs(log_change), variance)),
            slope=None if slope is None else math.expm1(slope),
        )

    def _compute_tail(self, log_change: float, variance: float) -> float:
        from scipy.special import stdtr  # type: ignore[import-untyped]

        return float(stdtr(self.noise.df, -log_change / math.sqrt(variance)))

    def find_rise(self, *, newest_is_candidate: bool) -> "Rise | None":
        """Return how far the newest run is above the last level, None if there are too few runs.

        A candidate is also compared with the run before it, which may have begun a new level.
        """
        earlier = RunSeries(self.logs[:-1], self.noise, self.rule)
        if len(earlier.logs) < self.rule.min_runs - 1:
            return None
        levels = earlier.find_levels()
        base = levels[-1].log
        if newest_is_candidate:
            base = max(base, float(earlier.logs[-1]))
        log_rise = float(self.logs[-1]) - base
        error = self.noise.variance + self.noise.compute_variance_of_mean(levels[-1].num_runs)
        is_relevant = log_rise > math.log1p(self.rule.threshold)
        means = np.repeat([level.log for level in levels], [level.num_runs for level in levels])
        deviation = math.sqrt(self.noise.variance)
        return Rise(
            change=math.expm1(log_rise),
            p_value=self._compute_tail(log_rise, error) if is_relevant else 1.0,
            deviations=log_rise / deviation,
            earlier_deviations=(earlier.logs - means) / deviation,
        )


@dataclass(frozen=True, kw_only=True)
class Rise:
    """The newest run above the last level, and earlier runs above theirs in standard deviations."""

    change: float
    p_value: float
    deviations: float
    earlier_deviations: Logs


@dataclass(frozen=True, kw_only=True)
class SeriesJudgement:
    """The change to the newest level and whether it is significant among all series.

    ``rise`` is the fraction by which the newest run alone is significantly above the last level.
    """

    change: LevelChange | None = None
    is_significant: bool = False
    rise: float | None = None


def judge_series(
    series: Sequence[Logs], rules: Sequence[LevelRule], *, newest_is_candidate: bool = False
) -> list[SeriesJudgement]:
    """Return a judgement of each series from the logarithms of its times, oldest first.

    A candidate is a run that is not part of the history, so only its rise counts.
    """
    noises = estimate_noise(series)
    models = [RunSeries(*parts) for parts in zip(series, noises, rules, strict=True)]
    changes: list[LevelChange | None] = [None] * len(models)
    if not newest_is_candidate:
        changes = [model.find_change() for model in models]
    rises = [model.find_rise(newest_is_candidate=newest_is_candidate) for model in models]
    is_change = _select_discoveries(changes)
    is_rise = _select_discoveries(rises)
    earlier = np.concatenate([rise.earlier_deviations for rise in rises if rise] or [np.zeros(0)])
    max_exceeding = MAX_EXCEEDING_RUNS * (max(map(len, series), default=1) - 1)
    judgements = []
    for index, (change, rise) in enumerate(zip(changes, rises, strict=True)):
        is_unusual = rise and (earlier >= rise.deviations).sum() <= max_exceeding
        is_sudden = is_rise[index] and is_unusual and not is_change[index]
        judgement = SeriesJudgement(
            change=change,
            is_significant=is_change[index],
            rise=rise.change if rise and is_sudden else None,
        )
        judgements.append(judgement)
    return judgements


def _select_discoveries(candidates: Sequence[LevelChange | Rise | None]) -> list[bool]:
    """Select the significant candidates among all series. A series without one counts as tested."""
    p_values = [candidate.p_value if candidate else 1.0 for candidate in candidates]
    return select_discoveries(p_values, FALSE_DISCOVERY_RATE)
