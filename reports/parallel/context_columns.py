"""The columns of context-parallel steps, as data: a step's attention as a whole, and communication by communication.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence

from reports import cells
from reports.columns import Column, T, figure, headline, known, lifted, metric_column, metric_columns, words
from reports.labels import differences
from reports.parallel.context import Context, Hopped

_DIRECTIONS = ("forward", "backward")


def context_columns(found: Sequence[Context]) -> tuple[Column[Context], ...]:
    """Return the columns of context-parallel steps."""
    exposed_help = "attention's communication that no computation hides, of the traced step"
    part_help = "transfers' exposed time over their time alone: above 100 % where they are slower beside computation"
    rows = [one.row for one in found]
    columns: tuple[Column[Context], ...] = (
        lifted(metric_column("tokens_per_second", 5), lambda one: one.row),
        figure("bytes sent", lambda one: one.sent_bytes(), cells.num_bytes, "by a rank's attention in a step", 3),
        *(_ratio(direction) for direction in _DIRECTIONS),
        figure("exposed cp", lambda one: one.exposed_seconds, cells.duration, exposed_help, 0),
        figure("exposed part", lambda one: one.exposed_part, cells.percent, part_help, 4),
        *(lifted(column, lambda one: one.row) for column in metric_columns("attention", rows)),
        lifted(metric_column("memory.activations", 6, title="activations"), lambda one: one.row),
    )
    return (
        *_identity(found, lambda one: one),
        lifted(headline("step_time"), lambda one: one.row),
        *known(columns, found),
    )


def hop_columns(found: Sequence[Hopped]) -> tuple[Column[Hopped], ...]:
    """Return the columns of attention's communications, each beside what it takes alone."""
    alone_help = "all of them, each timed with nothing beside it, on the slowest rank"
    exposed_help = "waits from when all peers had issued theirs, the rank with the most"
    part_help = "exposed over alone: above 100 % where transfers are slower beside computation"
    return (
        *_identity([one.context for one in found], lambda one: one.context),
        words("direction", lambda one: one.hop.direction, "of the step: forward or backward"),
        figure("step", lambda one: one.hop.step, cells.whole, "which step of the ring it overlaps, from 0"),
        words("what", lambda one: one.hop.what, "what moves"),
        figure("bytes", lambda one: one.hop.num_bytes, cells.num_bytes, "of one of them, on a rank", 3),
        figure("count", lambda one: one.hop.count, cells.whole, "how often a step makes it: layers x microbatches", 4),
        figure("alone", lambda one: one.hop.comm_seconds, cells.duration, alone_help),
        figure("exposed", lambda one: one.hop.exposed_seconds, cells.duration, exposed_help),
        figure("exposed part", _exposed_part, cells.percent, part_help, 1),
        figure("waited", lambda one: one.hop.wait_seconds, cells.duration, "waits, for peers that come late too", 2),
        *known(
            (
                figure(
                    "pairs max/mean",
                    _unevenness,
                    cells.formatted("{:.3g}"),
                    "pairs of ranks in this step of the ring",
                    5,
                ),
            ),
            found,
        ),
    )


def _identity(found: Sequence[Context], context_of: Callable[[T], Context]) -> tuple[Column[T], ...]:
    """Return the columns that tell steps apart; ``found`` are all steps, for their names."""
    others = differences([one.row for one in found], ("method", "ulysses", "mask", "sequence"))

    def name(item: T) -> str:
        one = context_of(item)
        return cells.visible(f"{one.method} {others[one.row.case.id]}")

    return (
        words("method", name, "how queries meet keys of other ranks, with the parameters in which steps differ"),
        words("mask", lambda item: cells.visible(context_of(item).facts.mask), "what a query sees"),
        figure("cp", lambda item: context_of(item).ranks, cells.whole, "ranks that share a sequence"),
        figure("sequence", lambda item: context_of(item).facts.sequence, cells.whole, "tokens of a whole sequence"),
    )


def _ratio(direction: str) -> Column[Context]:
    help_text = f"bytes sent {direction} over the closed form's, on the axis where they differ most"
    return figure(f"ratio {direction}", lambda one: one.bytes_ratio(direction), cells.formatted("{:.3f}"), help_text, 3)


def _exposed_part(one: Hopped) -> float | None:
    return one.hop.exposed_seconds / one.hop.comm_seconds if one.hop.comm_seconds else None


def _unevenness(one: Hopped) -> float | None:
    pairs = one.hop.pairs_by_rank
    return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else None
