"""A report as GitHub's Markdown: the same tables as the page, without figures.

What comes from records is escaped: it is shown as text, whatever it holds.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from parbench.bench.results import tables
from parbench.bench.results.formatting import to_single_line
from parbench.reports.analysis.verdicts import Problem
from parbench.reports.report import PROBLEM_COLUMNS, Column, Report, T, list_terms

_SPECIAL = re.compile(r"([\\`*\[\]|~#])")


def render_markdown(report: Report) -> str:
    is_one = len(report.runs) == 1
    lines = [
        f"# parbench{' ' if is_one else ': '}{escaped(report.name)}",
        "\n".join(f"* **{one.word}** {escaped(one.sentence)}" for one in report.verdicts),
        *(f"**{escaped(told)}**" for told in (*report.warnings, *report.emulated)),
        *([escaped(report.heading)] if is_one else []),
        *_titled("Wrong, hung or failed", report.problems),
        *_listed("Look at first", [finding.text for finding in report.findings]),
        *_listed("Settings compared", report.comparisons),
        *_titled("Not measured", report.not_measured),
    ]
    for section in report.sections:
        lines += [f"## {escaped(section.title)}", *map(escaped, section.notes)]
        for table in section.on_page:
            lines += [
                f"### {escaped(table.title)}",
                *([escaped(table.constant)] if table.constant else []),
            ]
            lines.append(markdown_table(table.varying, table.rows))
            lines += map(escaped, table.notes)
        if list_terms(section):
            lines.append(
                "\n".join(
                    f"* **{escaped(term.name)}**: {escaped(term.text)}"
                    for term in list_terms(section)
                )
            )
    lines += _listed("How it was measured", report.footnotes)
    return "\n\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return text on one line that Markdown shows as it is."""
    plain = to_single_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", plain)


def markdown_table(
    columns: Sequence[Column[T]] | Sequence[tables.Column], rows: Iterable[Any]
) -> str:
    lines = [
        [escaped(column.title) for column in columns],
        ["---:" if column.is_number else "---" for column in columns],
        *([escaped(column.format_cell(row)) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _titled(title: str, rows: Sequence[Problem]) -> list[str]:
    return [f"## {title}", markdown_table(PROBLEM_COLUMNS, rows)] if rows else []


def _listed(title: str, sentences: Sequence[str]) -> list[str]:
    return (
        [f"## {title}", "\n".join(f"* {escaped(sentence)}" for sentence in sentences)]
        if sentences
        else []
    )
