"""The variation of a series between runs.

Model: the logarithm of the time of a run is a level plus noise. Noise is normal and has variance v.
Consecutive runs correlate by rho (AR(1)), which all series share.

1. Outliers are clipped at 3 standard deviations from the median of 7 neighboring runs.
2. The mean squares of differences of runs one and two apart are 2 v (1 - rho) and 2 v (1 - rho^2),
   except at steps, which are excluded. Their ratio is 1 + rho, pooled over series (Chakar et al.,
   Bernoulli 2017). They have 2/3 of the degrees of freedom of n - 1 independent runs (von Neumann
   et al. 1941).
3. Variances shrink toward their common prior (Smyth, Stat. Appl. Genet. Mol. Biol. 2004). Its
   weight follows from the variation of their logarithms. The digamma and trigamma functions of x
   are approximated by log x - 1 / (2 x) - 1 / (12 x^2) and 1 / x + 1 / (2 x^2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]
MIN_POOLED_SERIES = 5  # Fewer series do not estimate how runs vary in general.
MIN_POOLED_RUNS = 4
MAX_PRIOR_DF = 40.0
MIN_VARIANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class RunNoise:
    """The variance of one run, its degrees of freedom, and the correlation with the next run."""

    variance: float
    df: float
    rho: float = 0.0

    def compute_variance(self, weights: Logs) -> float:
        """Return the variance of the weighted sum of consecutive runs."""
        lags = np.abs(np.arange(1 - len(weights), len(weights)))
        products = np.correlate(weights, weights, mode="full")
        return self.variance * float(products @ self.rho**lags)

    def compute_variance_of_mean(self, n: int) -> float:
        """Return the variance of the mean of ``n`` runs (Bartlett 1946)."""
        return self.compute_variance(np.full(n, 1 / n))


def estimate_noise(series: Sequence[Logs]) -> list[RunNoise]:
    """Estimate the noise of each series from the logarithms of its times.

    Differences of runs beyond 3 standard deviations are excluded.
    """
    clipped = [clip_outliers(logs) for logs in series]
    squares = [[_mean_square_difference(logs, lag) for lag in (1, 2)] for logs in clipped]
    first, second = np.array(squares).reshape(-1, 2).T
    lengths = np.array([len(logs) for logs in series])
    dfs = np.maximum(2 / 3 * (lengths - 1), 1.0)
    is_pooled = (first > 0) & (lengths >= MIN_POOLED_RUNS)
    rho, prior, prior_df = 0.0, 0.0, 0.0
    if is_pooled.sum() >= MIN_POOLED_SERIES:
        weights = is_pooled / np.maximum(first + second, MIN_VARIANCE)
        rho = float((second * weights).sum() / (first * weights).sum()) - 1
        standard_error = 1 / math.sqrt((lengths[is_pooled] - 2).sum())
        rho = min(rho, 0.95) if rho > 3 * standard_error else 0.0
        variances = first[is_pooled] / 2 / (1 - rho)
        prior, prior_df = _estimate_prior(variances, float(dfs[is_pooled].mean()))
    variances = (dfs * first / 2 / (1 - rho) + prior_df * prior) / (dfs + prior_df)
    return [
        RunNoise(variance=max(float(variance), MIN_VARIANCE), df=float(df) + prior_df, rho=rho)
        for variance, df in zip(variances, dfs, strict=True)
    ]


def _estimate_prior(variances: Logs, df: float) -> tuple[float, float]:
    """Return the prior variance and its degrees of freedom.

    Each of ``variances`` has ``df`` degrees of freedom.
    """
    logs = np.log(variances)
    prior = math.exp(float(logs.mean()) + 1 / df + 1 / (3 * df**2))
    excess = float(logs.var(ddof=1)) - (2 / df + 2 / df**2)
    if excess <= 0:
        return prior, MAX_PRIOR_DF
    return prior, min((1 + math.sqrt(1 + 2 * excess)) / excess, MAX_PRIOR_DF)


def _mean_square_difference(logs: Logs, lag: int) -> float:
    """Return the mean square difference of runs ``lag`` apart without outliers, 0 without pairs."""
    differences = np.abs(logs[lag:] - logs[:-lag])
    if not len(differences):
        return 0.0
    limit = 3 * _estimate_deviation(differences)
    return float(np.mean(differences[differences <= limit] ** 2))


def clip_outliers(logs: Logs) -> Logs:
    """Clip values to 3 standard deviations from the median of 7 neighboring runs."""
    if len(logs) < MIN_POOLED_RUNS:
        return logs
    padded = np.pad(logs, 3, mode="reflect")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7), axis=1)
    limit = 3 * max(_estimate_deviation(logs - medians), math.sqrt(MIN_VARIANCE))
    return np.asarray(medians + (logs - medians).clip(-limit, limit))


def _estimate_deviation(values: Logs) -> float:
    """Return the standard deviation of a normal distribution with mean 0.

    The third quartile of the distribution's absolute values equals that of ``values``.
    """
    return float(np.quantile(np.abs(values), 0.75)) / NormalDist().inv_cdf(0.875)
