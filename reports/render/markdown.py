"""Reports as GitHub's Markdown: the same tables as the page, without figures. Pure.

What comes from records is escaped: it is shown as text, whatever it holds.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.results.runs import Run
from reports import cells
from reports.analysis.findings import find
from reports.analysis.problems import Problem, bad_rows, emulations, not_measured, told_of_runs, warnings_of
from reports.analysis.several import Several
from reports.analysis.summary import Summary
from reports.sections.doubts import doubts, footnotes, heading, verdict_words
from reports.sections.panels import Panel, Section
from reports.sections.sections import sections

_SPECIAL = re.compile(r"([\\`*\[\]|~#])")


def render_markdown(run: Run, summary: Summary) -> str:
    """Return the report of a run."""
    found = find(run, summary)
    lines = [
        f"# parbench {escaped(run.info.id)}",
        f"**{escaped(verdict_words(summary.verdict))}**",
        *(f"**{escaped(warning)}**" for warning in warnings_of(run)),
        *(f"**{escaped(note)}**" for note in emulations(run)),
        escaped(heading(run, found.summary)),
        *_problems("Wrong, hung or failed", bad_rows(found.summary)),
        *_listed("Slow or noisy", doubts(found)),
        *_problems("Not measured", not_measured(found.summary)),
        *_sections(sections(found)),
        *_listed("How it was measured", footnotes(run, found.summary)),
    ]
    return "\n\n".join(lines) + "\n"


def render_several_markdown(several: Several, compared: Sequence[Section]) -> str:
    """Return the report of several runs."""
    lines = [
        f"# parbench: {len(several.runs)} runs",
        f"**{escaped(several.verdict_words)}**",
        *(f"**{escaped(note)}**" for note in told_of_runs([one.run for one in several.runs], emulations)),
        *_sections(compared),
    ]
    return "\n\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return text on one line that Markdown shows as it is."""
    plain = cells.visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", plain)


def _sections(shown: Iterable[Section]) -> Iterable[str]:
    for section in shown:
        yield f"## {escaped(section.title)}"
        yield from (escaped(note) for note in section.notes)
        for panel in section.panels:
            yield f"### {escaped(panel.title)}"
            yield _panel(panel)
            yield from (escaped(note) for note in panel.notes)
        if section.glossary:
            yield "\n".join(f"* **{escaped(term.name)}**: {escaped(term.text)}" for term in section.glossary)


def _panel(panel: Panel[Any]) -> str:
    rows = [[column.text(row) for column in panel.columns] for row in panel.rows]
    return _table([column.title for column in panel.columns], rows, [column.number for column in panel.columns])


def _problems(title: str, problems: Sequence[Problem]) -> Iterable[str]:
    if problems:
        yield f"## {title}"
        rows = [[one.case, one.status, one.launches, one.reason] for one in problems]
        yield _table(["case", "status", "launches", "reason"], rows, [False] * 4)


def _listed(title: str, sentences: Sequence[str]) -> Iterable[str]:
    if sentences:
        yield f"## {title}"
        yield "\n".join(f"* {escaped(sentence)}" for sentence in sentences)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool]) -> str:
    ruler = ["---:" if number else "---" for number in numbers]
    lines = [map(escaped, titles), ruler, *(map(escaped, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
