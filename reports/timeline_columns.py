"""The columns of traced steps rank by rank, as data: what stands beside their timelines."""

from collections.abc import Sequence

from reports import cells
from reports.columns import Column, figure, words
from reports.labels import short_labels
from reports.summary import Row
from reports.timelines import Busy, stream_words


def busy_columns(steps: Sequence[Row], lines: Sequence[Busy]) -> tuple[Column[Busy], ...]:
    """Return the columns: step, rank, wall time, each phase's and each stream's; ``steps`` are all, for their names."""
    labels = short_labels(steps)
    phases = dict.fromkeys(phase for one in lines for phase in one.by_phase)
    streams = dict.fromkeys(stream for one in lines for stream in one.by_stream)
    return (
        words(
            "step", lambda one: labels[one.traced.row.case.id], "the step, with the parameters in which steps differ"
        ),
        figure("rank", lambda one: one.rank, cells.whole, "the rank", 0),
        figure("wall", lambda one: one.wall_seconds, cells.duration, "the traced step on this rank, from start to end"),
        *(_phase(phase) for phase in phases),
        *(_stream(stream) for stream in streams),
    )


def _phase(name: str) -> Column[Busy]:
    return figure(name, lambda one: one.by_phase.get(name), cells.duration, f"time in the step's own {name}")


def _stream(name: str) -> Column[Busy]:
    title = stream_words(name)
    help_text = f"time in which {title} was under way, overlaps counted once"
    return figure(title, lambda one: one.by_stream.get(name), cells.duration, help_text)
