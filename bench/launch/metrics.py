"""From what the ranks saw to the numbers of a record. Pure."""

from collections.abc import Sequence

from bench.launch.messages import Outcome, Work
from bench.results.records import Metric, Noise
from bench.results.stats import MIN_FOR_P99, Estimate, grade, quantile, spread, steadiness, within_launch


def metrics_of(outcome: Outcome) -> dict[str, Metric]:
    """Return the duration, its p99 where there are 100 samples, the rates, and who waited; nothing without samples."""
    if not outcome.seconds:
        return {}
    time = within_launch(outcome.seconds)
    metrics = {outcome.headline: _seconds(time)}
    n = len(outcome.seconds)
    if n >= MIN_FOR_P99:
        metrics[f"{outcome.headline}_p99"] = Metric(
            value=quantile(outcome.seconds, 0.99), unit="s", better="lower", method=f"99th percentile of {n} iterations"
        )
    metrics |= {work.name: _rate(work, time) for work in outcome.work}
    if outcome.issue_seconds:
        waits = [whole - issue for whole, issue in zip(outcome.seconds, outcome.issue_seconds, strict=True)]
        metrics["issue_time"] = _median(outcome.issue_seconds, "until every rank has issued")
        metrics["wait_time"] = _median(waits, "from then to the end")
    metrics["skew"] = _median(outcome.skew_seconds, "last arrival - first")
    if outcome.transfer_seconds:
        metrics["transfer"] = _median(outcome.transfer_seconds, "last exit - last arrival")
    return metrics | outcome.explained


def _seconds(estimate: Estimate, what: str = "") -> Metric:
    method = f"{what}, {estimate.method}" if what else estimate.method
    return Metric(value=estimate.value, unit="s", better="lower", low=estimate.low, high=estimate.high, method=method)


def _median(values: Sequence[float], what: str) -> Metric:
    return _seconds(within_launch(values), what)


def _rate(work: Work, time: Estimate) -> Metric:
    """Return an amount over the time; unknown where nothing is moved, or in no time."""

    def over(seconds: float | None) -> float | None:
        return work.amount / seconds if seconds and work.amount else None

    return Metric(
        value=over(time.value),
        unit=work.unit,
        better="higher",
        low=over(time.high),
        high=over(time.low),
        method=f"{work.amount:.12g} over the {time.method}",
    )


def noise_of(outcome: Outcome) -> Noise | None:
    """Return how far the samples scatter and whether they were steady; None without samples."""
    if not outcome.seconds:
        return None
    scatter = spread(outcome.seconds)
    return Noise(grade=grade(scatter), spread=round(scatter, 4), steady=steadiness(outcome.seconds))
