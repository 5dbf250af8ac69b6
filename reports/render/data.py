"""A report's rows as JSON and CSV: intervals keep their method, unknown is null."""

import csv
import io
from dataclasses import replace
from typing import Any

import msgspec

from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import Row, Summary, common_details
from parbench.reports.report import Report
from parbench.reports.tables.pipelines import drop_timelines

MOST_EMBEDDED_BYTES = 400_000
"""What of a page of at most a megabyte is left to its data."""
_OF_METRIC = ("value", "low", "high", "unit", "better", "method")
_OF_ROW = ("status", "repetitions", "planned", "iterations", "check_passed", "noise")
_BRIEF = (
    "case",
    "world",
    "status",
    "repetitions",
    "planned",
    "iterations",
    "check",
    "metrics",
    "noise",
    "variation",
)


def render_json(report: Report) -> str:
    """Return the run, its rows and what has none, and what to look at first; several runs as ``{"runs": [...]}``."""
    if not report.runs:
        return msgspec.json.encode(_tables(report)).decode() + "\n"
    told = [_run(*one) for one in report.runs]
    if len(told) == 1:
        told[0] |= {"look_at_first": report.findings, "settings_compared": report.comparisons}
    return msgspec.json.encode(told[0] if len(told) == 1 else {"runs": told}).decode() + "\n"


def embedded_json(report: Report, most_bytes: int = MOST_EMBEDDED_BYTES) -> str:
    """Return the same to stand in a page, without timelines: they are pictures rather than facts.

    Of several runs too long for a page, it is the rows alone, without details and notes.
    """
    runs = tuple((run, drop_timelines(summary)) for run, summary in report.runs)
    whole = render_json(replace(report, runs=runs))
    if len(whole) <= most_bytes or len(report.runs) == 1:
        return whole
    told = [
        {
            "run": {"id": run.info.id, "started": run.info.started},
            "rows": [{name: getattr(row, name) for name in _BRIEF} for row in summary.rows],
        }
        for run, summary in report.runs
    ]
    return msgspec.json.encode({"runs": told}).decode()


def render_csv(report: Report) -> str:
    """Return a line for each metric of each case over all repetitions, one for a case without any.

    A parameter has a column, as in the CSV of repetitions; what is unknown is empty.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    rows = [(run.info.id, row) for run, summary in report.runs for row in summary.rows]
    params = list(dict.fromkeys(name for _, row in rows for name in row.case.all_params))
    start = ("run", "case", "name", *(f"param_{name}" for name in params))
    writer.writerow((*start, *_OF_ROW, "metric", *_OF_METRIC))
    for run, row in rows:
        of_case = (run, row.case.id, row.case.name, *map(row.case.all_params.get, params))
        of_row = (
            row.status,
            row.repetitions,
            row.planned,
            row.iterations,
            row.check.passed,
            row.noise,
        )
        lines = [
            (name, *(getattr(one, column) for column in _OF_METRIC))
            for name, one in row.metrics.items()
        ]
        writer.writerows(
            (*of_case, *of_row, *line) for line in lines or [(None,) * (1 + len(_OF_METRIC))]
        )
    return buffer.getvalue()


def _run(run: Run, summary: Summary) -> dict[str, Any]:
    names = [
        *(name for name in Row.__dataclass_fields__ if name != "records"),
        "noise",
        "variation",
        "num_effective",
    ]
    return {
        "run": run.info,
        "verdict": summary.tally,
        "rows": [
            {**{name: getattr(row, name) for name in names}, "details": common_details(row)}
            for row in summary.rows
        ],
        "skipped": summary.skipped,
        "missing": summary.missing,
    }


def _tables(report: Report) -> dict[str, Any]:
    """Return what a report without runs says: its findings, and each table's cells by column, numbers as they are."""
    return {
        "name": report.name,
        "look_at_first": report.findings,
        "notes": [note for section in report.sections for note in section.notes],
        **{
            table.id: [
                {
                    getattr(column, "key", column.title): column.sort_key(row)
                    for column in table.columns
                }
                for row in table.rows
            ]
            for section in report.sections
            for table in section.tables
        },
    }
