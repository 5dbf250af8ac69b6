"""Generated parts of the documentation: benchmarks, parameters, metrics and glossary.

``python docs/hooks.py docs/reference/metrics.md`` prints a page with its generated parts. A page has
a comment such as ``<!-- parbench list 'p2p.*' -->`` where the output of a command belongs.
"""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from parbench import cli
from parbench.bench.results.metrics import METRICS, Metric
from parbench.reports.glossary import DEFINITIONS, get_terms


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments of a page by what they name; mkdocs calls it for every page."""
    return re.sub(r"<!-- (?P<words>(?:parbench|table) .*?) -->", _make_table, markdown)


def _make_table(match: re.Match[str]) -> str:
    program, *words = shlex.split(match["words"])
    if program == "table":
        return TABLES[words[0]]()
    result = CliRunner().invoke(cli.main, words)
    if result.exit_code:
        raise ValueError(f"parbench {shlex.join(words)}: {result.output}")
    return f"```text\n{result.stdout}```"


def make_metric_table() -> str:
    """Return the Markdown table of all metrics."""
    lines = ["| metric | unit | better | meaning |", "| --- | --- | --- | --- |"]
    lines += [format_metric(metric) for metric in METRICS]
    return "\n".join(lines)


def format_metric(metric: Metric) -> str:
    """Return the row of a metric in the table."""
    formula = f" ({metric.formula})" if metric.formula else ""
    unit = metric.unit or "-"
    return f"| `{metric.name}` | {unit} | {metric.better or '-'} | {metric.help}{formula} |"


def make_glossary() -> str:
    """Return the terms that reports explain, in alphabetical order."""
    terms = sorted(get_terms(DEFINITIONS), key=lambda term: term.name.lower())
    return "\n\n".join(f"**{term.name}**\n:   {term.text}" for term in terms)


TABLES: dict[str, Callable[[], str]] = {"metrics": make_metric_table, "glossary": make_glossary}
"""The tables that no command prints, by name."""

if __name__ == "__main__":
    sys.stdout.write(on_page_markdown(Path(sys.argv[1]).read_text()))
