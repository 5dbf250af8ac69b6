"""Levels of a series over runs: which level is the newest, and since which run.

The logarithm of the time of a run is the level at that run plus noise (``noise.py``).

1. Levels: optimal partitioning. A change point reduces the sum of squares by more than z^2 v, where
   v is the variance of a run with its autocorrelation, and z the normal quantile at the
   significance level divided by the number of runs (Bonferroni).
2. Step: the largest p-value of three tests. Student's t of the means of the newest level and an
   earlier one, the same at that run if all levels have a common slope, and the binomial
   probability that the runs of one level are outliers of the other.
3. Drift: a line has 2 parameters, k levels have 2 k - 1. The line is preferred unless levels are
   better by 6 in Schwarz's criterion, which is strong evidence (Kass & Raftery 1995).
4. Rise: Student's t of the newest run and its prediction by the last level and the common slope.
   Because outliers are not normal, at most one in 20 earlier runs may exceed the level of any
   series by as much divided by 1.25.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.stats import CONFIDENCE, t_quantile
from parbench.reports.history.noise import Logs, RunNoise, clip_outliers, estimate_noise
from parbench.reports.stats import find_change_points, select_discoveries

FALSE_DISCOVERY_RATE = 0.01
STRONG_EVIDENCE = 6.0
MAX_EXCEEDING_RUNS = 1 / 20
EXCEEDING_MARGIN = 1.25
MIN_OUTLIER_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class LevelRule:
    """The smallest change that counts, and the numbers of runs that a check needs and uses."""

    min_effect: float = 0.03  # a fraction
    significance: float = 0.01
    min_level_runs: int = 3
    min_runs: int = 8
    window: int = 30
    """The number of newest runs that are used."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Runs ``start`` to ``stop`` (exclusive) and the mean of their logarithms."""

    start: int
    stop: int
    log: float

    @property
    def num_runs(self) -> int:
        """The number of runs on the level."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """The change of the newest runs as a fraction, with its 95 % interval.

    A step is the change to the newest level, a drift the change over all runs, and a rise the
    change of the newest run alone. ``is_significant`` is after the correction for all series.
    """

    kind: Literal["step", "drift", "rise"]
    start: int  # the first run of the newest level
    change: float
    low: float
    high: float
    p_value: float
    is_significant: bool = False


def judge_series(
    series: Sequence[Logs], rules: Sequence[LevelRule], *, newest_is_candidate: bool = False
) -> list[LevelChange | None]:
    """Return the change of each series, from the logarithms of its times, oldest first.

    A candidate is a run that is not part of the history, so only its rise counts.
    """
    noises = estimate_noise(series)
    models = [SeriesModel(*parts) for parts in zip(series, noises, rules, strict=True)]
    changes: list[LevelChange | None] = [None] * len(models)
    deviations = np.concatenate([model.compute_deviations() for model in models] or [np.zeros(0)])
    if not newest_is_candidate:
        changes = [model.find_change(deviations) for model in models]
    rises = [
        model.find_rise(deviations, newest_is_candidate=newest_is_candidate) for model in models
    ]
    is_change = np.zeros(len(models), dtype=bool)
    for kind in ("step", "drift"):
        is_change |= _select_discoveries(changes, kind)
    is_rise = _select_discoveries(rises, "rise")
    for i, rise in enumerate(rises):
        change = changes[i]
        if change and is_change[i]:
            changes[i] = replace(change, is_significant=True)
        elif rise and is_rise[i]:
            changes[i] = replace(rise, is_significant=True)
    return changes


def _select_discoveries(changes: Sequence[LevelChange | None], kind: str) -> NDArray[np.bool_]:
    """Select the significant changes of a kind. A series without one counts as tested.

    True drifts would permit more false steps, so kinds are not mixed.
    """
    p_values = [change.p_value if change and change.kind == kind else 1.0 for change in changes]
    return np.array(select_discoveries(p_values, FALSE_DISCOVERY_RATE), dtype=bool)


def find_levels(logs: Logs, rule: LevelRule) -> list[Level]:
    """Return the levels of a single series in order. ``logs`` are the logarithms of its times."""
    [noise] = estimate_noise([logs])
    return SeriesModel(logs, noise, rule).levels


class SeriesModel:
    """The logarithms of the times of a series, oldest first, with their noise and the rule."""

    def __init__(self, logs: Logs, noise: RunNoise, rule: LevelRule) -> None:
        self.logs = logs
        self.noise = noise
        self.rule = rule
        self._clipped = clip_outliers(logs)

    @cached_property
    def levels(self) -> list[Level]:
        """The levels in order: one if nothing changed, none without runs."""
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

    def find_change(self, deviations: Logs) -> LevelChange | None:
        """Return the step to the newest level, or the drift. None if there is neither.

        If there is a drift, only steps relative to it count. ``deviations`` are those of all
        series.
        """
        if len(self.logs) < self.rule.min_runs:
            return None
        n = len(self.logs)
        positions = np.arange(n, dtype=np.float64) - (n - 1) / 2
        slope = float(positions @ self._clipped) / float(positions @ positions)
        drift = self._find_drift(positions, slope)
        if drift is None:
            return self._find_step(deviations)
        detrended = SeriesModel(self.logs - slope * positions, self.noise, self.rule)
        step = detrended._find_step(deviations)
        is_drift = drift.p_value <= self.rule.significance
        return step or (drift if is_drift else None)

    def _find_step(self, deviations: Logs) -> LevelChange | None:
        """Return the step to the newest level, None without earlier levels or if it is small.

        The step is from the fastest earlier level, or from the last one if the newest level is the
        fastest.
        """
        levels = self.levels
        if len(levels) < 2 or levels[-1].start < self.rule.min_runs - self.rule.min_level_runs:
            return None
        *earlier, newest = levels
        base = min(earlier, key=lambda level: level.log)
        if newest.log <= base.log:
            base = earlier[-1]
        log_change = newest.log - base.log
        if abs(log_change) <= math.log1p(self.rule.min_effect):
            return None
        contrast = np.zeros(len(levels))
        contrast[[levels.index(base), -1]] = [-1, 1]
        variance = self.noise.compute_variance(self._fit_weights(contrast))
        step = self._build_change("step", newest.start, log_change, variance)
        p_values = [step.p_value, self._test_against_line(contrast, log_change)]
        for level, other in ((base, newest), (newest, base)):
            p_values.append(self._test_against_outliers(level, other, deviations))
        return replace(step, p_value=max(p_values))

    def _fit_weights(self, contrast: Logs, slope: float | None = None) -> Logs:
        """Return w such that ``w @ log times`` estimates ``contrast @ levels`` by least squares.

        If ``slope`` is given, the levels also share a slope per run, and ``slope`` times the
        estimated slope is added: 0 only corrects for it, and n - 1 extrapolates to run n - 1.
        """
        lengths = [level.num_runs for level in self.levels]
        design = np.repeat(np.eye(len(lengths)), lengths, axis=0)
        if slope is not None:
            design = np.column_stack([design, np.arange(len(design))])
            contrast = np.append(contrast, slope)
        return np.asarray(contrast @ np.linalg.pinv(design))

    def _test_against_line(self, contrast: Logs, log_change: float) -> float:
        """Return the two-sided p-value of a step if all levels have a common slope."""
        weights = self._fit_weights(contrast, slope=0.0)
        step = math.copysign(1, log_change) * float(weights @ self._clipped)
        return min(1.0, 2 * self._compute_tail(step, self.noise.compute_variance(weights)))

    def _test_against_outliers(self, level: Level, other: Level, deviations: Logs) -> float:
        """Return the p-value of a level if its runs are outliers of another level.

        Outliers are the runs of all series that deviate by half the step and are not explained by
        the normal distribution.
        """
        from scipy.special import bdtrc  # type: ignore[import-untyped]

        sign = math.copysign(1, level.log - other.log)
        signed = sign * (self.logs[level.start : level.stop] - (level.log + other.log) / 2)
        num_deviations = abs(level.log - other.log) / 2 / math.sqrt(self.noise.variance)
        share = float((sign * deviations > num_deviations).mean())
        share = max(share - NormalDist().cdf(-num_deviations), MIN_OUTLIER_SHARE)
        tail = float(bdtrc(int((signed > 0).sum()) - 1, level.num_runs, share))
        return min(1.0, 2 * len(self.logs) * tail)

    def _find_drift(self, positions: Logs, slope: float) -> LevelChange | None:
        """Return the change along a line, None if small or if the levels fit better.

        ``positions`` are run numbers relative to the middle run. ``slope`` is the change of the
        logarithm per run.
        """
        n = len(positions)
        if abs(slope) * (n - 1) <= math.log1p(self.rule.min_effect):
            return None
        variance = n * self.noise.compute_variance_of_mean(n)
        line = self._clipped.mean() + slope * positions
        level_score, line_score = (
            float(((self._clipped - fit) ** 2).sum()) / variance
            for fit in (self._fit_levels(), line)
        )
        parameters_saved = 2 * len(self.levels) - 3
        if line_score >= level_score + parameters_saved * math.log(n) + STRONG_EVIDENCE:
            return None
        weight = float(positions @ positions)
        variance *= max(1.0, line_score / (n - 2))
        return self._build_change("drift", 0, slope * (n - 1), variance / weight * (n - 1) ** 2)

    def find_rise(self, deviations: Logs, *, newest_is_candidate: bool) -> LevelChange | None:
        """Return the change of the newest run from the line through the last level, None if small.

        A candidate is also compared with the run before it, which may have begun a new level.
        """
        n = len(self.logs)
        if n < self.rule.min_runs:
            return None
        earlier = self._earlier
        contrast = np.zeros(len(earlier.levels))
        contrast[-1] = 1
        weights = earlier._fit_weights(contrast, slope=n - 1)
        base = float(weights @ earlier._clipped)
        if newest_is_candidate:
            base = max(base, float(self.logs[-2]))
        log_rise = float(self.logs[-1]) - base
        if log_rise <= math.log1p(self.rule.min_effect):
            return None
        num_deviations = log_rise / math.sqrt(self.noise.variance)
        num_exceeding = (deviations * EXCEEDING_MARGIN >= num_deviations).sum()
        if num_exceeding > MAX_EXCEEDING_RUNS * (n - 1):
            return None
        variance = self.noise.compute_variance(np.append(-weights, 1.0))
        return self._build_change("rise", n - 1, log_rise, variance)

    def compute_deviations(self) -> Logs:
        """Return earlier runs relative to their levels, in standard deviations.

        The newest runs are excluded because they may be the start of a level.
        """
        earlier = self._earlier
        residuals = earlier.logs - earlier._fit_levels()
        num_runs = max(len(self.logs) - self.rule.min_level_runs, 0)
        return np.asarray(residuals[:num_runs] / math.sqrt(self.noise.variance))

    @cached_property
    def _earlier(self) -> "SeriesModel":
        """The model of the runs before the newest one."""
        return SeriesModel(self.logs[:-1], self.noise, self.rule)

    def _fit_levels(self) -> Logs:
        """Return the logarithm of the level at each run."""
        logs = [level.log for level in self.levels]
        return np.repeat(logs, [level.num_runs for level in self.levels])

    def _compute_tail(self, log_change: float, variance: float) -> float:
        """Return the one-sided p-value of a change."""
        from scipy.special import stdtr

        return float(stdtr(self.noise.df, -log_change / math.sqrt(variance)))

    def _build_change(
        self, kind: Literal["step", "drift", "rise"], start: int, log_change: float, variance: float
    ) -> LevelChange:
        """Return a change from its logarithm and the variance of the logarithm.

        ``start`` is the first run of the newest level.
        """
        half_width = t_quantile(0.5 + CONFIDENCE / 2, self.noise.df) * math.sqrt(variance)
        # A step is two-sided and may be at any run, a rise is one-sided.
        num_tests = {"step": 2 * len(self.logs), "drift": 2, "rise": 1}[kind]
        return LevelChange(
            kind=kind,
            start=start,
            change=math.expm1(log_change),
            low=math.expm1(log_change - half_width),
            high=math.expm1(log_change + half_width),
            p_value=min(1.0, num_tests * self._compute_tail(abs(log_change), variance)),
        )
