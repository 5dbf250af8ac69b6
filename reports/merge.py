"""One number out of several launches'. The launch is the unit of replication, so launches weigh the same."""

from collections.abc import Mapping, Sequence

from bench.results.metrics import MetricValue
from bench.results.stats import across_launches, median


def merge_metrics(launches: Sequence[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """Return each metric over the launches that have it, in the order in which they first appear."""
    names = dict.fromkeys(name for metrics in launches for name in metrics)
    return {name: _merge(name, [metrics[name] for metrics in launches if name in metrics]) for name in names}


def _merge(name: str, metrics: Sequence[MetricValue]) -> MetricValue:
    """Return the geometric mean with its interval; the median alone where a logarithm does not exist."""
    first = metrics[0]
    if len(metrics) == 1:
        return first
    if all(metric == first and metric.low is None for metric in metrics):
        return first  # a closed form or a count: it does not scatter
    known = [metric.value for metric in metrics if metric.value is not None]
    if not known:
        return MetricValue(
            value=None, unit=first.unit, better=first.better, method=f"unknown in all {len(metrics)} launches"
        )
    if len(known) < len(metrics) or min(known) <= 0:
        method = f"median of {len(known)} of {len(metrics)} launches; no interval, as some are zero or unknown"
        return MetricValue(value=median(known), unit=first.unit, better=first.better, method=method)
    estimate = across_launches(known)
    return MetricValue(
        value=estimate.value,
        unit=first.unit,
        better=first.better,
        low=estimate.low,
        high=estimate.high,
        # what a launch gives is its median, except for a percentile
        method=estimate.method.replace("medians", "99th percentiles") if name.endswith("_p99") else estimate.method,
    )
