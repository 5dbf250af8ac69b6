"""A report as JSON or CSV. Unknown values are left out of JSON and empty in CSV."""

from typing import Any

import msgspec

from parbench.bench.results.tables import is_missing
from parbench.reports.frames import list_rows
from parbench.reports.report import Report
from parbench.reports.run_data import RunData

SCHEMA_VERSION = 1


def render_json(report: Report) -> str:
    """Return a report as the text of a JSON object, which ends with a newline.

    It has the verdicts, the findings, the runs with their cases (``_describe_run``), and the rows
    of all tables, keyed by the id of the table.
    """
    notes: list[str] = []
    tables = {}
    for section in report.sections:
        notes += section.notes
        for table in section.tables:
            notes += table.notes
            tables[table.id] = [
                {column.key: column.sort_key(row) for column in table.columns} for row in table.rows
            ]
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": report.name,
        "heading": report.heading,
        "exit_code": report.code,
        "verdicts": report.verdicts,
        "findings": report.findings,
        "settings_compared": report.comparisons,
        "notes": notes,
        "runs": [_describe_run(data) for data in report.runs],
        "tables": tables,
    }
    return msgspec.json.encode(content).decode() + "\n"


def render_csv(report: Report) -> str:
    """Return a report's cases as CSV text, with a header and a row for each run and case.

    The columns are ``run`` (the id of the run) and those of ``RunData.cases`` except ``result``.
    """
    import pandas as pd

    frames = {data.run.info.id: data.cases.drop(columns="result") for data in report.runs}
    return pd.concat(frames, names=["run"]).reset_index("run").to_csv(index=False)


def _describe_run(data: RunData) -> dict[str, Any]:
    """Return a run as an object for JSON, with these keys.

    - ``run``: the run's plan, environment and other information (``RunInfo``)
    - ``cases``: a dict per case with the columns of ``RunData.cases`` that are known, ``notes`` and
      ``details``
    - ``skipped``: the cases that the plan skips, with reasons
    - ``missing``: the planned cases that lack the record of a repetition
    """
    cases = []
    for row in list_rows(data.cases):
        case = {name: value for name, value in row.items() if not is_missing(value)}
        result = case.pop("result")
        cases.append(case | {"notes": result.notes, "details": result.details})
    return {
        "run": data.run.info,
        "cases": cases,
        "skipped": data.plan.skipped,
        "missing": data.missing,
    }
