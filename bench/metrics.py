"""From what the ranks saw to the numbers of a record. Pure."""

from bench.messages import Outcome
from bench.records import Metric, Noise
from bench.stats import MIN_FOR_P99, grade, quantile, spread, steadiness, within_launch


def metrics_of(outcome: Outcome) -> dict[str, Metric]:
    """Return the duration, its p99 where there are 100 samples, the rates, and the skew; nothing without samples."""
    if not outcome.seconds:
        return {}
    time = within_launch(outcome.seconds)
    metrics = {
        outcome.headline: Metric(
            value=time.value, unit="s", better="lower", low=time.low, high=time.high, method=time.method
        )
    }
    n = len(outcome.seconds)
    if n >= MIN_FOR_P99:
        metrics[f"{outcome.headline}_p99"] = Metric(
            value=quantile(outcome.seconds, 0.99), unit="s", better="lower", method=f"99th percentile of {n} iterations"
        )
    for work in outcome.work:
        metrics[work.name] = Metric(
            value=work.amount / time.value if time.value else None,
            unit=work.unit,
            better="higher",
            low=work.amount / time.high if time.high else None,
            high=work.amount / time.low if time.low else None,
            method=f"{work.amount:.12g} over the {time.method}",
        )
    skew = within_launch(outcome.skew_seconds)
    metrics["skew"] = Metric(
        value=skew.value,
        unit="s",
        better="lower",
        low=skew.low,
        high=skew.high,
        method=f"last arrival - first, {skew.method}",
    )
    return metrics


def noise_of(outcome: Outcome) -> Noise | None:
    """Return how far the samples scatter and whether they were steady; None without samples."""
    if not outcome.seconds:
        return None
    scatter = spread(outcome.seconds)
    return Noise(grade=grade(scatter), spread=round(scatter, 4), steady=steadiness(outcome.seconds))
