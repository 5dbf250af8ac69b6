"""The columns of the pipeline steps' tables, as data: bubbles beside what explains them, and schedules side by side.

What no row knows has no column.
"""

from collections.abc import Sequence

from reports import cells
from reports.columns import Column, figure, headline, known, lifted, metric_columns, words
from reports.parallel.pipeline import Pipeline
from reports.parallel.schedule_comparison import Entry, schedule_labels

_count = cells.formatted("{:.4g}")


def pipeline_columns(found: Sequence[Pipeline]) -> tuple[Column[Pipeline], ...]:
    """Return the columns of pipeline steps: times are means over ranks, of the traced pass."""
    activations: Column[Pipeline] = figure(
        "activations", lambda one: one.activation_bytes, cells.num_bytes, "memory of activations, the fullest rank", 7
    )
    return (
        _names(found),
        figure("P", lambda one: one.facts.ranks, _count, "ranks of the pipeline", 0),
        figure("M", lambda one: one.facts.microbatches, _count, "microbatches of a step", 0),
        figure("v", lambda one: one.facts.chunks, _count, "stages of a rank, its chunks", 0),
        lifted(headline("step_time"), lambda one: one.row),
        *(lifted(column, lambda one: one.row) for column in metric_columns("pipelines", [one.row for one in found])),
        *known((activations,), found),
    )


def compared_columns(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the columns of schedules side by side."""
    measured: tuple[Column[Entry], ...] = (
        figure("bubble fraction", lambda one: one.simulated.bubble_fraction, cells.percent, "by makespan", 0),
        figure("in flight", lambda one: one.simulated.in_flight, _count, "microbatches that a rank holds, at most", 3),
        figure(
            "activations",
            lambda one: one.simulated.activation_bytes,
            cells.num_bytes,
            "the fullest rank's, measured or what its layers hold",
            2,
        ),
    )
    return (
        words("schedule", lambda one: cells.visible(one.label), "the order of actions"),
        figure("v", lambda one: one.simulated.chunks, _count, "stages of a rank, its chunks", 0),
        figure("step time", lambda one: one.simulated.step_seconds, cells.duration, "measured or simulated", 0),
        words("source", _source, "measured by a case of this run, or simulated from the first one's times"),
        *known(measured, entries),
        *((_reason(),) if any(one.simulated.why_not for one in entries) else ()),
    )


def _names(found: Sequence[Pipeline]) -> Column[Pipeline]:
    labels = schedule_labels(found)
    help_text = "the order of actions, with the parameters in which steps differ"
    return words("schedule", lambda one: labels[one.row.case.id], help_text)


def _source(entry: Entry) -> str:
    if entry.simulated.why_not:
        return cells.UNKNOWN
    return "measured" if entry.simulated.measured else "simulated"


def _reason() -> Column[Entry]:
    return words("cannot run", lambda one: one.simulated.why_not or cells.UNKNOWN, "what the schedule needs")
