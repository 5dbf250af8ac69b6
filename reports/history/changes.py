"""Changes of series over runs: steps to a new level, drifts, and rises of the newest run.

A series is the times of one case over runs. Their logarithms are modelled as a level, a change and
noise. Slopes vary between series, with variance 0 if nothing drifts.

1. Series and columns are multiplied by the inverse Cholesky factor of the covariance of noise and
   slopes, so that noise is independent (generalized least squares).
2. The statistic of a change is its estimate divided by its standard error. That of a step is the
   largest of all runs at which a step can begin.
3. The p-value is the share of simulated series without a change whose statistic is as large. The
   noise of one simulation is normal, that of another is drawn from the deviations of all series
   from their levels, so that outliers are not changes. The larger p-value counts.
4. A line has 2 parameters, k levels have 2 k - 1. The series drifts unless levels are better by 6
   in Schwarz's criterion, which is strong evidence (Kass & Raftery 1995). Else it has steps.
5. The false discovery rate is controlled over all series, for each kind of change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np

from parbench.bench.results.stats import CONFIDENCE, t_quantile
from parbench.reports.history.levels import (
    MIN_LEVEL_RUNS,
    Level,
    LevelRule,
    find_levels,
    get_deviations,
)
from parbench.reports.history.noise import Array, RunNoise, estimate_correlation
from parbench.reports.stats import select_discoveries

STEP_FALSE_DISCOVERY_RATE = 0.02
"""The accepted fraction of false alarms among the reported steps, each of at least three runs."""
FALSE_DISCOVERY_RATE = 0.01
"""The accepted fraction of false alarms among the reported drifts, and among the rises."""
MIN_SIMULATIONS = 4000
"""The least number of simulated series without a change from which p-values are computed."""
MIN_RUNS_BEFORE_STEP = 5
"""The least number of runs before the run with which a step may begin."""
STRONG_EVIDENCE = 6.0
"""Levels are preferred to a line if Schwarz's criterion is lower for them by at least this."""
NORMAL_MEDIAN = NormalDist().inv_cdf(0.75)  # of the absolute values of a normal distribution

ChangeKind = Literal["step", "drift", "rise"]
"""The form of a change: to a new level, gradually over all runs, or only in the newest run."""


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """The change of a case's time in the newest runs of the history, as a fraction of the time.

    A step is the change to the newest level (runs that differ only by noise), a drift the change
    over all runs, and a rise the change of the newest run only.
    """

    kind: ChangeKind
    """``step``, ``drift`` or ``rise``."""
    start: int
    """The index of the run with which the change begins, in the runs of the case.

    It is the first run of the newest level for a step, 0 for a drift, the newest run for a rise.
    """
    change: float
    """The change of the time: 0.05 is 5 % slower."""
    low: float
    """The lower end of the 95 % interval of ``change``."""
    high: float
    """The upper end of the 95 % interval of ``change``."""
    p_value: float
    """The probability of a test statistic at least as large in a case whose time does not change.

    The statistic is the absolute value of the estimated change over its standard error.
    """


