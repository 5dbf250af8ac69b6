"""The report on training steps. A parallelism with tables of its own is a function and a line in ``PANELS``."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.results.details import PLAN_FILE, PLAN_SCHEMA, Component, Published, Validation
from bench.results.records import refuse_newer
from bench.text import UserError
from reports import cells
from reports.analysis.findings import Findings
from reports.analysis.pipelines import comparisons
from reports.analysis.step_parts import broken_down, memory_lines
from reports.analysis.timelines import busy_ranks
from reports.sections.columns import Column, busy_columns, words
from reports.sections.panels import Panel, Section, terms
from reports.sections.parallel_columns import compared_columns, pipeline_columns
from reports.sections.step_columns import memory_columns, step_columns, step_notes, time_columns

Panels = Callable[[Findings], Iterable[Panel[Any]]]


def step_section(found: Findings) -> Section | None:
    """Return the steps' tables."""
    if not found.steps:
        return None
    panels = tuple(panel for make in PANELS for panel in make(found))
    names = [name for panel in panels for name in _TERMS.get(panel.id, ())]
    return Section(id="steps", title="Steps", panels=panels, terms=terms(dict.fromkeys(names)), notes=found.unreadable)


def _times(found: Findings) -> Iterable[Panel[Any]]:
    yield Panel(
        id="steps-table",
        title="all steps",
        caption="what the figures show, and how far to trust it",
        # sentences would make the table wider than any page: they stand below it
        columns=tuple(one for one in step_columns(found.steps, found.curves) if one.title != "notes"),
        rows=found.steps,
        notes=step_notes(found.steps, found.curves),
        has_facts=True,
    )


def _breakdowns(found: Findings) -> Iterable[Panel[Any]]:
    if rows := broken_down(found.steps):
        yield Panel(
            id="step-time",
            title="Where the time went",
            caption="parts of the traced step, on axes of the mesh",
            columns=time_columns(found.steps),
            rows=rows,
        )


def _timelines(found: Findings) -> Iterable[Panel[Any]]:
    if not found.timelines:
        return
    lines = busy_ranks(found.timelines)
    yield Panel(
        id="step-timelines",
        title="Timelines",
        caption="what each rank of a traced step was busy with; parbench export --format chrome-trace gives it whole",
        columns=busy_columns(found.steps, lines),
        rows=lines,
        notes=tuple(f"No timeline of {one.row.case.label}: {one.why_not}." for one in found.timelines if one.why_not),
        is_wide=True,
    )


def _pipelines(found: Findings) -> Iterable[Panel[Any]]:
    if found.pipelines:
        yield Panel(
            id="pipelines",
            title="Pipelines",
            caption="bubbles by measurement, simulation and formula, and why ranks idle",
            columns=pipeline_columns(found.pipelines),
            rows=found.pipelines,
            is_wide=True,
        )
    for i, one in enumerate(comparisons(found.pipelines), start=1):
        yield Panel(
            id=f"schedules-{i}",
            title=one.title,
            caption="measured by this run, or simulated with the times that its first such step measured",
            columns=compared_columns(one.entries),
            rows=one.entries,
        )


def _memory(found: Findings) -> Iterable[Panel[Any]]:
    if lines := memory_lines(found.steps):
        yield Panel(
            id="step-memory",
            title="Memory by component",
            caption="formula, count and measurement side by side",
            columns=memory_columns(found.steps),
            rows=lines,
        )


