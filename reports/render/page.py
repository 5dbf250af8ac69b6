"""The report as a page: one HTML file that needs no network, the same bytes for the same run."""

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
from parbench.reports.render.data import embedded_json
from parbench.reports.report import Report, list_terms, terms

_HERE = Path(__file__).parent
_OF_METHOD = ("sample", "repetition", "interval", "noise")


def render_page(report: Report) -> str:
    return _rendered(
        "page.html.j2",
        title="several runs" if len(report.runs) > 1 else report.name,
        report=report,
        run=report.runs[0][0].info if len(report.runs) == 1 else None,
        method_terms=terms(_OF_METHOD),
        duration=format_duration,
        data=_embedded(embedded_json(report)),
    )


def render_refusal(name: str, reason: str) -> str:
    return _rendered("refusal.html.j2", title=name, name=name, reason=reason, data=_embedded("{}"))


def _rendered(template: str, **context: Any) -> str:
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        render_inline=render_inline, list_table_charts=list_table_charts, list_terms=list_terms
    )
    return environment.get_template(template).render(
        policy=_policy(script),
        style=Markup(style_sheet() + (_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        **context,
    )


def _visible(value: object) -> object:
    """Return text with what is not printed written out, such as marks that turn the direction of reading."""
    return (
        escape_unprintable(value, "\n\t")
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def _policy(script: str) -> str:
    """Return a content security policy that forbids the network and every script but ours."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(data: str) -> Markup:
    """Return JSON as JSON that cannot end the element it stands in."""
    return Markup(data.replace("<", "\\u003c"))
