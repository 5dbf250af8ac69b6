"""Rows as JSON and CSV: intervals keep their method, unknown is null."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.results.runs import Run
from reports.analysis.summary import Row, Summary, common_details

MOST_EMBEDDED_BYTES = 400_000
"""What of a page of at most a megabyte is left to its data."""
CSV_COLUMNS = (
    "case",
    "name",
    "params",
    "status",
    "launches",
    "planned",
    "iterations",
    "check_passed",
    "noise",
    "metric",
    "value",
    "low",
    "high",
    "unit",
    "better",
    "method",
)


def as_json(run: Run, summary: Summary) -> str:
    """Return the run, its rows and what has none; intervals keep their method, unknown is null."""
    whole = {
        "run": run.info,
        "verdict": summary.verdict,
        "rows": [_row(row) for row in summary.rows],
        "skipped": summary.skipped,
        "missing": summary.missing,
    }
    return msgspec.json.encode(whole).decode()


def as_csv(summary: Summary) -> str:
    """Return one line for each metric of each row; a row without metrics has one with its status."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in summary.rows:
        writer.writerows(_lines(row))
    return buffer.getvalue()


def several_json(runs: Sequence[tuple[Run, Summary]]) -> str:
    """Return several runs as ``{"runs": [...]}``."""
    return f'{{"runs":[{",".join(as_json(run, summary) for run, summary in runs)}]}}'


def embedded_json(runs: Sequence[tuple[Run, Summary]], most_bytes: int = MOST_EMBEDDED_BYTES) -> str:
    """Return the same to stand in a page: where it is too long, without plans, and rows without details and notes."""
    whole = several_json(runs)
    if len(whole) <= most_bytes:
        return whole
    told = [
        {"run": {"id": run.info.id, "started": run.info.started}, "rows": [_brief(row) for row in summary.rows]}
        for run, summary in runs
    ]
    return msgspec.json.encode({"runs": told}).decode()


def several_csv(runs: Sequence[tuple[Run, Summary]]) -> str:
    """Return several runs' lines, each after its run's id."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("run", *CSV_COLUMNS))
    for run, summary in runs:
        writer.writerows([run.info.id, *line] for row in summary.rows for line in _lines(row))
    return buffer.getvalue()


def _row(row: Row) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in Row.__dataclass_fields__ if name != "records"}
    return {**fields, "details": common_details(row)}


def _brief(row: Row) -> dict[str, Any]:
    kept = ("case", "world", "status", "launches", "planned", "iterations", "check", "metrics", "grade")
    return {name: getattr(row, name) for name in kept}


def _lines(row: Row) -> list[list[Any]]:
    params = " ".join(f"{name}={value}" for name, value in row.case.params.items())
    counts = [row.launches, row.planned, row.iterations]
    start = [row.case.id, row.case.name, params, row.status, *counts, row.check.passed, row.grade]
    if not row.metrics:
        return [start + [None] * (len(CSV_COLUMNS) - len(start))]
    return [
        [*start, name, metric.value, metric.low, metric.high, metric.unit, metric.better, metric.method]
        for name, metric in row.metrics.items()
    ]
