"""A run as OpenMetrics text, for Prometheus' textfile collector or push gateway."""

import re
from collections.abc import Iterable

from bench.results.metrics import MetricValue
from bench.results.runs import Run
from reports import cells
from reports.summary import Row, summarize

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
