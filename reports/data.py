"""A run's rows as JSON and as CSV, for those who want to go on with the numbers."""

import csv
import io
from typing import Any

import msgspec

from bench.runs import Run
from reports.summary import Row, Summary, common_details

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


def _row(row: Row) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in Row.__dataclass_fields__ if name != "records"}
    return {**fields, "details": common_details(row)}


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
