"""The report: one HTML file that needs no network, the same bytes for the same run."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bench.results.runs import Run
from bench.text import format_duration
from reports.analysis.findings import find
from reports.analysis.labels import environment_facts, row_facts
from reports.analysis.problems import bad_rows, cannot_show, emulations, not_measured, told_of_runs
from reports.analysis.several import Several
from reports.analysis.summary import Summary
from reports.figures.illustrations import illustrations, scaling_figures
from reports.render.data import as_json
from reports.sections.doubts import doubts, footnotes, heading, verdict_words
from reports.sections.panels import Section, terms
from reports.sections.sections import sections

_HERE = Path(__file__).parent
_OF_METHOD = ("sample", "launch", "interval", "noise")


def render_page(run: Run, summary: Summary, warnings: Sequence[str] = ()) -> str:
    """Return the report of a run as HTML; ``warnings`` are what reading its folder met."""
    found = find(run, summary)
    return _rendered(
        "page.html.j2",
        title=run.info.id,
        run=run.info,
        heading=heading(run, found.summary),
        verdict=summary.verdict,
        verdict_words=verdict_words(summary.verdict),
        warnings=warnings,
        claims=cannot_show(run),
        doubts=doubts(found),
        bad=bad_rows(found.summary),
        not_measured=not_measured(found.summary),
        environment=None if run.info.environment is None else environment_facts(run.info.environment),
        sections=sections(found),
        figures=illustrations(found),
        notes=footnotes(run, found.summary),
        method_terms=terms(_OF_METHOD),
        facts=row_facts,
        duration=format_duration,
        data=_embedded(as_json(run, found.summary)),
    )


def render_several(several: Several, compared: Sequence[Section], data: str) -> str:
    """Return a page of several runs: what each says, in what they differ, and how they compare."""
    return _rendered(
        "several.html.j2",
        title="several runs",
        several=several,
        emulated=told_of_runs([one.run for one in several.runs], emulations),
        sections=compared,
        figures=scaling_figures(several),
        data=_embedded(data),
    )


def render_refusal(name: str, reason: str) -> str:
    """Return a page that says why a run cannot be read."""
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
    return environment.get_template(template).render(
        policy=_policy(script),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        **context,
    )


def _visible(value: object) -> object:
    """Return text with what is not printed written out, such as marks that turn the direction of reading."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in value)


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
