"""A report as JSON or CSV. Unknown values are left out of JSON and empty in CSV."""

from collections.abc import Sequence
from typing import Any

import msgspec

from parbench.bench.results.tables import Column, Row, Section, is_missing
from parbench.reports.frames import join_frames, list_rows
from parbench.reports.report import Report
from parbench.reports.run_data import RunData

SCHEMA_VERSION = 1


def render_json(report: Report) -> str:
    """Return a report as JSON: its runs with a row per case, its findings, and its tables."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": report.name,
        "heading": report.heading,
        "exit_code": report.code,
        "verdicts": report.verdicts,
        "findings": report.findings,
        "settings_compared": report.comparisons,
        "notes": [note for section in report.sections for note in _list_notes(section)],
        "runs": [_describe_run(data) for data in report.runs],
        "tables": {
            table.id: [_make_row(table.columns, row) for row in table.rows]
            for section in report.sections
            for table in section.tables
        },
    }
    return msgspec.json.encode(content).decode() + "\n"


def render_csv(report: Report) -> str:
    """Return CSV with a row for each run and case: the columns of ``RunData.cases``."""
    frames = {data.run.info.id: data.cases.drop(columns=["result"]) for data in report.runs}
    return join_frames(frames, "run").to_csv(index=False)


def _list_notes(section: Section) -> list[str]:
    """Return the notes of a report section, then the notes of its tables."""
    return [*section.notes, *(note for table in section.tables for note in table.notes)]


def _describe_run(data: RunData) -> dict[str, Any]:
    """Return a run for JSON: ``run`` (its information), ``cases``, ``skipped`` and ``missing``."""
    return {
        "run": data.run.info,
        "cases": _list_cases(data),
        "skipped": data.plan.skipped,
        "missing": data.missing,
    }


def _list_cases(data: RunData) -> list[dict[str, Any]]:
    """Return the values of each case for JSON, keyed by column of ``RunData.cases``.

    Unknown values are left out, and ``notes`` and ``details`` are added.
    """
    cases = []
    for row in list_rows(data.cases):
        case = {name: value for name, value in row.items() if not is_missing(value)}
        result = case.pop("result")
        case["notes"] = result.notes
        case["details"] = result.details
        cases.append(case)
    return cases


def _make_row(columns: Sequence[Column], row: Row) -> dict[str, Any]:
    """Return the cells of a table row for JSON as numbers or text, keyed by column."""
    return {column.key: column.sort_key(row) for column in columns}
