"""Changes of series over runs: steps to a new level, drifts, and rises of the newest run.

A series is the times of one case over runs. A level is successive runs whose times differ only by
noise. The logarithms of times are levels, a change and noise, and consecutive runs correlate.
``docs/concepts/statistics.md`` has the derivation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parbench.reports.stats import select_discoveries

Array = NDArray[np.float64]
"""An array of floats."""
MIN_LEVEL_RUNS = 3
"""The least number of runs of a level."""
MIN_RUNS = 8
"""The least number of runs with a time of a case. With fewer, its time is not checked."""
MIN_POOLED_SERIES = 5
"""The least number of cases with which the common noise and change of all cases are estimated."""
STEP_FALSE_DISCOVERY_RATE = 0.02
"""The accepted fraction of false alarms among the reported steps, each of at least three runs."""
FALSE_DISCOVERY_RATE = 0.01
"""The accepted fraction of false alarms among the reported drifts, and among the rises."""

ChangeKind = Literal["step", "drift", "rise"]
"""The form of a change: to a new level, gradually over all runs, or only in the newest run."""


@dataclass(frozen=True)
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
    """The probability that noise or outliers look like a change of this size."""


class Level(NamedTuple):
    """Successive runs of a case whose times differ only by noise."""

    start: int
    """The index of the first run, in the runs of the case."""
    stop: int
    """The index after the last run, in the runs of the case."""
    log: float
    """The median of the logarithms of the times (natural, of seconds)."""


def judge_histories(
    series: Sequence[Array],
    min_effects: Sequence[float],
    *,
    newest_is_candidate: bool = False,
    rho: float = 0.0,
) -> list[LevelChange | None]:
    """Return the significant change of the time of each case over runs, None for an unchanged case.

    It is a step to a new level, otherwise a gradual drift over all runs, otherwise a rise of only
    the newest run. The false discovery rate is controlled over all cases.

    Args:
        series: the logarithms of the times of each case, oldest run first.
        min_effects: the smallest change that counts for each case, as a fraction of the time.
        newest_is_candidate: True if the newest run is not part of the history. Then only a rise in
            this run counts, which must also exceed the run before by more than the smallest change.
        rho: the correlation of the noise of consecutive runs. With 5 or more cases, it is estimated
            from their times instead.
    """
    tester = ChangeTester([logs[:-1] for logs in series], rho)
    rises = _keep_significant(map(tester.find_rise, series), min_effects, FALSE_DISCOVERY_RATE)
    if newest_is_candidate:
        is_higher = np.array([logs[-1] - logs[-2] for logs in series]) > np.log1p(min_effects)
        return [rise if ok else None for rise, ok in zip(rises, is_higher, strict=True)]
    drifts = _keep_significant(map(tester.find_drift, series), min_effects, FALSE_DISCOVERY_RATE)
    steps = _keep_significant(map(tester.find_step, series), min_effects, STEP_FALSE_DISCOVERY_RATE)
    return [step or drift or rise for step, drift, rise in zip(steps, drifts, rises, strict=True)]


def _keep_significant(
    changes: Iterable[LevelChange | None], min_effects: Sequence[float], rate: float
) -> list[LevelChange | None]:
    """Return the change of each case if it is significant and large enough, otherwise None.

    ``changes``, ``min_effects`` (fractions) and the result have one element per case. The false
    discovery rate over all cases is at most ``rate``. Cases without a change that is larger than
    the least one that counts are tested too, with a p-value of 1.
    """
    tested = []
    for change, min_effect in zip(changes, min_effects, strict=True):
        is_large = change and abs(math.log1p(change.change)) > math.log1p(min_effect)
        tested.append(change if is_large else None)
    is_significant = select_discoveries([c.p_value if c else 1.0 for c in tested], rate)
    return [change if ok else None for change, ok in zip(tested, is_significant, strict=True)]


def estimate_correlation(series: Sequence[Array]) -> float:
    """Return the correlation of the noise of consecutive runs, one number for all cases.

    The variances from differences of runs one and two apart are proportional to 1 - rho and 1 -
    rho^2, so their ratio is 1 + rho. The result is half a standard error above the estimate,
    because a correlation that is too low causes false alarms. ``series`` are the logarithms of the
    times of each case, oldest run first.
    """
    ratios = [_compute_variance(logs, 2) / _compute_variance(logs, 1) for logs in series]
    error = np.std(np.log(ratios)) / math.sqrt(len(ratios))
    return min(max(math.exp(np.mean(np.log(ratios)) + error / 2) - 1, 0.0), 0.95)


def _compute_variance(logs: Array, lag: int) -> float:
    """Return the variance between runs of a case from the differences of runs ``lag`` apart.

    It is half of their mean square. Differences of more than 3 standard deviations are left out,
    because they are outliers or steps. The standard deviation follows from their median,
    which is 0.6745 for normal ones. The least variance is that of a standard deviation of 0.01 % of
    the time.
    """
    differences = np.abs(logs[lag:] - logs[:-lag])
    limit = 3 * np.median(differences) / 0.6745
    return max(float(np.mean(differences[differences <= limit] ** 2)) / 2, 1e-8)


def _sum_line_squares(logs: Array) -> float:
    """Return the sum of squared deviations of the logarithms of times from a line over runs."""
    _, residuals, *_ = np.polyfit(np.arange(len(logs)), logs, 1, full=True)
    return float(residuals[0])


class ChangeTester:
    """Tests the times of cases over runs for changes, with noise estimated from all cases together.

    ``series`` are the logarithms of the times of each case, oldest run first. ``rho`` is the
    correlation of the noise of consecutive runs, which 5 or more cases estimate themselves.
    """

    def __init__(self, series: Sequence[Array], rho: float = 0.0) -> None:
        """Estimate the noise of runs from the times of all cases."""
        self._rho = rho
        self._prior_variance, self._prior_df = 1.0, 0.0
        """The expected variance of the logarithm of any case's time, and its degrees of freedom.

        These are the weight of this variance next to that of a single case.
        """
        if len(series) >= MIN_POOLED_SERIES:
            self._rho = estimate_correlation(series)
            log_variances = np.log([self._estimate_variance(logs) for logs in series])
            df = np.mean([self._count_df(logs) for logs in series])
            excess = max(log_variances.var() - 2 / df - 2 / df**2, 0.05)
            self._prior_df = (1 + math.sqrt(1 + 2 * excess)) / excess
            self._prior_variance = math.exp(log_variances.mean() + 1 / df)
        self._level_factor = (1 + self._rho) / (1 - self._rho)
        """The variance of a mean of many runs times their number, over the variance of a run."""
        # The newest runs may be the start of a level, so they are not deviations.
        deviations = [self._standardize(logs)[:-MIN_LEVEL_RUNS] for logs in series]
        self._deviations = np.abs(np.concatenate(deviations))
        """The absolute deviations of the runs of all cases from levels, in standard deviations."""
        num_steep = sum(map(self._is_steep, series))
        self._has_slopes = num_steep > len(series) / 2 + math.sqrt(len(series))
        """True if cases have slopes in general, so that only a change relative to a line counts."""

    def _count_df(self, logs: Array) -> float:
        """Return the degrees of freedom of the variance of a case's times between runs."""
        return 2 / 3 * (len(logs) - 1) + self._prior_df

    def _estimate_variance(self, logs: Array) -> float:
        """Return the variance of a case's times between runs, shrunk to that of all cases."""
        variance = _compute_variance(logs, 1) / (1 - self._rho)
        prior_weight = self._prior_df / self._count_df(logs)
        return (1 - prior_weight) * variance + prior_weight * self._prior_variance

    def find_levels(self, logs: Array) -> list[Level]:
        """Return the levels of a case's time over runs, oldest first.

        The levels minimize the sum of squared deviations, with a penalty for each change (PELT,
        Killick et al. 2012). ``logs`` are the logarithms of the times of 6 or more runs, oldest
        first.
        """
        from ruptures import KernelCPD  # type: ignore[import-untyped]

        detector = KernelCPD(kernel="linear", min_size=MIN_LEVEL_RUNS).fit(logs[:, None])
        variance = self._level_factor * self._estimate_variance(logs)
        stops = list(map(int, detector.predict(pen=4 * math.log(len(logs)) * variance)))
        spans = zip([0, *stops[:-1]], stops, strict=True)
        return [Level(start, stop, float(np.median(logs[start:stop]))) for start, stop in spans]

    def _standardize(self, logs: Array) -> Array:
        """Return the deviations of runs from the median of their level, in standard deviations."""
        levels = self.find_levels(logs)
        medians = np.concatenate([np.full(level.stop - level.start, level.log) for level in levels])
        return np.asarray((logs - medians) / math.sqrt(self._estimate_variance(logs)))

    def _is_steep(self, logs: Array) -> bool:
        """Return True if the slope of a case's times is larger than that of half of random series.

        Its square over that of its standard error is above 0.455, the median of the square of a
        standard normal variable.
        """
        line_squares = _sum_line_squares(logs)
        slope_squares = len(logs) * logs.var() - line_squares
        return bool(slope_squares > 0.455 * self._level_factor * line_squares / (len(logs) - 2))

    def _is_line(self, logs: Array) -> bool:
        """Return True if a line describes a case's times over runs as well as levels do.

        Levels describe the times better only if their value of Schwarz's criterion is lower by at
        least 6. A line has 2 parameters, k levels have 2 k - 1.
        """
        line_squares = _sum_line_squares(logs) / self._estimate_variance(logs)
        level_squares = np.sum(self._standardize(logs) ** 2)
        penalty = (2 * len(self.find_levels(logs)) - 3) * math.log(len(logs)) + 6
        return bool(line_squares - level_squares < penalty * self._level_factor)

    def find_step(self, logs: Array) -> LevelChange | None:
        """Return the step of a case's time to its newest level, significant or not.

        The step is from the fastest earlier level of at least 5 runs. None without such a level, or
        if a line describes the times as well. Of the shorter level, at least three runs must be
        nearer to it than to the other. ``logs`` are the logarithms of the case's times, oldest
        first.
        """
        *earlier, newest = self.find_levels(logs)
        bases = [level for level in earlier if level.stop - level.start >= 5]
        if not bases or self._is_line(logs):
            return None
        base = min(bases, key=lambda level: level.log)
        old_logs, new_logs = logs[base.start : base.stop], logs[newest.start :]
        is_near_base = np.abs(old_logs - base.log) < np.abs(old_logs - newest.log)
        is_near_newest = np.abs(new_logs - newest.log) < np.abs(new_logs - base.log)
        is_near = min(is_near_newest, is_near_base, key=len)
        if is_near.sum() < MIN_LEVEL_RUNS:
            return None
        deviations = self._standardize(logs)
        outliers = deviations - np.clip(deviations, -3, 3)
        clipped = logs - outliers * math.sqrt(self._estimate_variance(logs))
        both = np.concatenate([clipped[base.start : base.stop], clipped[newest.start :]])
        course = np.repeat([0.0, 1.0], [len(old_logs), len(new_logs)])
        return self._test("step", newest.start, both, course, is_near.astype(float))

    def find_drift(self, logs: Array) -> LevelChange | None:
        """Return the change of a case's time along a line over all runs, significant or not.

        None if levels describe the times better than a line. ``logs`` are the logarithms of the
        times, oldest first.
        """
        drift = self._test("drift", 0, logs, np.linspace(0, 1, len(logs)), np.ones(len(logs)))
        return drift if self._is_line(logs) else None

    def find_rise(self, logs: Array) -> LevelChange | None:
        """Return the rise of the newest run's time above the earlier runs, significant or not.

        The newest run is compared only with earlier runs since the last step. None if it is not
        slower than these runs. ``logs`` are the logarithms of the times, oldest first.
        """
        step = self.find_step(logs[:-1])
        recent = logs[step.start :] if step and step.p_value < FALSE_DISCOVERY_RATE else logs
        rise = self._test("rise", len(logs) - 1, recent, np.eye(len(recent))[-1], np.ones(1))
        return rise if rise.change > 0 else None

    def _test(
        self, kind: ChangeKind, start: int, logs: Array, course: Array, is_near: Array
    ) -> LevelChange:
        """Return the change of one case's time with its p-value.

        The change is estimated by generalized least squares. Its p-value is that of Student's t, or
        the probability that its runs are outliers, if this is larger.

        Args:
            kind: the form of the change, which the result contains.
            start: the index of the run with which the change begins, which the result contains.
            logs: the logarithms of the times, oldest first.
            course: the change of each run if the whole change is 1.
            is_near: 1 for each changed run whose time confirms the change, 0 for the others.
        """
        from scipy.special import bdtrc, stdtr, stdtrit  # type: ignore[import-untyped]

        runs = np.arange(len(logs))
        precision = np.linalg.inv(self._rho ** np.abs(np.subtract.outer(runs, runs)))
        has_line = self._has_slopes and kind != "drift"
        model = np.column_stack([course, np.vander(runs, 2 if has_line else 1)])
        inverse = np.linalg.inv(model.T @ precision @ model)
        log_change = (inverse @ model.T @ precision @ logs)[0]
        variance = self._estimate_variance(logs)
        line_variance = _sum_line_squares(logs) / (len(logs) - 2) if kind == "drift" else 0.0
        error = math.sqrt(max(variance, line_variance) * inverse[0, 0])
        size = abs(log_change) / math.sqrt(variance)
        outlier_share = np.mean(self._deviations >= min(size, 3 + size / 2))
        p_outliers = bdtrc(is_near.sum() - 1, len(is_near), outlier_share)
        p_value = max(stdtr(self._count_df(logs), -abs(log_change) / error), p_outliers)
        num_starts = len(logs) - MIN_RUNS + 1 if kind == "step" else 1
        half_width = stdtrit(self._count_df(logs), 0.975) * error
        change, low, high = np.expm1(log_change + half_width * np.array([0, -1, 1])).tolist()
        return LevelChange(kind, start, change, low, high, float(num_starts * p_value))
