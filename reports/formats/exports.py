"""A run as other tools read it: pytest-benchmark, Bencher and github-action-benchmark."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from parbench.bench.files import encode_json
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.runs import Run
from parbench.reports.analysis.frame import metrics_frame
from parbench.reports.analysis.several import point_of
from parbench.reports.analysis.summary import Row, common_details, summarize
from parbench.reports.formats import chrome_trace, nccl_tests

# by a metric's better direction, for customSmallerIsBetter and customBiggerIsBetter
FILES = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}


def _compared(row: Row) -> Iterator[tuple[str, MetricValue]]:
    """Yield a row's time and its rates, as far as they are known."""
    for name, metric in row.metrics.items():
        if metric.value is not None and (name == row.headline or metric.better == "higher"):
            yield name, metric


def render_action(run: Run) -> dict[str, bytes]:
    """Return both files of github-action-benchmark: the time of each case, and its rates."""
    found = {better: list[dict[str, Any]]() for better in FILES}
    for row in summarize(run).rows:
        world = f"{row.world.size} ranks, {row.world.backend}, {row.world.device}\n{row.repetitions} repetitions"
        for name, metric in _compared(row):
            known = metric.low is not None and metric.high is not None
            entry = {
                "name": f"{row.case.label} {name}",
                "unit": metric.unit or "ratio",
                "value": metric.value,
            }
            entry |= {"range": f"{metric.low:.6g} to {metric.high:.6g}"} if known else {}
            if metric.better:
                found[metric.better].append({**entry, "extra": f"{world}\n{metric.method}"})
    return {FILES[better]: encode_json(entries) for better, entries in found.items()}


def render_bencher(run: Run) -> bytes:
    """Return every case in the Bencher Metric Format: its time as ``latency`` in nanoseconds, and its rates."""
    whole: dict[str, dict[str, dict[str, float]]] = {}
    for row in summarize(run).rows:
        measures = {}
        for name, metric in _compared(row):
            measure, scale = ("latency", 1e9) if name == row.headline else (name, 1.0)
            limits = {"value": metric.value, "lower_value": metric.low, "upper_value": metric.high}
            measures[measure] = {
                limit: value * scale for limit, value in limits.items() if value is not None
            }
        whole |= {row.case.label: measures} if measures else {}
    return encode_json(whole)


def render_pytest(run: Run) -> bytes:
    """Return every measured case as a benchmark of one iteration a round, its data the samples of all repetitions."""
    commit = {
        "id": "unversioned",
        "dirty": False,
        "project": "parbench",
        "branch": None,
        "time": None,
    }
    about = {
        "machine_info": {"node": run.info.host, "parbench": run.info.environment or {}},
        "commit_info": commit,
    }
    benchmarks = [_benchmark(row, data) for row in summarize(run).rows if (data := samples(row))]
    # the version is pytest-benchmark's, whose format this is
    return encode_json(
        {**about, "benchmarks": benchmarks, "datetime": run.info.started, "version": "5.3.1"}
    )


def samples(row: Row) -> tuple[float, ...]:
    """Return the seconds of every iteration of every repetition; none of a result that was wrong."""
    records = row.measured if row.status in ("ok", "skipped") else ()
    return tuple(value for record in records for value in record.samples.values)


def _benchmark(row: Row, data: Sequence[float]) -> dict[str, Any]:
    label = row.case.label
    known = {
        name: one.value
        for name, one in row.metrics.items()
        if one.value is not None and math.isfinite(one.value)
    }
    named = {"group": row.case.name, "name": label, "fullname": f"parbench::{label}"}
    param = " ".join(f"{name}={value}" for name, value in row.case.params.items()) or None
    extra = {
        "world": msgspec.to_builtins(row.world),
        "repetitions": row.repetitions,
        "metrics": known,
    }
    extra |= {"details": common_details(row), "notes": list(row.notes)}
    told = {"params": row.case.params or None, "param": param, "extra_info": extra}
    return {
        **named,
        **told,
        "options": {"timer": "parbench", "rounds": len(data)},
        "stats": stats_of(data),
    }


def stats_of(data: Sequence[float]) -> dict[str, Any]:
    """Return what pytest-benchmark says of durations in seconds, by its own definitions."""
    import numpy as np

    ordered = sorted(data)
    total, mean = sum(data), statistics.mean(data)
    stddev = statistics.stdev(data) if len(data) > 1 else 0
    q1, q3 = np.quantile(ordered, (0.25, 0.75), method="hazen").tolist()
    reach = 1.5 * (q3 - q1)
    beyond = sum(not mean - stddev <= value <= mean + stddev for value in data)
    inside = [value for value in ordered if q1 - reach <= value <= q3 + reach]
    outliers = len(data) - len(inside)
    moments = {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(data),
    }
    quartiles = {"median": statistics.median(ordered), "iqr": q3 - q1, "q1": q1, "q3": q3}
    counts = {
        "iqr_outliers": outliers,
        "stddev_outliers": beyond,
        "outliers": f"{beyond};{outliers}",
    }
    whiskers = {"ld15iqr": inside[0], "hd15iqr": inside[-1]}
    sums = {
        "ops": len(data) / total if total else 0,
        "total": total,
        "data": list(data),
        "iterations": 1,
    }
    return {**moments, **quartiles, **counts, **whiskers, **sums}


def render_csv(run: Run) -> bytes:
    """Return a row for each metric of each repetition, as ``parbench.load`` does."""
    point = point_of(run.path)
    frame = metrics_frame([(run, point.name if point else None)])
    return frame.to_csv(index=False).encode(errors="replace")


FORMATS: Mapping[str, Callable[[Run], bytes]] = {
    "nccl-tests": lambda run: nccl_tests.render_text(run).encode(errors="replace"),
    "csv": render_csv,
    "chrome-trace": chrome_trace.render_trace,
    "pytest-benchmark": render_pytest,
    "bencher": render_bencher,
}
FOLDERS: Mapping[str, Callable[[Run], Mapping[str, bytes]]] = {  # several files
    "chrome-trace": chrome_trace.render_traces,
    "hta": chrome_trace.render_for_analysis,
    "github-action-benchmark": render_action,
}
