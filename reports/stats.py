"""Statistics of effects: the change of a time between two sides, and its uncertainty.

The two sides are two cases of a run or two runs, called base and new. All functions take one value
per repetition, because the repetition is the unit of replication (Hunold & Carpen-Amarie, arXiv
1505.07734). Times are compared by the difference of their logarithms, so that a factor of 2 and a
factor of 1/2 are equally large.

Repetitions that ran next to each other are paired: a slow drift of the machine changes both values
of a pair alike, so it cancels in their ratio. Two separate runs are not paired, and a drift between
them is part of the effect.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from parbench.bench.results.stats import CONFIDENCE, MIN_INTERVAL_REPETITIONS, t_quantile

Repetitions = Mapping[int, float]
"""A positive value for each repetition, usually seconds, keyed by repetition index."""

LEVEL = 1 - CONFIDENCE
"""The significance level and false discovery rate, 0.05."""
POWER = 0.8
"""The power for which a minimum detectable effect is computed."""
MIN_VARIANCE = 1e-12  # Values that agree to a millionth are treated as if they varied by that much.
_MAX_LOG = 700.0  # exp() of more overflows.


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The relative change of a time from base to new, with its uncertainty.

    Changes are fractions: 0.05 means 5 % more time. With fewer than three repetitions, all fields
    except ``change`` and ``num_repetitions`` are None.
    """

    change: float
    """The geometric mean over repetitions of new time over base time, minus 1."""
    num_repetitions: int
    """The number of paired repetitions, or of repetitions of the side that has fewer."""
    low: float | None = None
    """The lower bound of the 95 % confidence interval of the change (Student's t on logarithms)."""
    high: float | None = None
    """The upper bound of the 95 % confidence interval of the change."""
    p_value: float | None = None
    """The two-sided p-value of the hypothesis that the change in either direction is negligible.

    A change is negligible up to the minimum effect with which the effect was estimated.
    """
    detectable: float | None = None
    """The minimum detectable effect (Bloom, Evaluation Review 1995), as a fraction.

    An increase of the time by more than this is significant in 80 % of comparisons.
    """

    @property
    def ratio(self) -> float:
        """The new time divided by the base time."""
        return 1 + self.change

    def make_cells(self, key: str) -> dict[str, float | None]:
        """Return the ratio of new to base time and its 95 % interval as cells of a table row.

        The cells are keyed by ``key``, ``key_low`` and ``key_high``, where ``key`` is the argument.
        Unknown bounds are None.
        """
        return {
            key: self.ratio,
            f"{key}_low": None if self.low is None else 1 + self.low,
            f"{key}_high": None if self.high is None else 1 + self.high,
        }

    def is_within(self, min_effect: float) -> bool:
        """Return True if the 95 % interval excludes changes of at least the minimum effect.

        ``min_effect`` is a fraction. The limits are symmetric for ratios: 1 + min_effect and 1 / (1
        + min_effect). False without an interval.
        """
        if self.low is None or self.high is None:
            return False
        return self.high < min_effect and 1 + self.low > 1 / (1 + min_effect)


def estimate_paired_effect(
    base: Repetitions, new: Repetitions, *, min_effect: float = 0.0, level: float = LEVEL
) -> Effect | None:
    """Estimate the change of a time from repetitions that are paired by their index.

    ``base`` and ``new`` are seconds, keyed by repetition index. The test is Student's t for the
    mean of the log ratios. ``min_effect`` is the change, as a fraction, that the hypothesis allows.
    ``level`` is the significance level of the minimum detectable effect. None if the sides share no
    repetition. Fewer than three pairs give a change without an interval.
    """
    ratios = [math.log(new[number] / base[number]) for number in base if number in new]
    if not ratios:
        return None
    return _build_effect(fmean(ratios), [ratios], min_effect, level)


def estimate_unpaired_effect(
    base: Repetitions, new: Repetitions, *, min_effect: float = 0.0, level: float = LEVEL
) -> Effect | None:
    """Estimate the change of a time between independent repetitions of two runs.

    ``base`` and ``new`` are seconds, keyed by repetition index. This is Welch's t-test on
    logarithms (Welch, Biometrika 1947). ``min_effect`` is the change, as a fraction, that the
    hypothesis allows. ``level`` is the significance level of the minimum detectable effect. None if
    a side has no repetition. Fewer than three repetitions of a side give a change without an
    interval.
    """
    if not base or not new:
        return None
    base_logs = [math.log(value) for value in base.values()]
    new_logs = [math.log(value) for value in new.values()]
    difference = fmean(new_logs) - fmean(base_logs)
    return _build_effect(difference, [base_logs, new_logs], min_effect, level)


def _build_effect(
    difference: float, samples: Sequence[Sequence[float]], min_effect: float, level: float
) -> Effect:
    """Build an effect from a difference of mean logarithms of times: new minus base.

    Args:
        difference: the mean logarithm of the new times minus that of the base times.
        samples: the log ratios of paired repetitions as one sample, or the logarithms of base and
            of new as two samples. The degrees of freedom are those of Welch and Satterthwaite,
            which are n - 1 for one sample.
        min_effect: the change, as a fraction, that the hypothesis allows.
        level: the significance level of the minimum detectable effect.
    """
    from scipy.special import stdtr  # type: ignore[import-untyped]

    sizes = [len(sample) for sample in samples]
    change = _to_fraction(difference)
    if min(sizes) < MIN_INTERVAL_REPETITIONS:
        return Effect(change=change, num_repetitions=min(sizes))
    variances = [variance(sample) + MIN_VARIANCE for sample in samples]
    squares = [value / n for value, n in zip(variances, sizes, strict=True)]
    error = math.sqrt(sum(squares))
    df = error**4 / sum(square**2 / (n - 1) for square, n in zip(squares, sizes, strict=True))
    half_width = t_quantile(0.5 + CONFIDENCE / 2, df) * error
    detectable_excess = (t_quantile(1 - level / 2, df) + t_quantile(POWER, df)) * error
    excess = abs(difference) - math.log1p(min_effect)
    return Effect(
        change=change,
        num_repetitions=min(sizes),
        low=_to_fraction(difference - half_width),
        high=_to_fraction(difference + half_width),
        p_value=min(1.0, 2 * float(stdtr(df, -excess / error))),
        detectable=_to_fraction(math.log1p(min_effect) + detectable_excess),
    )


def compute_log_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of two or more positive values.

    It is corrected for the bias of small samples (Gurland & Tripathi, The American Statistician
    1971).
    """
    correction = 1 + 1 / (4 * (len(values) - 1))
    return stdev(map(math.log, values)) * correction


def select_discoveries(p_values: Sequence[float | None], rate: float = LEVEL) -> list[bool]:
    """Return a flag for each p-value, in order: True if the p-value is significant.

    At most the fraction ``rate`` of the significant effects are expected to be false alarms
    (Benjamini & Hochberg, JRSS B 1995). A p-value of None stands for an effect that was not tested,
    which is never significant.
    """
    tested = sorted(p_value for p_value in p_values if p_value is not None)
    max_rejected = -1.0
    for rank, p_value in enumerate(tested, start=1):
        if p_value <= rate * rank / len(tested):
            max_rejected = p_value
    return [p_value is not None and p_value <= max_rejected for p_value in p_values]


def _to_fraction(log_ratio: float) -> float:
    """Return the relative change for a difference of natural logarithms: 0.05 for log(1.05).

    Differences that would overflow are clipped.
    """
    return math.expm1(min(log_ratio, _MAX_LOG))
