"""A run as CSV, as Bencher's metrics and for github-action-benchmark."""

from collections.abc import Iterator
from typing import Any

from parbench.bench.files import encode_json
from parbench.bench.results.metrics import MetricValue
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.record_frames import build_metrics_frame
from parbench.reports.run_data import RunData
from parbench.reports.sweeps import find_point

NANOSECONDS = 1e9
ACTION_FILES = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}
"""The files of github-action-benchmark, by the better direction of their metrics."""


def render_csv(data: RunData) -> bytes:
    """Return a row for each metric of each repetition, as ``parbench.load`` does."""
    point = find_point(data.run.path)
    frame = build_metrics_frame([(data.run, point.name if point else None)])
    return frame.to_csv(index=False).encode(errors="replace")


def render_action(data: RunData) -> dict[str, bytes]:
    """Return both files of github-action-benchmark: the time of each case, and its rates."""
    entries: dict[str, list[dict[str, Any]]] = {name: [] for name in ACTION_FILES.values()}
    for result in data.results:
        world = f"{result.world.size} ranks, {result.world.backend}, {result.world.device}"
        for name, metric in _list_time_and_rates(result):
            entry = {
                "name": f"{result.case.label} {name}",
                "unit": metric.unit or "ratio",
                "value": metric.value,
                "extra": f"{world}\n{result.repetitions} repetitions\n{metric.method}",
            }
            if metric.low is not None and metric.high is not None:
                entry["range"] = f"{metric.low:.6g} to {metric.high:.6g}"
            entries[ACTION_FILES[metric.better or "lower"]].append(entry)
    return {name: encode_json(file_entries) for name, file_entries in entries.items()}


def render_bencher(data: RunData) -> bytes:
    """Return the time of each case as ``latency`` in nanoseconds, and its rates."""
    cases: dict[str, dict[str, dict[str, float]]] = {}
    for result in data.results:
        for name, metric in _list_time_and_rates(result):
            is_time = name == result.headline
            factor = NANOSECONDS if is_time else 1.0
            limits = {"value": metric.value, "lower_value": metric.low, "upper_value": metric.high}
            measures = cases.setdefault(result.case.label, {})
            measures["latency" if is_time else name] = {
                limit: value * factor for limit, value in limits.items() if value is not None
            }
    return encode_json(cases)


def _list_time_and_rates(result: CaseResult) -> Iterator[tuple[str, MetricValue]]:
    """Yield the known metrics that other tools compare."""
    for name, metric in result.metrics.items():
        if metric.value is not None and (name == result.headline or metric.better == "higher"):
            yield name, metric