@dataclass(frozen=True, kw_only=True)
class _Design:
    """A linear model of the logarithms of a case's times, with a column for each possible change.

    The change is the coefficient of one tested column: the column with the best fit.
    """

    base: Array
    """The columns that are always fitted, of shape (runs, columns)."""
    tested: Array
    """One column for each possible change, of shape (runs, columns).

    Only the column that fits the times best is used. For a step, there is a column for each run
    with which it may begin: 0 before this run and 1 from this run on.
    """
    has_slopes: bool = True
    """True if the noise of the model includes a random line over all runs.

    Even the times of cases without a change have a small slope over runs.
    """


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The result of fitting a model to the times of one or more cases over runs.

    The model has a column for each possible change (``_Design.tested``). Of these columns, only the
    one that fits the times of a case best is used. Each array has one value for each case.
    """

    estimate: Array
    """The change of the logarithm of the time, which is the coefficient of the best column."""
    error: Array
    """The standard error of ``estimate``."""
    df: float
    """The degrees of freedom of the standard errors."""

    @property
    def statistic(self) -> Array:
        """The absolute value of each estimate divided by its standard error."""
        return np.abs(self.estimate) / self.error


def judge_series(
    series: Sequence[Array],
    rules: Sequence[LevelRule],
    *,
    newest_is_candidate: bool = False,
    rho: float | None = None,
) -> list[LevelChange | None]:
    """Return the significant change of the time of each case over runs, None for an unchanged case.

    It is a step to a new level, otherwise a gradual drift over all runs, otherwise a rise of only
    the newest run. The false discovery rate is controlled over all cases.

    Args:
        series: the logarithms of the times of each case, oldest run first.
        rules: the settings of the check of each case. Only changes above ``min_effect`` count.
        newest_is_candidate: True if the newest run is not part of the history. Then only a rise in
            this run counts, which must also exceed the run before by more than ``min_effect``.
        rho: the correlation of the noise of consecutive runs. None to estimate it from the times.
    """
    if not series:
        return []
    earlier = [logs[:-1] for logs in series] if newest_is_candidate else series
    tester = _ChangeTester(earlier, rho)
    steps = _select_discoveries(
        [tester.find_step(logs, rule) for logs, rule in zip(earlier, rules, strict=True)],
        STEP_FALSE_DISCOVERY_RATE,
    )
    rises = _select_discoveries(
        [tester.find_rise(*parts) for parts in zip(series, steps, rules, strict=True)]
    )
    if newest_is_candidate:
        return [
            rise if _exceeds_last_run(logs, rule) else None
            for rise, logs, rule in zip(rises, series, rules, strict=True)
        ]
    drifts = _select_discoveries(
        [tester.find_drift(logs, rule) for logs, rule in zip(series, rules, strict=True)]
    )
    return [step or drift or rise for step, drift, rise in zip(steps, drifts, rises, strict=True)]


def judge_median(
    logs: Array, rule: LevelRule, *, newest_is_candidate: bool = False
) -> LevelChange | None:
    """Return the significant change over runs of the median relative time, None without a change.

    The time of a case in a run is divided by the case's median time over runs. The value of a run
    is the median of these quotients over its cases. These values are tested for a change like the
    times of one case. Runs that measured at most half of the cases are left out.

    Args:
        logs: the logarithms of the times, of shape (cases, runs), with NaN where a run did not
            measure a case.
        rule: the smallest change that counts.
        newest_is_candidate: True if the newest run is not part of the history. Then only a rise in
            this run is returned, because steps and drifts are changes of the history.
    """
    rho = estimate_correlation([row[np.isfinite(row)] for row in logs])
    logs = logs[:, np.isfinite(logs).mean(axis=0) > 0.5]
    median_logs = np.nanmedian(logs - np.nanmedian(logs, axis=1, keepdims=True), axis=0)
    [change] = judge_series([median_logs], [rule], newest_is_candidate=newest_is_candidate, rho=rho)
    return change


def _select_discoveries(
    changes: Sequence[LevelChange | None], rate: float = FALSE_DISCOVERY_RATE
) -> list[LevelChange | None]:
    """Return the change of each case if it is significant, otherwise None.

    ``changes`` and the result have one element per case. The false discovery rate over all cases is
    at most ``rate``. A case whose change is None counts as tested, with a p-value of 1.
    """
    p_values = [1.0 if change is None else change.p_value for change in changes]
    is_significant = select_discoveries(p_values, rate)
    return [change if ok else None for change, ok in zip(changes, is_significant, strict=True)]


def _exceeds_last_run(logs: Array, rule: LevelRule) -> bool:
    """Return True if the newest run is slower than the run before by more than ``rule.min_effect``.

    A run that is not part of the history must also exceed the newest run of the history, which may
    be the first run of a new level. ``logs`` are the logarithms of a case's times, oldest first.
    """
    return bool(logs[-1] - logs[-2] > math.log1p(rule.min_effect))


class _ChangeTester:
    """Tests the times of cases over runs for changes, with noise estimated from all cases together.

    ``series`` are the logarithms of the times of each case, oldest run first. ``rho`` is the
    correlation of the noise of consecutive runs, None to estimate it.
    """

    def __init__(self, series: Sequence[Array], rho: float | None) -> None:
        """Estimate the noise of runs and the variance of slopes from the times of all cases."""
        self.noise = RunNoise(series, rho)
        """The variance of the noise of a run, and the correlation between consecutive runs."""
        # So many simulations that a change of one series can be significant.
        self._num_simulations = max(MIN_SIMULATIONS, round(len(series) / FALSE_DISCOVERY_RATE))
        self._simulations: dict[tuple[bytes, bytes], list[Array]] = {}
        """The sorted test statistics of simulated cases without a change, keyed by model.

        A value has two arrays: for normal noise, and for noise drawn from measured deviations. The
        key has the base columns and the tested columns of the model as bytes.
        """
        # The newest runs may be the start of a level, so they are not deviations.
        self._deviations = np.concatenate(
            [self._standardize(logs)[:-MIN_LEVEL_RUNS] for logs in series]
        )
        """The deviations of runs of all cases from their levels, in standard deviations of a run.

        A level is the median of successive runs that differ only by noise. Simulated noise is drawn
        from these deviations.
        """
        self._slope_variance = 0.0  # of the slopes of unchanged cases, over the variance of a run
        excess = np.array([self._estimate_slope_variance(logs) for logs in series])
        # Without drifts, half of them are above 0. More by 2 standard errors is significant.
        if (excess > 0).sum() > len(excess) / 2 + math.sqrt(len(excess)):
            self._slope_variance = float(np.median(excess))

    def _standardize(self, logs: Array) -> Array:
        """Return the deviation of each run from its level, in standard deviations of a run.

        ``logs`` are the logarithms of the times of one case. A level is the median of successive
        runs that differ only by noise.
        """
        [variance], _ = self.noise.estimate_variances(logs[None])
        levels = find_levels(logs, self.noise)
        return np.asarray(get_deviations(logs, levels) / math.sqrt(variance))

    def _estimate_slope_variance(self, logs: Array) -> float:
        """Return an estimate of the variance of slopes from the times of one case.

        A slope is the change of the logarithm of the time from the first to the last run, along a
        fitted line. The estimate is the squared slope over the square of the normal median
        (0.6745), minus the squared standard error of the slope. It is relative to the variance of
        the noise of a run. The median of the estimates of all cases is the variance of slopes, even
        if the times of a few cases changed. ``logs`` are the logarithms of the case's times.
        """
        fit = self._fit(logs[None], _make_drift_design(len(logs)))
        [variance], _ = self.noise.estimate_variances(logs[None])
        square = fit.estimate[0] ** 2 / NORMAL_MEDIAN**2
        return float((square - fit.error[0] ** 2) / variance)

    def find_step(self, logs: Array, rule: LevelRule) -> LevelChange | None:
        """Return the step of a case's time to its newest level, significant or not.

        A level is successive runs that differ only by noise. The step is from the fastest earlier
        level, or from the previous level if the newest level is the fastest. None if the case has
        only one level, if a line describes the times as well, if fewer than three runs of the
        newest level are nearer to it than to the other level, if both levels have too few runs, or
        if the step is smaller than ``rule.min_effect``.

        Args:
            logs: the logarithms of the times of the case, oldest first.
            rule: the smallest step that counts, and the least number of runs that both levels
                together must have.
        """
        *earlier, newest = levels = find_levels(logs, self.noise)
        if not earlier or self._is_line(logs, levels):
            return None
        base = min(earlier, key=lambda level: level.log)
        if newest.log <= base.log:
            base = earlier[-1]
        values = logs[newest.start :]
        num_near = (np.abs(values - newest.log) < np.abs(values - base.log)).sum()
        num_runs = base.num_runs + newest.num_runs
        if num_near < MIN_LEVEL_RUNS or num_runs < rule.min_runs:
            return None
        both = np.concatenate([logs[base.start : base.stop], values])
        design = _make_step_design(num_runs)
        _, p_value = self._test(both, design)
        is_newest = np.arange(num_runs)[:, None] >= base.num_runs
        fit = self._fit(both[None], replace(design, tested=is_newest.astype(float)))
        return _build_change("step", newest.start, fit, p_value, rule)

    def find_drift(self, logs: Array, rule: LevelRule) -> LevelChange | None:
        """Return the change of a case's time along a line over all runs, significant or not.

        None if the change is smaller than ``rule.min_effect``, or if steps between levels describe
        the times better than a line. ``logs`` are the logarithms of the times, oldest first.
        """
        if not self._is_line(logs, find_levels(logs, self.noise)):
            return None
        fit, p_value = self._test(logs, _make_drift_design(len(logs)))
        return _build_change("drift", 0, fit, p_value, rule)

    def _is_line(self, logs: Array, levels: Sequence[Level]) -> bool:
        """Return True if a line describes a case's times over runs as well as ``levels`` do.

        A level is successive runs that differ only by noise. Levels describe the times better only
        if their value of Schwarz's criterion is lower by at least 6. ``logs`` are the logarithms of
        the times, oldest first.
        """
        n = len(logs)
        line = np.linspace(-0.5, 0.5, n)
        deviations = logs - logs.mean() - line * (logs @ line) / (line @ line)
        [variance], _ = self.noise.estimate_variances(logs[None])
        variance *= self.noise.make_covariance(n).sum() / n
        level_score = (get_deviations(logs, levels) ** 2).sum() / variance
        level_score += (2 * len(levels) - 1) * math.log(n)
        line_score = (deviations**2).sum() / variance + 2 * math.log(n)
        return bool(line_score < level_score + STRONG_EVIDENCE)

    def find_rise(
        self, logs: Array, step: LevelChange | None, rule: LevelRule
    ) -> LevelChange | None:
        """Return the rise of the newest run's time above the earlier runs, significant or not.

        The newest run is compared only with earlier runs since ``step``. None if the newest run is
        not slower than these earlier runs by more than ``rule.min_effect``.

        Args:
            logs: the logarithms of the times of a case, oldest first.
            step: the significant step of the case's time, None without a step.
            rule: the smallest rise that counts.
        """
        n = len(logs)
        columns = [np.ones(n)]
        if step:
            columns.append((np.arange(n) >= step.start).astype(float))
        design = _Design(base=np.column_stack(columns), tested=np.eye(n)[:, -1:])
        fit, p_value = self._test(logs, design)
        change = _build_change("rise", n - 1, fit, p_value, rule)
        return change if change and change.change > 0 else None

    def _test(self, logs: Array, design: _Design) -> tuple[_Fit, float]:
        """Return the fit of a model to one case's times, and the p-value of the change.

        The test statistic is the absolute value of the estimated change over its standard error.
        The p-value is the fraction of simulated unchanged cases whose statistic is at least as
        large. ``logs`` are the logarithms of the times, oldest first.
        """
        fit = self._fit(logs[None], design)
        key = (design.base.tobytes(), design.tested.tobytes())
        if key not in self._simulations:
            self._simulations[key] = self._simulate_statistics(design)
        num_larger = max(
            len(statistics) - int(np.searchsorted(statistics, fit.statistic[0]))
            for statistics in self._simulations[key]
        )
        return fit, (num_larger + 1) / (self._num_simulations + 1)

    def _simulate_statistics(self, design: _Design) -> list[Array]:
        """Return the sorted test statistics of simulated cases whose time does not change.

        A statistic is the absolute value of the estimated change over its standard error. The list
        has two arrays in ascending order: the statistics with normal noise, and those with noise
        drawn from the measured deviations of all cases.
        """
        num_runs = len(design.base)
        random = np.random.default_rng(num_runs)
        shape = (self._num_simulations, num_runs)
        factor = self._factor_covariance(num_runs, design.has_slopes)
        noises = (random.standard_normal(shape), random.choice(self._deviations, shape))
        fits = [self._fit(noise @ factor.T, design, prior_variance=1.0) for noise in noises]
        return [np.sort(fit.statistic) for fit in fits]

    def _fit(self, logs: Array, design: _Design, prior_variance: float | None = None) -> _Fit:
        """Fit a model to the times of each case over runs, and return estimates and errors.

        The model has a column for each possible change (``design.tested``). Only the one that fits
        the times of a case best is used.

        Args:
            logs: the logarithms of the times, of shape (cases, runs).
            design: the model.
            prior_variance: the variance of the noise of a run that is expected of any case, 1 for
                simulated times. None for the one that was estimated from measured times.
        """
        whiten = np.linalg.inv(self._factor_covariance(logs.shape[1], design.has_slopes))
        base, _ = np.linalg.qr(whiten @ design.base)
        columns = whiten @ design.tested
        columns -= base @ (base.T @ columns)
        norms = np.linalg.norm(columns, axis=0)
        projections = logs @ whiten.T @ columns / norms
        best = np.abs(projections).argmax(axis=1)
        variances, df = self.noise.estimate_variances(logs, prior_variance)
        estimate = np.take_along_axis(projections, best[:, None], axis=1)[:, 0] / norms[best]
        return _Fit(estimate=estimate, error=np.sqrt(variances) / norms[best], df=df)

    def _factor_covariance(self, num_runs: int, has_slopes: bool) -> Array:
        """Return the Cholesky factor of the covariance matrix of the noise of consecutive runs.

        The matrix is relative to the variance of one run, and of shape (runs, runs). If
        ``has_slopes`` is True, the noise includes a random line over all runs, because even the
        times of cases without a change have a small slope.
        """
        covariance = self.noise.make_covariance(num_runs)
        if has_slopes:
            line = np.linspace(-0.5, 0.5, num_runs)
            covariance += self._slope_variance * np.outer(line, line)
        return np.asarray(np.linalg.cholesky(covariance))


def _make_step_design(num_runs: int) -> _Design:
    """Return the model of a case's times over runs with one level and a step to a new level.

    The model has a column for each run with which the step may begin (``tested``). These runs have
    at least 5 runs before them, and at least 2 after them.
    """
    starts = np.arange(MIN_RUNS_BEFORE_STEP, num_runs - MIN_LEVEL_RUNS + 1)
    steps = (np.arange(num_runs)[:, None] >= starts).astype(float)
    return _Design(base=np.ones((num_runs, 1)), tested=steps)


def _make_drift_design(num_runs: int) -> _Design:
    """Return the model of times along a line over the runs.

    The model has one column for the change (``tested``). It rises by 1 from the first to the last
    run, so its coefficient is the change of the logarithm of the time over all runs.
    """
    line = np.linspace(-0.5, 0.5, num_runs)[:, None]
    return _Design(base=np.ones((num_runs, 1)), tested=line, has_slopes=False)


def _build_change(
    kind: ChangeKind, start: int, fit: _Fit, p_value: float, rule: LevelRule
) -> LevelChange | None:
    """Return the change of a case's time that a fit estimates, with its 95 % interval.

    None if the change is not larger than the least change that counts, ``rule.min_effect``.

    Args:
        kind: the form of the change: ``step``, ``drift`` or ``rise``.
        start: the index of the run with which the change begins, 0 for a drift.
        fit: the fit of the times of one case, so its arrays have one element.
        p_value: the p-value of the change, which is stored in the result.
        rule: the settings of the check.
    """
    log_change = float(fit.estimate[0])
    if abs(log_change) <= math.log1p(rule.min_effect):
        return None
    half_width = t_quantile(0.5 + CONFIDENCE / 2, fit.df) * float(fit.error[0])
    return LevelChange(
        kind=kind,
        start=start,
        change=math.expm1(log_change),
        low=math.expm1(log_change - half_width),
        high=math.expm1(log_change + half_width),
        p_value=p_value,
    )
