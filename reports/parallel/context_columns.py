"""The columns of context-parallel steps, as data: a step's attention as a whole, and communication by communication.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence

from reports import cells
from reports.columns import Column, T, figure, known, words
from reports.labels import differences
from reports.parallel.context import Context, Hopped

_DIRECTIONS = ("forward", "backward")


def context_columns(found: Sequence[Context]) -> tuple[Column[Context], ...]:
    """Return the columns of context-parallel steps."""
    exposed_help = "attention's communication that no computation hides, of the traced step"
    part_help = "transfers' exposed time over their time alone: above 100 % where they are slower beside computation"
    columns: tuple[Column[Context], ...] = (
        figure("tokens/s", lambda one: one.row.value("tokens_per_second"), cells.significant, "tokens of all ranks", 5),
        figure("bytes sent", lambda one: one.sent_bytes(), _bytes, "by a rank's attention in a step, counted", 3),
        *(_ratio(direction) for direction in _DIRECTIONS),
        _metric(
            "balance", "balance", cells.percent, "pairs at the kernels: mean rank over the slowest of each step", 1
        ),
        _metric("ceiling", "balance_ceiling", cells.percent, "balance in closed form, of this mask and order", 2),
        figure("exposed cp", lambda one: one.exposed_seconds, cells.duration, exposed_help, 0),
        _metric("comm alone", "attention_comm", cells.duration, "attention's communication, each timed alone", 7),
        _metric("exposed hops", "attention_exposed", cells.duration, "waits from when all peers had issued theirs", 8),
        figure("exposed part", lambda one: one.exposed_part, cells.percent, part_help, 4),
        _metric(
            "waited", "attention_wait", cells.duration, "all that attention waits, for peers that come late too", 9
        ),
        _metric("activations", "memory.activations", _bytes, "memory of activations, the fullest rank", 6),
    )
    return (
        *_identity(found, lambda one: one),
        Column(
            title="step time",
            text=lambda one: cells.measured(one.row.metrics.get(one.row.headline)),
            sort=lambda one: one.row.value(one.row.headline),
            help="median with its 95 % interval",
        ),
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
        figure("step", lambda one: one.hop.step, _whole, "which step of the ring it overlaps, from 0"),
        words("what", lambda one: one.hop.what, "what moves"),
        figure("bytes", lambda one: one.hop.num_bytes, _bytes, "of one of them, on a rank", 3),
        figure("count", lambda one: one.hop.count, _whole, "how often a step makes it: layers x microbatches", 4),
        figure("alone", lambda one: one.hop.comm_seconds, cells.duration, alone_help),
        figure("exposed", lambda one: one.hop.exposed_seconds, cells.duration, exposed_help),
        figure("exposed part", _exposed_part, cells.percent, part_help, 1),
        figure("waited", lambda one: one.hop.wait_seconds, cells.duration, "waits, for peers that come late too", 2),
        *known((figure("pairs max/mean", _unevenness, _times, "pairs of ranks in this step of the ring", 5),), found),
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
        figure("cp", lambda item: context_of(item).ranks, _whole, "ranks that share a sequence"),
        figure("sequence", lambda item: context_of(item).facts.sequence, _whole, "tokens of a whole sequence"),
    )


def _ratio(direction: str) -> Column[Context]:
    help_text = f"bytes sent {direction} over the closed form's, on the axis where they differ most"
    return figure(f"ratio {direction}", lambda one: one.bytes_ratio(direction), _thousandths, help_text, 3)


def _metric(title: str, name: str, text: Callable[[float | None], str], help_text: str, drop: int) -> Column[Context]:
    return figure(title, lambda one: one.row.value(name), text, help_text, drop)


def _exposed_part(one: Hopped) -> float | None:
    return one.hop.exposed_seconds / one.hop.comm_seconds if one.hop.comm_seconds else None


def _unevenness(one: Hopped) -> float | None:
    pairs = one.hop.pairs_by_rank
    return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else None


def _bytes(num_bytes: float | None) -> str:
    return cells.quantity(num_bytes, "B")


def _whole(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.0f}"


def _thousandths(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.3f}"


def _times(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.3g}"
