"""The report on training steps. A parallelism with tables of its own is a function and a line in ``PANELS``."""

from collections.abc import Callable, Iterable
from typing import Any

from reports.breakdown import broken_down, memory_lines
from reports.findings import Findings
from reports.panels import Panel, Section
from reports.parallel.pipeline_columns import compared_columns, pipeline_columns
from reports.parallel.schedule_comparison import comparisons
from reports.step_columns import memory_columns, step_columns, step_notes, time_columns
from reports.terms import terms
from reports.timeline_columns import busy_columns
from reports.timelines import busy_ranks

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
