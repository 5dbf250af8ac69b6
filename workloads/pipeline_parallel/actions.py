"""What a rank of a pipeline does, one action after another, and how torch writes that down."""

import csv
import io
import re
from typing import Literal

from bench.results.details import Action
from bench.text import UserError

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


Order = tuple[tuple[Action | None, ...], ...]  # by rank; None is a step in which a rank does nothing

# What an action leaves behind for others: a stage's output ("F"), its input's gradient ("I"), its weights' ("W").
Result = tuple[int, Literal["F", "I", "W"], int]


def result(action: Action) -> Result:
    """Return what others wait for of ``action``: of a full backward that is its input gradient."""
    return action.stage, "I" if action.kind == "B" else action.kind, action.microbatch


def message(action: Action, num_stages: int) -> Result | None:
    """Return what ``action`` needs of the stage beside it: a forward the output before, a backward the gradient after.

    None for the first stage's forward, the last one's backward, and a weight gradient, which need nobody.
    """
    if action.kind == "F":
        return (action.stage - 1, "F", action.microbatch) if action.stage > 0 else None
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return action.stage + 1, "I", action.microbatch
    return None


def needs(action: Action, num_stages: int) -> tuple[Result, ...]:
    """Return all that ``action`` needs: the message, and of its own stage the forward or the input gradient before."""
    received = message(action, num_stages)
    if action.kind == "F":
        return () if received is None else (received,)
    own: Result = (action.stage, "I" if action.kind == "W" else "F", action.microbatch)
    return (own,) if received is None else (own, received)


def format_csv(order: Order) -> str:
    """Return ``order`` as torch's compute-only CSV: a row per rank, a cell per step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([["" if action is None else str(action) for action in row] for row in order])
    return text.getvalue()


def parse_csv(text: str) -> Order:
    """Return the order in torch's compute-only CSV; ``UserError`` names the row and the cell that cannot be read.

    ``(1F0;2B3)OVERLAP_F_B`` is read as its two actions in sequence, which is how torch runs it unless told otherwise.
    """
    rows = list(csv.reader(text.splitlines()))
    while rows and not rows[-1]:
        rows.pop()
    if not any(cell.strip() for row in rows for cell in row):
        raise UserError("the schedule is empty: a row per rank with actions such as 0F0,0B0 is needed")
    return tuple(
        tuple(action for step, cell in enumerate(row) for action in _parse_cell(cell, rank, step))
        for rank, row in enumerate(rows)
    )


def _parse_cell(cell: str, rank: int, step: int) -> tuple[Action | None, ...]:
    overlap = _OVERLAP.fullmatch(cell.strip())
    try:
        if overlap is not None:
            return tuple(Action.parse(part) for part in overlap[1].split(";"))
        return (Action.parse(cell) if cell.strip() else None,)
    except UserError as error:
        raise UserError(f"rank {rank}, step {step}: {error}") from None
