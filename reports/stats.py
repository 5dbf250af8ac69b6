"""Statistics of effects: how much a time differs between two sides, and how certain that is.

All functions take one value per repetition, because the repetition is the unit of replication
(Hunold & Carpen-Amarie, arXiv 1505.07734). Times are compared by the difference of their
logarithms, so that a factor of 2 and a factor of 1/2 are equally large.

Repetitions that ran next to each other are paired: a slow drift of the machine changes both values
of a pair alike, so it cancels in their ratio. Two separate runs are not paired, and a drift between
them is part of the effect.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev, variance

from parbench.bench.results.stats import CONFIDENCE, MIN_INTERVAL_REPETITIONS, t_quantile

Repetitions = Mapping[int, float]
"""Positive values, usually seconds, keyed by the number of the repetition."""

LEVEL = 1 - CONFIDENCE
POWER = 0.8
MAX_REPETITIONS = 1000
MIN_VARIANCE = 1e-12  # Values that agree to a millionth are treated as if they varied by that much.
_MAX_LOG = 700.0  # exp() of more overflows.


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The change of a time from base to new, as a fraction: 0.05 means 5 % more time.

    Fields that need an estimate of the variation are None if there are too few repetitions.
    """

    change: float
    num_repetitions: int
    """The number of pairs, or of repetitions of the side that has fewer."""
    is_paired: bool
    low: float | None = None
    high: float | None = None
    """The bounds of the 95 % confidence interval (Student's t on logarithms)."""
    p_value: float | None = None
    """Two-sided, for the hypothesis that the change is at most the minimum effect."""
    detectable: float | None = None
    """The minimum detectable effect: an increase of this size is significant with 80 % power."""
    noise: float | None = None
    """The relative standard deviation of one repetition."""

    @property
    def ratio(self) -> float:
        """The new time divided by the base time."""
        return 1 + self.change

    @property
    def is_significant(self) -> bool:
        """True if the 95 % interval excludes zero. This is not corrected for multiple effects."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0

    def make_cells(self, key: str) -> dict[str, float | None]:
        """Return the ratio and its interval as the cells of a column of a table."""
        return {
            key: self.ratio,
            f"{key}_low": None if self.low is None else 1 + self.low,
            f"{key}_high": None if self.high is None else 1 + self.high,
        }

    def is_within(self, min_effect: float) -> bool:
        """Return True if the 95 % interval excludes changes of the minimum effect and larger ones.

        The limits are symmetric for ratios: 1 + min_effect and 1 / (1 + min_effect).
        """
        if self.low is None or self.high is None:
            return False
        return self.high < min_effect and 1 + self.low > 1 / (1 + min_effect)


def estimate_paired_effect(
    base: Repetitions, new: Repetitions, *, min_effect: float = 0.0, level: float = LEVEL
) -> Effect | None:
    """Estimate the change of a time from repetitions that are paired by their numbers.

    This is Student's t for the mean of the log ratios. ``level`` is the significance level for
    which the minimum detectable effect holds. None if the sides share no repetition.
    """
    ratios = [math.log(new[number] / base[number]) for number in base if number in new]
    if not ratios:
        return None
    n = len(ratios)
    if n < MIN_INTERVAL_REPETITIONS:
        return Effect(change=_to_fraction(fmean(ratios)), num_repetitions=n, is_paired=True)
    ratio_variance = variance(ratios) + MIN_VARIANCE
    return _build_effect(
        difference=fmean(ratios),
        error=math.sqrt(ratio_variance / n),
        df=n - 1,
        noise=math.sqrt(ratio_variance / 2),
        num_repetitions=n,
        is_paired=True,
        min_effect=min_effect,
        level=level,
    )


def estimate_unpaired_effect(
    base: Repetitions, new: Repetitions, *, min_effect: float = 0.0, level: float = LEVEL
) -> Effect | None:
    """Estimate the change of a time between independent repetitions of two runs.

    This is Welch's t-test on logarithms (Welch, Biometrika 1947). ``level`` is the significance
    level for which the minimum detectable effect holds. None if a side has no repetition.
    """
    if not base or not new:
        return None
    base_logs = [math.log(value) for value in base.values()]
    new_logs = [math.log(value) for value in new.values()]
    difference = fmean(new_logs) - fmean(base_logs)
    n = min(len(base), len(new))
    if n < MIN_INTERVAL_REPETITIONS:
        return Effect(change=_to_fraction(difference), num_repetitions=n, is_paired=False)
    base_variance = variance(base_logs) + MIN_VARIANCE
    new_variance = variance(new_logs) + MIN_VARIANCE
    base_square = base_variance / len(base)
    new_square = new_variance / len(new)
    square = base_square + new_square
    df = square**2 / (base_square**2 / (len(base) - 1) + new_square**2 / (len(new) - 1))
    return _build_effect(
        difference=difference,
        error=math.sqrt(square),
        df=df,
        noise=math.sqrt((base_variance + new_variance) / 2),
        num_repetitions=n,
        is_paired=False,
        min_effect=min_effect,
        level=level,
    )


def _build_effect(
    *,
    difference: float,
    error: float,
    df: float,
    noise: float,
    num_repetitions: int,
    is_paired: bool,
    min_effect: float,
    level: float,
) -> Effect:
    """Build an effect from a difference of logarithms and its standard error."""
    from scipy.special import stdtr  # type: ignore[import-untyped]

    half_width = t_quantile(0.5 + CONFIDENCE / 2, df) * error
    excess = abs(difference) - math.log1p(min_effect)
    return Effect(
        change=_to_fraction(difference),
        num_repetitions=num_repetitions,
        is_paired=is_paired,
        low=_to_fraction(difference - half_width),
        high=_to_fraction(difference + half_width),
        p_value=min(1.0, 2 * float(stdtr(df, -excess / error))),
        detectable=compute_detectable_effect(error, df, min_effect=min_effect, level=level),
        noise=_to_fraction(noise),
    )


def compute_detectable_effect(
    error: float, df: float, *, min_effect: float = 0.0, level: float = LEVEL
) -> float:
    """Return the minimum detectable effect at 80 % power, as a fraction.

    It is a multiple of the standard error ``error`` of the log ratio (Bloom, Evaluation Review
    1995) beyond the minimum effect.
    """
    multiple = t_quantile(1 - level / 2, df) + t_quantile(POWER, df)
    return _to_fraction(math.log1p(min_effect) + multiple * error)


def compute_required_repetitions(
    noise: float, effect: float, *, level: float = LEVEL
) -> int | None:
    """Return the number of pairs with which an effect is detectable at 80 % power.

    ``noise`` is the relative standard deviation of one repetition. The result is None if more than
    MAX_REPETITIONS are required.
    """
    for n in range(MIN_INTERVAL_REPETITIONS, MAX_REPETITIONS + 1):
        error = math.log1p(noise) * math.sqrt(2 / n)
        if compute_detectable_effect(error, n - 1, level=level) <= effect:
            return n
    return None


def compute_log_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of two or more positive values.

    It is corrected for the bias of small samples (Gurland & Tripathi, The American Statistician
    1971).
    """
    correction = 1 + 1 / (4 * (len(values) - 1))
    return stdev(map(math.log, values)) * correction


