"""The tables of pipeline steps: bubbles beside what explains them, and schedules side by side."""

from collections.abc import Iterator, Sequence
from typing import Any

from parbench.bench.results.formatting import (
    format_bytes,
    format_percent,
    format_seconds,
    make_formatter,
    to_single_line,
)
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.pipelines import Entry, Pipeline, comparisons, schedule_labels
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.pipeline import chart_pipelines
from parbench.reports.report import Column, Table, known, number, words
from parbench.reports.sections.row_columns import headline, metric_columns

# of all charts together, so that the page stays under a megabyte
_MAX_BOXES = 5000
_count = make_formatter("{:.4g}")


def pipeline_tables(found: Analysis) -> Iterator[Table[Any]]:
    if found.pipelines:
        yield Table(
            id="pipelines",
            title="Pipelines",
            caption="bubbles by measurement, simulation and formula, and why ranks idle",
            columns=pipeline_columns(found.pipelines),
            rows=found.pipelines,
            figures=lambda: _draw(found.pipelines),
        )
    for i, one in enumerate(comparisons(found.pipelines), start=1):
        for measured, kind, caption in (
            (True, "measured", "by cases of this run"),
            (
                False,
                "simulated, not measured",
                "with the times that the first such step of this run measured",
            ),
        ):
            if entries := tuple(
                entry for entry in one.entries if entry.simulated.measured == measured
            ):
                yield Table(
                    id=f"schedules-{i}{'' if measured else '-simulated'}",
                    title=f"Schedules {kind}: {one.title}",
                    caption=caption,
                    columns=schedule_columns(entries),
                    rows=entries,
                )


def _draw(found: Sequence[Pipeline]) -> Iterator[Chart]:
    labels = schedule_labels(found)
    measured = [(labels[step.row.case.id], step) for step in found if step.facts.measured]
    return chart_pipelines(measured, _MAX_BOXES)


def pipeline_columns(found: Sequence[Pipeline]) -> tuple[Column[Pipeline], ...]:
    """Return the columns of pipeline steps: times are means over ranks, of the traced pass."""
    labels, rows = schedule_labels(found), [one.row for one in found]
    told = "the order of actions, with the parameters in which steps differ"
    activations: Column[Pipeline] = number(
        "activations",
        lambda one: one.activation_bytes,
        format_bytes,
        "memory of activations, the fullest rank",
    )
    return (
        words("schedule", lambda one: labels[one.row.case.id], told),
        number("P", lambda one: one.facts.ranks, _count, "ranks of the pipeline"),
        number("M", lambda one: one.facts.microbatches, _count, "microbatches of a step"),
        number("v", lambda one: one.facts.chunks, _count, "stages of a rank, its chunks"),
        *(
            column.of(lambda one: one.row)
            for column in (headline("step_time", rows), *metric_columns("pipelines", rows))
        ),
        *known((activations,), found),
    )


def schedule_columns(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    held_help = "the fullest rank's, measured or what its layers hold"
    measured: tuple[Column[Entry], ...] = (
        number(
            "bubble fraction",
            lambda one: one.simulated.bubble_fraction,
            format_percent,
            "by makespan",
        ),
        number(
            "in flight",
            lambda one: one.simulated.in_flight,
            _count,
            "microbatches that a rank holds, at most",
        ),
        number("activations", lambda one: one.simulated.activation_bytes, format_bytes, held_help),
    )
    return (
        words("schedule", lambda one: to_single_line(one.label), "the order of actions"),
        number("v", lambda one: one.simulated.chunks, _count, "stages of a rank, its chunks"),
        number(
            "step time",
            lambda one: one.simulated.step_seconds,
            format_seconds,
            "measured or simulated",
        ),
        *known(measured, entries),
    )
