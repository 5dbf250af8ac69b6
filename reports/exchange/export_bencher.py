"""A run in the Bencher Metric Format: by case its measures, each a value with the limits of its interval."""

import msgspec

from bench.results.metrics import MetricValue
from bench.results.runs import Run
from reports.summary import summarize

_NANOSECONDS = 1e9


def render_bencher(run: Run) -> bytes:
    """Return every measured case: its time as Bencher's ``latency`` in nanoseconds, and its rates by their names."""
    whole = {}
    for row in summarize(run).rows:
        measures = {}
        for name, metric in row.metrics.items():
            if metric.value is None:
                continue
            if name == row.headline:
                measures["latency"] = _measure(metric, _NANOSECONDS)
            elif metric.better == "higher":
                measures[name] = _measure(metric, 1.0)
        if measures:
            whole[row.case.label] = measures
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _measure(metric: MetricValue, scale: float) -> dict[str, float]:
    limits = {"value": metric.value, "lower_value": metric.low, "upper_value": metric.high}
    return {name: value * scale for name, value in limits.items() if value is not None}
