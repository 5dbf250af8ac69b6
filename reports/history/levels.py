"""Levels of a case's time over the runs of a history: successive runs that differ only by noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from parbench.reports.history.noise import Array, RunNoise

MIN_LEVEL_RUNS = 3
"""The least number of runs of a level."""
LEVEL_SIGNIFICANCE = 0.01
"""The probability that a change of level is found in a case whose time does not change."""


@dataclass(frozen=True, kw_only=True)
class LevelRule:
    """The settings of a history check: the smallest change that counts, and the numbers of runs."""

    min_effect: float = 0.03
    """The smallest change of a time that counts, as a fraction: 0.03 is 3 %."""
    min_runs: int = 8
    """The least number of runs with a time of a case. With fewer, its time is not checked."""
    window: int = 30
    """The number of newest runs of a case that are used."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Successive runs of a case whose times differ only by noise."""

    start: int
    """The index of the first run, in the runs of the case."""
    stop: int
    """The index after the last run, in the runs of the case."""
    log: float
    """The median of the logarithms of the times (natural, of seconds)."""

    @property
    def num_runs(self) -> int:
        """The number of runs in the level."""
        return self.stop - self.start


def find_levels(logs: Array, noise: RunNoise | None = None) -> list[Level]:
    """Return the levels of a case's time over runs, oldest first.

    A level is successive runs whose times differ only by noise. The levels minimize the sum of
    squared deviations, with a penalty for each change (PELT, Killick et al. 2012). The penalty is
    z^2 times the variance of the noise of a run, including autocorrelation. z is the two-sided
    normal quantile of 1 % over the number of runs (Bonferroni).

    Args:
        logs: the logarithms of the times, oldest run first.
        noise: the variance and the correlation of the noise of runs, None to estimate both from
            these times.
    """
    n = len(logs)
    if not n:
        return []
    stops = [n]
    if n >= 2 * MIN_LEVEL_RUNS:
        from ruptures import KernelCPD  # type: ignore[import-untyped]

        noise = noise or RunNoise([logs])
        [variance], _ = noise.estimate_variances(logs[None])
        variance *= noise.make_covariance(n).sum() / n
        z = NormalDist().inv_cdf(1 - LEVEL_SIGNIFICANCE / 2 / n)
        detector = KernelCPD(kernel="linear", min_size=MIN_LEVEL_RUNS).fit(logs[:, None])
        stops = [int(stop) for stop in detector.predict(pen=z**2 * float(variance))]
    return [
        Level(start=start, stop=stop, log=float(np.median(logs[start:stop])))
        for start, stop in pairwise([0, *stops])
    ]


def get_deviations(logs: Array, levels: Sequence[Level]) -> Array:
    """Return the logarithm of each run's time minus the median logarithm of its level.

    A level is successive runs that differ only by noise. ``logs`` has the logarithm of a case's time
    in each run, oldest first. ``levels`` cover all runs in order.
    """
    num_runs = [level.num_runs for level in levels]
    return np.asarray(logs - np.repeat([level.log for level in levels], num_runs))