def compute_overall_times(
    base: Sequence[Repetitions], new: Sequence[Repetitions]
) -> tuple[Repetitions, Repetitions]:
    """Return the times of the median series relative to base, keyed by repetition, for both sides.

    Each series is divided by its geometric mean in base. The median over series is robust: a few
    series that change a lot do not move it.
    """
    sides: list[dict[int, list[float]]] = [{}, {}]
    for base_times, new_times in zip(base, new, strict=True):
        mean_log = fmean(math.log(value) for value in base_times.values())
        for logs, times in zip(sides, (base_times, new_times), strict=True):
            for number, value in times.items():
                logs.setdefault(number, []).append(math.log(value) - mean_log)
    base_overall, new_overall = (
        {number: math.exp(median(values)) for number, values in sorted(logs.items())}
        for logs in sides
    )
    return base_overall, new_overall


def select_discoveries(p_values: Sequence[float | None], rate: float = LEVEL) -> list[bool]:
    """Return True for each hypothesis that is rejected at a false discovery rate.

    This is the procedure of Benjamini & Hochberg (JRSS B 1995). A p-value of None belongs to a
    hypothesis that was not tested.
    """
    tested = sorted(p_value for p_value in p_values if p_value is not None)
    max_rejected = -1.0
    for rank, p_value in enumerate(tested, start=1):
        if p_value <= rate * rank / len(tested):
            max_rejected = p_value
    return [p_value is not None and p_value <= max_rejected for p_value in p_values]


def _to_fraction(log_ratio: float) -> float:
    """Return the relative change for a difference of logarithms. Huge differences are clipped."""
    return math.expm1(min(log_ratio, _MAX_LOG))
