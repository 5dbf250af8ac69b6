"""Levels of a series over runs: which level is the newest, and since which run.

The logarithm of the time of a run is the level at that run plus noise (``noise.py``).

1. Levels: optimal partitioning. A change point reduces the sum of squares by more than z^2 v, where
   v is the variance of a run with its autocorrelation, and z the normal quantile at the
   significance level divided by the number of runs (Bonferroni).
2. Step: Student's t of the means of the newest level and an earlier one.
3. Drift: a line has 2 parameters, k levels have 2 k - 1. The line is preferred unless levels are
   better by 6 in Schwarz's criterion, which is strong evidence (Kass & Raftery 1995).
4. Rise: Student's t of the newest run and the mean of the last level. Because outliers are not
   normal, at most one in 20 earlier runs may exceed the level of any series as far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np

from parbench.bench.results.stats import CONFIDENCE, t_quantile
from parbench.reports.history.noise import Logs, RunNoise, clip_outliers, estimate_noise
from parbench.reports.stats import find_change_points, select_discoveries

FALSE_DISCOVERY_RATE = 0.01
STRONG_EVIDENCE = 6.0
MAX_EXCEEDING_RUNS = 1 / 20


@dataclass(frozen=True, kw_only=True)
class LevelRule:
    """The smallest change that counts, as a fraction, and how many runs a check needs and uses."""

    min_effect: float = 0.03
    significance: float = 0.01
    min_level_runs: int = 3
    min_runs: int = 8
    window: int = 30


@dataclass(frozen=True, kw_only=True)
class Level:
    """Runs ``start`` to ``stop`` (exclusive) and the mean of their logarithms."""

    start: int
    stop: int
    log: float

    @property
    def num_runs(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """The change of the newest runs as a fraction, with its 95 % interval.

    A step is the change to the newest level, a drift that over all runs, a rise that of the newest
    run alone. It is significant if it is among all series.
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
    if not newest_is_candidate:
        changes = [model.find_change() for model in models]
    rises = [model.find_rise(newest_is_candidate=newest_is_candidate) for model in models]
    deviations = np.concatenate([model.compute_deviations() for model in models] or [np.zeros(0)])
    max_exceeding = MAX_EXCEEDING_RUNS * (max(map(len, series), default=1) - 1)
    is_change = _select_discoveries(changes)
    is_rise = _select_discoveries(rises)
    for i, (model, rise) in enumerate(zip(models, rises, strict=True)):
        change = changes[i]
        if change and is_change[i]:
            changes[i] = replace(change, is_significant=True)
        elif rise and is_rise[i]:
            num_deviations = math.log1p(rise.change) / math.sqrt(model.noise.variance)
            if (deviations >= num_deviations).sum() <= max_exceeding:
                changes[i] = replace(rise, is_significant=True)
    return changes


def _select_discoveries(changes: Sequence[LevelChange | None]) -> list[bool]:
    """Select the significant changes among all series. A series without one counts as tested."""
    p_values = [change.p_value if change else 1.0 for change in changes]
    return select_discoveries(p_values, FALSE_DISCOVERY_RATE)


def find_levels(logs: Logs, rule: LevelRule) -> list[Level]:
    """Return the levels of a single series in order."""
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

    def find_change(self) -> LevelChange | None:
        """Return the step to the newest level, or the drift.

        If there is a drift, only steps relative to it count.
        """
        if len(self.logs) < self.rule.min_runs:
            return None
        n = len(self.logs)
        positions = np.arange(n, dtype=np.float64) - (n - 1) / 2
        slope = float(positions @ self._clipped) / float(positions @ positions)
        drift = self._find_drift(positions, slope)
        if drift is None:
            return self._find_step()
        detrended = SeriesModel(self.logs - slope * positions, self.noise, self.rule)
        return detrended._find_step() or drift

    def _find_step(self) -> LevelChange | None:
        """Return the change from the fastest earlier level, or from the last one if slower."""
        levels = self.levels
        if len(levels) < 2 or levels[-1].start < self.rule.min_runs - self.rule.min_level_runs:
            return None
        *earlier, newest = levels
        base = min(earlier, key=lambda level: level.log)
        if newest.log <= base.log:
            base = earlier[-1]
        if abs(newest.log - base.log) <= math.log1p(self.rule.min_effect):
            return None
        # Two outliers in three runs are not a level.
        is_above = self.logs > (newest.log + base.log) / 2
        share_above = [is_above[level.start : level.stop].mean() for level in (base, newest)]
        if min(share_above) > 0.2 or max(share_above) < 0.8:
            return None
        variance = self.noise.compute_variance_of_mean(base.num_runs)
        variance += self.noise.compute_variance_of_mean(newest.num_runs)
        return self._build_change("step", newest.start, newest.log - base.log, variance)

    def _find_drift(self, positions: Logs, slope: float) -> LevelChange | None:
        """Return the change along a line, if it fits better than the levels."""
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
        drift = self._build_change("drift", 0, slope * (n - 1), variance / weight * (n - 1) ** 2)
        return drift if drift.p_value <= self.rule.significance else None

    def find_rise(self, *, newest_is_candidate: bool) -> LevelChange | None:
        """Return the newest run relative to the last level, None if it is not above.

        A candidate is also compared with the run before it, which may have begun a new level.
        """
        if len(self.logs) < self.rule.min_runs:
            return None
        level = self._earlier.levels[-1]
        base = max(level.log, float(self.logs[-2])) if newest_is_candidate else level.log
        log_rise = float(self.logs[-1]) - base
        if log_rise <= math.log1p(self.rule.min_effect):
            return None
        variance = self.noise.variance + self.noise.compute_variance_of_mean(level.num_runs)
        return self._build_change("rise", len(self.logs) - 1, log_rise, variance)

    def compute_deviations(self) -> Logs:
        """Return earlier runs relative to their levels, in standard deviations."""
        earlier = self._earlier
        residuals = earlier.logs - earlier._fit_levels()
        return np.asarray(residuals / math.sqrt(self.noise.variance))

    @cached_property
    def _earlier(self) -> "SeriesModel":
        return SeriesModel(self.logs[:-1], self.noise, self.rule)

    def _fit_levels(self) -> Logs:
        """Return the logarithm of the level at each run."""
        logs = [level.log for level in self.levels]
        return np.repeat(logs, [level.num_runs for level in self.levels])

    def _build_change(
        self, kind: Literal["step", "drift", "rise"], start: int, log_change: float, variance: float
    ) -> LevelChange:
        from scipy.special import stdtr  # type: ignore[import-untyped]

        error = math.sqrt(variance)
        half_width = t_quantile(0.5 + CONFIDENCE / 2, self.noise.df) * error
        tail = float(stdtr(self.noise.df, -abs(log_change) / error))
        # A step is two-sided and may be at any run, a rise is one-sided.
        num_tests = {"step": 2 * len(self.logs), "drift": 2, "rise": 1}[kind]
        return LevelChange(
            kind=kind,
            start=start,
            change=math.expm1(log_change),
            low=math.expm1(log_change - half_width),
            high=math.expm1(log_change + half_width),
            p_value=min(1.0, num_tests * tail),
        )
