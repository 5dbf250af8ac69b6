"""Renders the report on a comparison or a history check as terminal text, Markdown or JSON."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parbench.bench.files import encode_json
from parbench.bench.results.tables import Table
from parbench.reports.render.markdown import escaped, markdown_table
from parbench.reports.render.terminal import Sheet, width_of

SCHEMA_VERSION = 4
"""The version of the JSON report, which it contains."""
MAX_MARKDOWN_ROWS = 150
"""The number of rows that a table in Markdown shows.

A GitHub comment has at most 65,536 characters.
"""


@dataclass(frozen=True, kw_only=True)
class VerdictReport:
    """The report on a comparison or a history check, in parts that every format renders."""

    title: str
    """The first line of the report, which states the verdict."""
    summary: Sequence[str]
    """The sentences below the title."""
    tables: Sequence[Table]
    """The tables that the verdicts are based on."""
    explanations: Sequence[str]
    """Sentences below the tables: the meaning of the verdicts, the method, and what to do next."""
    content: Mapping[str, object]
    """The content of the report as JSON, keyed by the names of its fields.

    Times are in seconds, changes are fractions, and unknown values are null.
    """


def render(report: VerdictReport, form: str) -> str:
    """Return a report as text in the format ``form``: ``tables``, ``markdown`` or ``json``."""
    if form == "json":
        return encode_json({"schema_version": SCHEMA_VERSION, **report.content}).decode()
    if form == "markdown":
        return render_markdown(report)
    return render_text(report, width_of(sys.stdout))


def render_text(report: VerdictReport, width: int | None = None) -> str:
    """Return a report as text for a terminal.

    ``width`` is the number of columns, None for output without a limit, such as a pipe.
    """
    sheet = Sheet(width)
    sheet.write_text(report.title, *report.summary)
    for table in report.tables:
        sheet.write_table(table)
    sheet.write_text("")
    sheet.write_text(*report.explanations)
    return sheet.text()


def render_markdown(report: VerdictReport) -> str:
    """Return a report as Markdown for a GitHub step summary or a comment.

    A table has at most ``MAX_MARKDOWN_ROWS`` rows.
    """
    lines = [f"## {escaped(report.title)}"]
    if report.summary:
        lines += ["", *(f"{escaped(sentence)}  " for sentence in report.summary)]
    for table in report.tables:
        lines += ["", f"### {table.title}", ""]
        lines.append(markdown_table(table.varying, table.rows[:MAX_MARKDOWN_ROWS]))
        if table.constant:
            lines += ["", escaped(table.constant)]
        num_hidden = len(table.rows) - MAX_MARKDOWN_ROWS
        if num_hidden > 0:
            lines += ["", f"{num_hidden} more rows are not shown. `--format json` has all rows."]
    lines.append("")
    lines += [f"- {escaped(sentence)}" for sentence in report.explanations]
    return "\n".join(lines) + "\n"
