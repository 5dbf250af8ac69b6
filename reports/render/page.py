"""The report as an HTML page: one file of at most a megabyte that needs no network."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from parbench.bench.text import escape_unprintable, format_duration
from parbench.reports.figures.plots import list_table_charts
from parbench.reports.figures.style import style_sheet
from parbench.reports.figures.svg import render_inline
from parbench.reports.glossary import get_terms, list_terms
from parbench.reports.report import Report

MAX_PAGE_BYTES = 1_000_000
LIMITS = ((1000, 100), (200, 30), (50, 10), (10, 3))
"""Pairs of limits: the largest number of rows per table, and the largest number of figures.

The page uses the first pair with which it has at most ``MAX_PAGE_BYTES``, otherwise the last.
"""
METHOD_TERMS = ("sample", "repetition", "interval", "noise")
"""The glossary terms that the page defines in its section on the method of measurement."""
_FOLDER = Path(__file__).parent


def render_page(report: Report) -> str:
    """Return a report as one HTML page.

    If the page would exceed a megabyte, rows of tables and figures are left out (``LIMITS``).
    """
    charts = report.charts
    drawn = [(chart.name, render_inline(chart)) for chart in charts[: LIMITS[0][1]]]
    page = ""
    for max_rows, max_figures in LIMITS:
        figures = dict(drawn[:max_figures])
        page = _render_template(
            title="several runs" if len(report.runs) > 1 else report.name,
            report=report,
            run=report.runs[0].run.info if len(report.runs) == 1 else None,
            method_terms=get_terms(METHOD_TERMS),
            duration=format_duration,
            max_rows=max_rows,
            figures=figures,
            num_hidden_figures=len(charts) - len(figures),
        )
        if len(page.encode(errors="replace")) <= MAX_PAGE_BYTES:
            break
    return page


def _render_template(**context: Any) -> str:
    """Return the HTML page, rendered from the template ``page.html.j2``.

    The style sheet and the script become part of the page. ``context`` has the variables of the
    template, such as ``report``.
    """
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=_escape_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Macros see globals, but not the context of the page.
    environment.globals.update(context)
    environment.globals.update(list_table_charts=list_table_charts, list_terms=list_terms)
    return environment.get_template("page.html.j2").render(
        policy=_make_policy(script),
        style=Markup(style_sheet() + (_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
    )


def _escape_controls(value: object) -> object:
    """Escape the control characters in a value of the template, such as right-to-left marks.

    Values that are not text, and HTML (``Markup``), are returned unchanged.
    """
    if isinstance(value, str) and not isinstance(value, Markup):
        return escape_unprintable(value, "\n\t")
    return value


def _make_policy(script: str) -> str:
    """Return a content security policy that forbids network access and foreign scripts.

    ``script`` is the source of the page's own script, the only one that the policy allows.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
