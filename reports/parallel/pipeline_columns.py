"""The columns of the pipeline steps' tables, as data: bubbles beside what explains them, and schedules side by side.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence

from reports import cells
from reports.columns import Column, figure, known, words
from reports.parallel.pipeline import CAUSES, Pipeline
from reports.parallel.schedule_comparison import Entry, schedule_labels

_SIMULATED = "the same as simulated from this step's own times"
_FORMULA = "the same by the schedule's closed form"
_CAUSE_HELP = {
    "schedule": "idle in a simulation with the mean time of each kind of action: what the schedule itself costs",
    "imbalance": "what each stage's own times add to that",
    "p2p": "what the links' latencies add to that",
    "rest": "what is left of the measured idle time: jitter and the host",
}


def pipeline_columns(found: Sequence[Pipeline]) -> tuple[Column[Pipeline], ...]:
    """Return the columns of pipeline steps: times are means over ranks, of the traced pass."""
    columns = (
        _metric("bubble fraction", "bubble_fraction", cells.percent, "idle over ranks x makespan, measured", 0),
        _metric("simulated", "bubble_fraction_simulated", cells.percent, _SIMULATED, 1),
        _metric("formula", "bubble_fraction_formula", cells.percent, _FORMULA, 2),
        _metric("bubble overhead", "bubble_overhead", cells.percent, "idle over busy time, measured", 9),
        _metric("fraction of span", "bubble_fraction_span", cells.percent, "idle of the idlest rank over its span", 8),
        _metric("idle", "idle", cells.duration, "time in which a rank runs no action, the mean over ranks", 5),
        *(_metric(f"idle: {cause}", f"idle_{cause}", cells.duration, _CAUSE_HELP[cause], 4) for cause in CAUSES),
        _metric("outside", "outside_pipeline", cells.duration, "what the step takes before and after its actions", 10),
        _metric("in flight", "in_flight", _count, "microbatches whose activations a rank holds, at most", 6),
        figure("activations", lambda one: one.activation_bytes, _bytes, "memory of activations, the fullest rank", 7),
    )
    return (
        _names(found),
        figure("P", lambda one: one.facts.ranks, _count, "ranks of the pipeline", 0),
        figure("M", lambda one: one.facts.microbatches, _count, "microbatches of a step", 0),
        figure("v", lambda one: one.facts.chunks, _count, "stages of a rank, its chunks", 0),
        _step_time(),
        *known(columns, found),
    )


def compared_columns(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the columns of schedules side by side."""
    measured: tuple[Column[Entry], ...] = (
        figure("bubble fraction", lambda one: one.simulated.bubble_fraction, cells.percent, "by makespan", 0),
        figure("in flight", lambda one: one.simulated.in_flight, _count, "microbatches that a rank holds, at most", 3),
        figure(
            "activations",
            lambda one: one.simulated.activation_bytes,
            _bytes,
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


def _step_time() -> Column[Pipeline]:
    return Column(
        title="step time",
        text=lambda one: cells.measured(one.row.metrics.get(one.row.headline)),
        sort=lambda one: one.row.value(one.row.headline),
        help="median with its 95 % interval",
    )


def _source(entry: Entry) -> str:
    if entry.simulated.why_not:
        return cells.UNKNOWN
    return "measured" if entry.simulated.measured else "simulated"


def _reason() -> Column[Entry]:
    return words("cannot run", lambda one: one.simulated.why_not or cells.UNKNOWN, "what the schedule needs")


def _metric(title: str, name: str, text: Callable[[float | None], str], help_text: str, drop: int) -> Column[Pipeline]:
    return figure(title, lambda one: one.row.value(name), text, help_text, drop)


def _count(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.4g}"


def _bytes(num_bytes: float | None) -> str:
    return cells.quantity(num_bytes, "B")
