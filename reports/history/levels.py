"""Levels of a series over runs: successive runs in which its time does not change."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from parbench.reports.history.noise import Array, RunNoise

MIN_LEVEL_RUNS = 3
LEVEL_SIGNIFICANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class LevelRule:
    """The smallest change that counts, and the numbers of runs that a check needs and uses."""

    min_effect: float = 0.03  # a fraction
    min_runs: int = 8
    window: int = 30
    """The number of newest runs that are used."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Runs ``start`` to ``stop`` (exclusive) and the median of their logarithms."""

    start: int
    stop: int
    log: float

    @property
    def num_runs(self) -> int:
        """The number of runs on the level."""
        return self.stop - self.start


def find_levels(logs: Array, noise: RunNoise | None = None) -> list[Level]:
    """Return the levels in order, from the logarithms of the times, oldest first.

    They minimize the sum of squares with a penalty for each change (PELT, Killick et al. 2012).
    A change of level must reduce the sum of squares by more than z^2 times the variance of a run
    with its autocorrelation. z is the normal quantile of the significance divided by the number of
    runs (Bonferroni).
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
        stops = detector.predict(pen=z**2 * float(variance))
    return [
        Level(start=start, stop=stop, log=float(np.median(logs[start:stop])))
        for start, stop in pairwise([0, *stops])
    ]


def get_deviations(logs: Array, levels: Sequence[Level]) -> Array:
    """Return the logarithms relative to the level of each run."""
    num_runs = [level.num_runs for level in levels]
    return np.asarray(logs - np.repeat([level.log for level in levels], num_runs))
