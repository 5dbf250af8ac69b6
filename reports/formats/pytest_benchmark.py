"""A run in the JSON of pytest-benchmark, for its command ``compare`` and tools that read it."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from parbench.bench.files import encode_json
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.run_data import RunData

VERSION = "5.3.1"
"""The version of pytest-benchmark with this format."""
_COMMIT = {
    "id": "unversioned",
    "dirty": False,
    "project": "parbench",
    "branch": None,
    "time": None,
}


def render_report(data: RunData) -> bytes:
    """Return every measured case as a benchmark, whose rounds are the iterations."""
    info = data.run.info
    benchmarks = []
    for result in data.results:
        if result.status in ("ok", "skipped"):
            seconds = [value for record in result.measured for value in record.samples.values]
            if seconds:
                benchmarks.append(_make_benchmark(result, seconds))
    report = {
        "machine_info": {"node": info.host, "parbench": info.environment or {}},
        "commit_info": _COMMIT,
        "benchmarks": benchmarks,
        "datetime": info.started,
        "version": VERSION,
    }
    return encode_json(report)


def _make_benchmark(result: CaseResult, seconds: Sequence[float]) -> dict[str, Any]:
    case = result.case
    metrics = {name: metric.value for name, metric in result.metrics.items()}
    extra_info = {
        "world": msgspec.to_builtins(result.world),
        "repetitions": result.repetitions,
        "metrics": {name: value for name, value in metrics.items() if _is_finite(value)},
        "details": result.details,
        "notes": list(result.notes),
    }
    return {
        "group": case.name,
        "name": case.label,
        "fullname": f"parbench::{case.label}",
        "params": case.params or None,
        "param": " ".join(f"{name}={value}" for name, value in case.params.items()) or None,
        "extra_info": extra_info,
        "options": {"timer": "parbench", "rounds": len(seconds)},
        "stats": compute_stats(seconds),
    }


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def compute_stats(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the statistics of rounds by the definitions of pytest-benchmark."""
    import numpy as np

    ordered = sorted(seconds)
    total, mean = sum(seconds), statistics.mean(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0
    q1, q3 = np.quantile(ordered, (0.25, 0.75), method="hazen").tolist()
    fence = 1.5 * (q3 - q1)
    inliers = [value for value in ordered if q1 - fence <= value <= q3 + fence]
    iqr_outliers = len(ordered) - len(inliers)
    stddev_outliers = sum(not mean - stddev <= value <= mean + stddev for value in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(ordered),
        "median": statistics.median(ordered),
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": iqr_outliers,
        "stddev_outliers": stddev_outliers,
        "outliers": f"{stddev_outliers};{iqr_outliers}",
        "ld15iqr": inliers[0],
        "hd15iqr": inliers[-1],
        "ops": len(ordered) / total if total else 0,
        "total": total,
        "data": list(seconds),
        "iterations": 1,
    }
