"""A run for github-action-benchmark: two files, as its direction is that of a whole file."""

from typing import Any

import msgspec

from bench.results.metrics import MetricValue
from bench.results.runs import Run
from reports.summary import Row, summarize

FILES = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}
"""By a metric's better direction the file for ``customSmallerIsBetter`` and ``customBiggerIsBetter``."""


def render_action(run: Run) -> dict[str, bytes]:
    """Return both files: the time of each case, and its rates."""
    rows = summarize(run).rows
    return {
        name: msgspec.json.format(msgspec.json.encode(_entries(rows, better)), indent=1) + b"\n"
        for better, name in FILES.items()
    }


def _entries(rows: tuple[Row, ...], better: str) -> list[dict[str, Any]]:
    chosen = [(row, name, metric) for row in rows for name, metric in row.metrics.items() if metric.better == better]
    return [
        _entry(row, name, metric)
        for row, name, metric in chosen
        if metric.value is not None and (name == row.headline or better == "higher")
    ]


def _entry(row: Row, name: str, metric: MetricValue) -> dict[str, Any]:
    reach = "" if metric.low is None or metric.high is None else f"{metric.low:.6g} to {metric.high:.6g}"
    extra = f"{row.world.size} ranks, {row.world.backend}, {row.world.device}\n{row.launches} launches\n{metric.method}"
    return {
        "name": f"{row.case.label} {name}",
        "unit": metric.unit or "ratio",
        "value": metric.value,
        **({"range": reach} if reach else {}),
        "extra": extra,
    }
