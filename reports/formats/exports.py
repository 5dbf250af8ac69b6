"""A run as other tools read it: pytest-benchmark, Bencher, OpenMetrics and github-action-benchmark."""

import math
import re
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from bench.results.metrics import MetricValue
from bench.results.runs import Run
from reports import cells
from reports.analysis.summary import Row, common_details, summarize

FILES = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}
"""By a metric's better direction the file for ``customSmallerIsBetter`` and ``customBiggerIsBetter``."""


def render_action(run: Run) -> dict[str, bytes]:
    """Return both files of github-action-benchmark: the time of each case, and its rates."""
    rows = summarize(run).rows
    return {
        name: msgspec.json.format(msgspec.json.encode(_action_entries(rows, better)), indent=1) + b"\n"
        for better, name in FILES.items()
    }


def _action_entries(rows: tuple[Row, ...], better: str) -> list[dict[str, Any]]:
    chosen = [(row, name, metric) for row in rows for name, metric in row.metrics.items() if metric.better == better]
    return [
        _action_entry(row, name, metric)
        for row, name, metric in chosen
        if metric.value is not None and (name == row.headline or better == "higher")
    ]


def _action_entry(row: Row, name: str, metric: MetricValue) -> dict[str, Any]:
    reach = "" if metric.low is None or metric.high is None else f"{metric.low:.6g} to {metric.high:.6g}"
    extra = f"{row.world.size} ranks, {row.world.backend}, {row.world.device}\n{row.launches} launches\n{metric.method}"
    return {
        "name": f"{row.case.label} {name}",
        "unit": metric.unit or "ratio",
        "value": metric.value,
        **({"range": reach} if reach else {}),
        "extra": extra,
    }


def render_bencher(run: Run) -> bytes:
    """Return every case in the Bencher Metric Format: its time as ``latency`` in nanoseconds, and its rates."""
    whole = {}
    for row in summarize(run).rows:
        measures = {}
        for name, metric in row.metrics.items():
            if metric.value is None:
                continue
            if name == row.headline:
                measures["latency"] = _bencher_measure(metric, 1e9)
            elif metric.better == "higher":
                measures[name] = _bencher_measure(metric, 1.0)
        if measures:
            whole[row.case.label] = measures
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _bencher_measure(metric: MetricValue, scale: float) -> dict[str, float]:
    limits = {"value": metric.value, "lower_value": metric.low, "upper_value": metric.high}
    return {name: value * scale for name, value in limits.items() if value is not None}


_UNITS = {"s": "seconds", "B": "bytes", "B/s": "bytes_per_second", "": "ratio"}
_Sample = tuple[str, float]
_Families = dict[tuple[str, str], list[_Sample]]


def render_openmetrics(run: Run) -> bytes:
    """Return a gauge for each metric, its interval's limits beside it, and whether each case is fine.

    Values have nine significant digits.
    """
    families: _Families = {}
    for row in summarize(run).rows:
        labels = _labels(row)
        families.setdefault(("parbench_case_ok", ""), []).append((labels, float(row.status == "ok")))
        for name, metric in row.metrics.items():
            for family, value in _values(name, metric):
                families.setdefault((family, _unit(metric)), []).append((labels, value))
    info = _label_set({"run": run.info.id, "host": run.info.host, "parbench": run.info.parbench})
    lines = ["# TYPE parbench_run info", f"parbench_run_info{info} 1"]
    for (family, unit), found in sorted(families.items()):
        lines += [f"# TYPE {family} gauge", *([f"# UNIT {family} {unit}"] if unit else [])]
        lines += [f"{family}{labels} {value:.9g}" for labels, value in found]
    return ("\n".join([*lines, "# EOF"]) + "\n").encode(errors="replace")


def _values(name: str, metric: MetricValue) -> Iterable[_Sample]:
    parts = (("", metric.value), ("_low", metric.low), ("_high", metric.high))
    for suffix, value in parts:
        if value is not None:
            yield f"parbench_{_word(name)}{suffix}_{_unit(metric)}", value


def _unit(metric: MetricValue) -> str:
    return _UNITS.get(metric.unit) or _word(metric.unit.replace("/s", "_per_second"))


def _labels(row: Row) -> str:
    world = {
        "ranks": row.world.size,
        "nodes": row.world.nodes,
        "backend": row.world.backend,
        "device": row.world.device,
    }
    params = {f"param_{_word(name)}": value for name, value in row.case.params.items()}
    return _label_set({"case": row.case.name, "id": row.case.id, **world, **params})


def _label_set(labels: dict[str, object]) -> str:
    escaped = {
        name: cells.visible(str(value)).replace("\\", r"\\").replace('"', r"\"") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


PYTEST_BENCHMARK = "5.3.1"
"""The pytest-benchmark whose format this is."""


def render_pytest(run: Run) -> bytes:
    """Return every measured case as a benchmark of one iteration a round, its data the samples of all launches."""
    environment = run.info.environment or {}
    whole = {
        "machine_info": {"node": run.info.host, "parbench": environment},
        "commit_info": {"id": "unversioned", "dirty": False, "project": "parbench", "branch": None, "time": None},
        "benchmarks": [_benchmark(row) for row in summarize(run).rows if samples(row)],
        "datetime": run.info.started,
        "version": PYTEST_BENCHMARK,
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


FORMATS: Mapping[str, Callable[[Run], bytes]] = {
    "pytest-benchmark": render_pytest,
    "bencher": render_bencher,
    "openmetrics": render_openmetrics,
}
FOLDERS: Mapping[str, Callable[[Run], dict[str, bytes]]] = {"github-action-benchmark": render_action}
"""The formats of several files."""
