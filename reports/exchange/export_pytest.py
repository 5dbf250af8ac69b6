"""A run as the JSON of pytest-benchmark, which ``pytest-benchmark compare`` and ``--benchmark-compare`` read."""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.results.runs import Run
from reports.summary import Row, common_details, summarize

VERSION = "5.3.1"
"""The pytest-benchmark whose format this is."""


def render_pytest(run: Run) -> bytes:
    """Return every measured case as a benchmark of one iteration a round, its data the samples of all launches."""
    environment = run.info.environment or {}
    whole = {
        "machine_info": {"node": run.info.host, "parbench": environment},
        "commit_info": {"id": "unversioned", "dirty": False, "project": "parbench", "branch": None, "time": None},
        "benchmarks": [_benchmark(row) for row in summarize(run).rows if samples(row)],
        "datetime": run.info.started,
        "version": VERSION,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def samples(row: Row) -> tuple[float, ...]:
    """Return the seconds of every iteration of every launch; none of a result that was wrong."""
    if row.status not in ("ok", "skipped"):
        return ()
    return tuple(value for record in row.measured for value in record.samples.values)


def stats_of(data: Sequence[float]) -> dict[str, Any]:
    """Return what pytest-benchmark says of durations in seconds, by its own definitions."""
    ordered = sorted(data)
    total, mean = sum(data), statistics.mean(data)
    stddev = statistics.stdev(data) if len(data) > 1 else 0
    q1, q3 = _quartiles(ordered)
    reach = 1.5 * (q3 - q1)
    beyond = sum(not mean - stddev <= value <= mean + stddev for value in data)
    outliers = sum(not q1 - reach <= value <= q3 + reach for value in data)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(data),
        "median": statistics.median(ordered),
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": outliers,
        "stddev_outliers": beyond,
        "outliers": f"{beyond};{outliers}",
        "ld15iqr": ordered[bisect_left(ordered, q1 - reach)],
        "hd15iqr": ordered[bisect_right(ordered, q3 + reach) - 1],
        "ops": len(data) / total if total else 0,
        "total": total,
        "data": list(data),
        "iterations": 1,
    }


def extra_info(row: Row) -> dict[str, Any]:
    """Return what a duration does not tell: the world, the other metrics' values, the details."""
    metrics = {name: metric.value for name, metric in row.metrics.items() if _finite(metric.value)}
    return {
        "world": msgspec.to_builtins(row.world),
        "launches": row.launches,
        "metrics": metrics,
        "details": common_details(row),
        "notes": list(row.notes),
    }


def _benchmark(row: Row) -> dict[str, Any]:
    label = row.case.label
    return {
        "group": row.case.name,
        "name": label,
        "fullname": f"parbench::{label}",
        "params": row.case.params or None,
        "param": " ".join(f"{name}={value}" for name, value in row.case.params.items()) or None,
        "extra_info": extra_info(row),
        "options": {"timer": "parbench", "rounds": len(samples(row))},
        "stats": stats_of(samples(row)),
    }


def _quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    """Return both quartiles: medians of the halves, or for an odd count the nearest two values, weighted."""
    rounds = len(ordered)
    if rounds == 1:
        return ordered[0], ordered[0]
    if rounds % 2 == 0:
        return statistics.median(ordered[: rounds // 2]), statistics.median(ordered[rounds // 2 :])
    n = rounds // 4
    if rounds % 4 == 1:
        return (
            0.25 * ordered[n - 1] + 0.75 * ordered[n],
            0.75 * ordered[3 * n] + 0.25 * ordered[3 * n + 1],
        )
    return (
        0.75 * ordered[n] + 0.25 * ordered[n + 1],
        0.25 * ordered[3 * n + 1] + 0.75 * ordered[3 * n + 2],
    )


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
