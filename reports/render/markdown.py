"""A report as GitHub's Markdown: the tables of the page without figures.

Texts of records are escaped, so that they are shown and never interpreted.
"""

import re
from collections.abc import Iterable, Sequence

from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import Column, Row, Section, Table
from parbench.reports.glossary import list_terms
from parbench.reports.report import Report

_SPECIAL = re.compile(r"([\\`*\[\]|~#])")


def render_markdown(report: Report) -> str:
    """Return a report as GitHub's Markdown, with the tables of the page and without figures."""
    separator = " " if len(report.runs) == 1 else ": "
    verdicts = [f"* **{verdict.word}** {escaped(verdict.sentence)}" for verdict in report.verdicts]
    blocks = [
        f"# parbench{separator}{escaped(report.name)}",
        "\n".join(verdicts),
        *(f"**{escaped(text)}**" for text in report.emulated),
        escaped(report.heading),
        "\n".join(f"* **{escaped(number)}** {escaped(text)}" for number, text in report.tiles),
        *_render_problems(report.problem_table),
        *_render_list("Look at first", [finding.text for finding in report.findings]),
        *_render_list("Settings compared", report.comparisons),
        *_render_problems(report.not_measured_table),
        *(block for section in report.sections for block in _render_section(section)),
        *_render_list("How it was measured", report.footnotes),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def escaped(text: str) -> str:
    """Return ``text`` on one line, with special characters escaped so that Markdown shows them."""
    line = to_single_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line)


def markdown_table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table with a header. Columns of numbers are aligned right."""
    lines = [
        [escaped(column.title) for column in columns],
        ["---:" if column.is_number else "---" for column in columns],
        *([escaped(column.format_cell(row)) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _render_section(section: Section) -> list[str]:
    """Return the Markdown blocks (paragraphs) of a section: notes, tables and glossary entries."""
    blocks = [f"## {escaped(section.title)}", *map(escaped, section.notes)]
    for table in section.tables:
        blocks += [f"### {escaped(table.title)}", escaped(table.constant)]
        if table.rows:
            blocks.append(markdown_table(table.varying, table.rows))
        blocks += map(escaped, table.notes)
    glossary = [f"* **{escaped(term.name)}**: {escaped(term.text)}" for term in list_terms(section)]
    blocks.append("\n".join(glossary))
    return blocks


def _render_problems(table: Table) -> list[str]:
    """Return heading and table of failed or unmeasured cases as Markdown, empty without rows."""
    if not table.rows:
        return []
    return [f"## {table.title}", markdown_table(table.columns, table.rows)]


def _render_list(title: str, sentences: Sequence[str]) -> list[str]:
    """Return heading and bulleted list as Markdown blocks, an empty list without ``sentences``."""
    if not sentences:
        return []
    return [f"## {title}", "\n".join(f"* {escaped(sentence)}" for sentence in sentences)]
