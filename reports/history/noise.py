"""The noise of series: the variation of their times between runs without a change.

Model: the logarithm of the time of a run is a level plus noise. Consecutive runs correlate by rho
(AR(1)), which all series share.

1. The mean squares of differences of runs one and two apart are 2 v (1 - rho) and 2 v (1 - rho^2),
   where v is the variance of a run. Differences at steps are outliers, which are excluded.
2. Their ratio is 1 + rho, pooled over series (Chakar et al., Bernoulli 2017).
3. A variance has 2/3 of the degrees of freedom of n - 1 independent runs (von Neumann et al. 1941).
4. Variances shrink toward their common prior (Smyth, Stat. Appl. Genet. Mol. Biol. 2004). Its
   weight follows from the variation of their logarithms. The digamma and trigamma functions of x
   are approximated by log x - 1 / (2 x) - 1 / (12 x^2) and 1 / x + 1 / (2 x^2).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""An array of floats."""

MIN_POOLED_SERIES = 5  # Fewer series do not estimate how runs vary in general.
MAX_PRIOR_DF = 40.0
"""The largest weight of the prior variance, in degrees of freedom."""
MIN_VARIANCE = 1e-8
"""The least variance of the logarithm of a time: a standard deviation of 0.01 % of the time."""
NORMAL_QUARTILE = NormalDist().inv_cdf(0.875)  # the third quartile of absolute normal values


class RunNoise:
    """The noise of times between runs: its variance, and the correlation of consecutive runs.

    Both are estimated from several cases together. ``series`` are the logarithms of the times of
    each case, oldest run first. ``rho`` is the correlation of the noise of consecutive runs, None
    to estimate it from ``series``.
    """

    def __init__(self, series: Sequence[Array], rho: float | None = None) -> None:
        """Estimate the correlation of runs and the prior variance from the times of all cases."""
        self.rho = estimate_correlation(series) if rho is None else rho
        """The correlation of the noise of consecutive runs."""
        self.prior_variance = 1.0
        """The expected variance of the logarithm of a case's time, from all cases together."""
        self.prior_df = 0.0
        """The weight of the prior variance in degrees of freedom, 0 if it was not estimated."""
        if len(series) >= MIN_POOLED_SERIES:
            rows = [self.estimate_variances(logs[None]) for logs in series]
            variances = np.concatenate([variances for variances, _ in rows])
            mean_df = float(np.mean([df for _, df in rows]))
            self.prior_variance, self.prior_df = _estimate_prior(variances, mean_df)

    def estimate_variances(
        self, logs: Array, prior_variance: float | None = None
    ) -> tuple[Array, float]:
        """Return (variance between runs of each case, degrees of freedom of each variance).

        They are variances of the logarithm of the time, of shape (cases,). The variance of a case
        is a weighted mean: of the variance between the runs of the case, and of the prior variance,
        which all cases share.

        Args:
            logs: the logarithms of the times, of shape (cases, runs).
            prior_variance: the prior variance. None is ``self.prior_variance``. Simulated times
                with a variance of 1 require 1.
        """
        if prior_variance is None:
            prior_variance = self.prior_variance
        df = max(2 / 3 * (logs.shape[1] - 1), 1.0)
        variances = _mean_square_difference(logs, 1) / 2 / (1 - self.rho)
        total_df = df + self.prior_df
        shrunk = (df * variances + self.prior_df * prior_variance) / total_df
        return np.maximum(shrunk, MIN_VARIANCE), total_df

    def make_covariance(self, num_runs: int) -> Array:
        """Return the covariance matrix of the noise of consecutive runs over the variance of one run.

        It has the shape (``num_runs``, ``num_runs``) and 1 on the diagonal.
        """
        runs = np.arange(num_runs)
        return np.asarray(self.rho ** np.abs(np.subtract.outer(runs, runs)))


def estimate_correlation(series: Sequence[Array]) -> float:
    """Return the correlation of the noise of consecutive runs, one number for all cases.

    It is 0 if it is not significant, or if fewer than 5 cases have times that vary. ``series`` are
    the logarithms of the times of each case, oldest run first.
    """
    squares = [[_mean_square_difference(logs[None], lag)[0] for lag in (1, 2)] for logs in series]
    first, second = np.array(squares).reshape(-1, 2).T
    is_varying = first > 0
    if is_varying.sum() < MIN_POOLED_SERIES:
        return 0.0
    weights = is_varying / np.maximum(first + second, MIN_VARIANCE)
    rho = float((second * weights).sum() / (first * weights).sum()) - 1
    lengths = np.array([len(logs) for logs in series])
    standard_error = 1 / math.sqrt((lengths[is_varying] - 2).sum())
    return min(rho, 0.95) if rho > 3 * standard_error else 0.0


def _estimate_prior(variances: Array, df: float) -> tuple[float, float]:
    """Return (prior variance, its degrees of freedom).

    The prior variance is the variance between runs that is expected of any case. Its degrees of
    freedom are its weight relative to the measured variance of a case. ``variances`` has the
    measured variance of each case, estimated with ``df`` degrees of freedom.
    """
    logs = np.log(variances)
    prior = math.exp(float(logs.mean()) + 1 / df + 1 / (3 * df**2))
    excess = float(logs.var(ddof=1)) - (2 / df + 2 / df**2)
    if excess <= 0:
        return prior, MAX_PRIOR_DF
    return prior, min((1 + math.sqrt(1 + 2 * excess)) / excess, MAX_PRIOR_DF)


def _mean_square_difference(logs: Array, lag: int) -> Array:
    """Return the mean square of the differences between runs ``lag`` apart, one for each case.

    ``logs`` are the logarithms of the times, of shape (cases, runs). Differences of more than 3
    standard deviations are left out. The standard deviation is estimated from the third quartile of
    the absolute differences.
    """
    differences = np.abs(logs[:, lag:] - logs[:, :-lag])
    limits = 3 * np.quantile(differences, 0.75, axis=1, keepdims=True) / NORMAL_QUARTILE
    return np.asarray(np.mean(differences**2, axis=1, where=differences <= limits))