PANELS: tuple[Panels, ...] = (_times, _breakdowns, _timelines, _pipelines, _memory)
_TERMS = {
    "step-time": ("parts of a step",),
    "step-timelines": ("phases",),
    "pipelines": ("idle: schedule, imbalance, p2p, rest", "F, B, I, W"),
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One number of a step as predicted and as measured."""

    step: str
    told: Component


def predicted_section(found: Findings) -> Section | None:
    """Return the run's predictions beside what it measured, None where nobody has asked for them."""
    try:
        content = (found.run.path / PLAN_FILE).read_bytes()
        refuse_newer(content, PLAN_FILE, PLAN_SCHEMA)
        told = msgspec.json.decode(content, type=Validation)
    except FileNotFoundError:
        return None
    except UserError as error:
        return _untold(f"{error}.")
    except (OSError, msgspec.MsgspecError) as error:
        return _untold(f"{PLAN_FILE} is not what parbench plan --validate wrote ({error}): have it written again.")
    return _told(told)


def _untold(why: str) -> Section:
    return Section(id="predicted", title="Predictions", panels=(), notes=(why,))


def _told(told: Validation) -> Section:
    rows = tuple(Prediction(step=step.label, told=one) for step in told.rows for one in step.components)
    said = ((step.label, note) for step in told.rows for note in (step.rule, *step.notes))
    notes = dict.fromkeys(f"{label}: {note}" for label, note in said if note)
    left = [f"Not predicted: {label}: {reason}" for label, reason in told.left_out.items()]
    if not rows and not told.published:
        return Section(id="predicted", title="Predictions", panels=(), notes=tuple(left))
    checked = Panel(
        id="predictions",
        title="Predicted and measured",
        caption=f"from {_sources(told)}; parbench plan --validate wrote it",
        columns=_COLUMNS,
        rows=rows,
        notes=(f"Predicted from {_sources(told)}.", *notes, *left),
    )
    panels = (*((checked,) if rows else ()), *((_published(told.published),) if told.published else ()))
    return Section(id="predicted", title="Predictions", panels=panels, notes=() if rows else tuple(left))


def _sources(told: Validation) -> str:
    """Return what the predictions are made of, for people."""
    links = "the run's own collectives" if told.fits == told.run else f"the collectives of {told.fits}"
    return f"{links} and each step's {' or '.join(dict.fromkeys(step.compute for step in told.rows))} compute"


def _published(claims: list[Published]) -> Panel[Published]:
    return Panel(
        id="published",
        title="Published and predicted",
        caption="predicted for declared hardware, not for this machine: datasheets and assumed efficiencies; the shape "
        "must come out, not the digit",
        columns=_PUBLISHED,
        rows=tuple(claims),
        notes=(),
    )


def _quantity(value: float | None, unit: str) -> str:
    return cells.duration(value) if unit == "s" else cells.quantity(value, unit)


_COLUMNS: tuple[Column[Prediction], ...] = (
    words("step", lambda one: one.step, "the training step"),
    words("component", lambda one: one.told.name, "what is predicted of it"),
    Column(
        title="predicted",
        text=lambda one: _quantity(one.told.predicted, one.told.unit),
        sort=lambda one: one.told.predicted,
        help="from latency and bandwidth of measured curves, closed forms of bytes and memory, and the step's compute",
    ),
    Column(
        title="measured",
        text=lambda one: _quantity(one.told.measured, one.told.unit),
        sort=lambda one: one.told.measured,
        help="the median over launches",
    ),
    Column(
        title="error",
        text=lambda one: "-" if one.told.error is None else f"{one.told.error:+.1%}",
        sort=lambda one: one.told.error,
        help="predicted / measured - 1",
    ),
)


def _figure(value: float, unit: str) -> str:
    return f"{cells.significant(value)} {unit}" if unit else f"{value:.4f}"


_PUBLISHED: tuple[Column[Published], ...] = (
    words("published", lambda one: one.name, "what was published, and of what"),
    words("source", lambda one: one.source, "who published it", 1),
    Column(
        title="quoted",
        text=lambda one: _figure(one.quoted, one.unit),
        sort=lambda one: one.quoted,
        help="the number as published",
    ),
    Column(
        title="predicted",
        text=lambda one: _figure(one.predicted, one.unit),
        sort=lambda one: one.predicted,
        help="by the planner, from closed forms, simulation and declared hardware",
    ),
    words("error", lambda one: one.error, "predicted against quoted: of a share in points, else relatively"),
)
