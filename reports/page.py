"""The report: one HTML file that needs no network, the same bytes for the same run."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from bench.ceiling import Ceiling
from bench.runs import Run
from bench.units import format_duration
from reports.breakdown import MemoryLine, broken_down, memory_lines
from reports.columns import Column, T, communication_columns, fit_columns, slowed_columns
from reports.contrasts import Pairs, Slowed, contrasts, matrix_title, pairs
from reports.data import as_csv, as_json
from reports.facts import flatten, row_facts
from reports.figures import draw_breakdown, draw_curves, draw_pairs, draw_steps
from reports.fits import Curve, ceiling_of, fit_curves, fit_notes
from reports.footnotes import footnotes, heading, verdict_words
from reports.problems import bad_rows, not_measured
from reports.step_columns import memory_columns, step_columns, time_columns
from reports.summary import Row, Summary
from reports.svg import inline_svg

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Panel(Generic[T]):
    """A table with the figures that show the same numbers; ``id`` is its anchor."""

    id: str
    title: str
    figures: tuple[Markup, ...]
    columns: tuple[Column[T], ...]
    rows: tuple[T, ...]


def render_page(run: Run, summary: Summary) -> str:
    """Return the report of a run as HTML."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    shown = [row for row in summary.rows if row.metrics]
    matrices = pairs(shown)
    in_matrices = {row.case.id for matrix in matrices for row in matrix.rows.values()}
    communication = [row for row in shown if row.is_communication and row.case.id not in in_matrices]
    steps = [row for row in shown if not row.is_communication]
    ceiling = ceiling_of(run, communication)
    curves = fit_curves(communication, ceiling)
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2").render(
        policy=_policy(script),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        run=run.info,
        heading=heading(run, summary),
        verdict=summary.verdict,
        verdict_words=verdict_words(summary.verdict),
        bad=bad_rows(summary),
        not_measured=not_measured(summary),
        environment=None if run.info.environment is None else flatten(run.info.environment),
        communication=_communication_panels(communication, curves, ceiling),
        fits=_fit_panel(curves),
        fit_notes=fit_notes(curves, ceiling),
        contrasts=[_contrast_panel(i, *one) for i, one in enumerate(contrasts(shown), start=1)],
        pairs=[_pair_panel(i, matrix) for i, matrix in enumerate(matrices, start=1)],
        steps=_step_panel(steps, curves),
        step_time=_time_panel(steps),
        step_memory=_memory_panel(steps),
        notes=footnotes(run, summary),
        facts=row_facts,
        duration=format_duration,
        data=_embedded(run, summary),
    )


def _policy(script: str) -> str:
    """Return a content security policy that forbids the network and every script but ours."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(run: Run, summary: Summary) -> Markup:
    """Return JSON and CSV as JSON that cannot end the element it stands in."""
    both = msgspec.json.encode({"json": as_json(run, summary), "csv": as_csv(summary)}).decode()
    return Markup(both.replace("<", "\\u003c"))


def _communication_panels(
    rows: Sequence[Row], curves: Sequence[Curve], ceiling: Ceiling | None
) -> tuple[Panel[Row], ...]:
    """Return a panel for each mode and dtype: they are different series."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(_series(row), []).append(row)
    return tuple(
        _communication_panel(
            f"communication-{i}",
            f"{series[0]}, {series[1]}",
            group,
            [curve for curve in curves if _series(curve.rows[0]) == series],
            ceiling,
        )
        for i, (series, group) in enumerate(groups.items(), start=1)
    )


def _series(row: Row) -> tuple[str, str]:
    return str(row.case.params.get("mode", "-")), str(row.case.params.get("dtype", "-"))


def _communication_panel(
    panel_id: str, title: str, rows: Sequence[Row], curves: Sequence[Curve], ceiling: Ceiling | None
) -> Panel[Row]:
    bandwidth = draw_curves(rows, "busbw", ceiling=ceiling)
    figures = [
        _figure(bandwidth, f"{panel_id}-busbw", f"Bus bandwidth against size: {title}"),
        _figure(draw_curves(rows, "time", curves), f"{panel_id}-time", f"Time against size: {title}"),
    ]
    return Panel(
        id=panel_id,
        title=title,
        figures=tuple(figure for figure in figures if figure),
        # the title says what these two say
        columns=tuple(column for column in communication_columns(rows) if column.title not in ("mode", "dtype")),
        rows=tuple(rows),
    )


def _fit_panel(curves: Sequence[Curve]) -> Panel[Curve] | None:
    if not curves:
        return None
    return Panel(id="fits", title="all curves", figures=(), columns=fit_columns(curves), rows=tuple(curves))


def _contrast_panel(number: int, title: str, prefix: str, slowed: Sequence[Slowed]) -> Panel[Slowed]:
    columns = slowed_columns(slowed, prefix)
    return Panel(id=f"contrast-{number}", title=title, figures=(), columns=columns, rows=tuple(slowed))


def _pair_panel(number: int, matrix: Pairs) -> Panel[Row]:
    title = matrix_title(matrix)
    figure = _figure(draw_pairs(matrix), f"pairs-{number}-rates", title)
    rows = tuple(matrix.rows.values())
    figures = (figure,) if figure else ()
    return Panel(id=f"pairs-{number}", title=title, figures=figures, columns=communication_columns(rows), rows=rows)


def _step_panel(rows: Sequence[Row], curves: Sequence[Curve]) -> Panel[Row] | None:
    if not rows:
        return None
    title = "Step time, launch by launch (circles) and over all launches (diamonds)"
    figure = _figure(draw_steps(rows), "steps-time", title)
    figures = (figure,) if figure else ()
    columns = step_columns(rows, curves)
    return Panel(id="steps-table", title="all steps", figures=figures, columns=columns, rows=tuple(rows))


def _time_panel(steps: Sequence[Row]) -> Panel[Row] | None:
    title, rows = "Where the time went", broken_down(steps)
    if not rows:
        return None
    what = "Each bar is a traced step, its parts in the legend's order."
    figure = _figure(draw_breakdown(steps), "steps-breakdown", f"{title}: the parts of each step", what)
    figures = (figure,) if figure else ()
    return Panel(id="step-time", title=title, figures=figures, columns=time_columns(steps), rows=rows)


def _memory_panel(steps: Sequence[Row]) -> Panel[MemoryLine] | None:
    lines = memory_lines(steps)
    if not lines:
        return None
    title, columns = "Memory by component", memory_columns(steps)
    return Panel(id="step-memory", title=title, figures=(), columns=columns, rows=lines)


def _figure(
    figure: Figure | None, name: str, title: str, what: str = "Bands and bars are 95 % intervals."
) -> Markup | None:
    if figure is None:
        return None
    description = f"{what} The table beside it holds the same numbers.".lstrip()
    return Markup(inline_svg(figure, name=name, title=title, description=description))
