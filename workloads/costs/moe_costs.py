"""Closed forms of what an expert axis sends: bytes that leave a rank for other ranks, by variant and direction. Pure.

Routes are the step's own, counted by who sends to whom. What a rank keeps for its own experts is not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COUNT_BYTES = 8
ROUTE_BYTES = 4

Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Who sends how much: ``pairs[source][rank]`` of token and expert, ``rows`` of token and rank, each once."""

    pairs: Matrix
    rows: Matrix


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that bytes depend on; ``tokens`` are a rank's, ``slots`` an expert's capacity, 0 without one."""

    hidden: int
    element_bytes: int
    top_k: int
    tokens: int
    experts_per_rank: int
    slots: int = 0
    chunks: int = 1


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sends to others in one layer and microbatch.

    ``dispatch`` are tokens on their way to experts, ``combine`` what comes back; gradients go against their direction:
    a source gets back what it sent, and sends again for it. ``told`` are counts and routes, forward alone; ``weights``
    travel with tokens where experts need them.
    """

    dispatch: float
    combine: float
    told: float = 0.0
    weights: float = 0.0
    weights_backward: float = 0.0

    @property
    def forward(self) -> float:
        return self.dispatch + self.combine + self.told + self.weights

    @property
    def backward(self) -> float:
        return self.dispatch + self.combine + self.weights_backward


def sent_by(variant: str, rank: int, moved: Moved, sizes: Sizes) -> Sent:
    """Return what ``rank`` of the axis sends; nothing where it is alone."""
    others, weights = len(moved.pairs) - 1, sizes.top_k * sizes.element_bytes
    routes = sizes.top_k * ROUTE_BYTES
    if variant == "all_to_all":
        (away, back), weights = _across(moved.pairs, rank), 0
        told = sizes.chunks * others * sizes.experts_per_rank * COUNT_BYTES
    elif variant == "padded":
        away = back = others * sizes.experts_per_rank * sizes.slots
        told = weights = 0
    elif variant == "allgather":
        away = back = others * sizes.tokens
        told = away * routes
    elif variant == "dedup":
        away, back = _across(moved.rows, rank)
        told = others * COUNT_BYTES + away * routes
    else:
        raise ValueError(f"variant({variant}) is none of all_to_all, padded, allgather, dedup")
    row = sizes.hidden * sizes.element_bytes
    return Sent(
        dispatch=away * row, combine=back * row, told=told, weights=away * weights, weights_backward=back * weights
    )


def _across(moved: Matrix, rank: int) -> tuple[int, int]:
    """Return how much goes from a rank to others, and from others to it."""
    return sum(moved[rank]) - moved[rank][rank], sum(of[rank] for of in moved) - moved[rank][rank]


def dedup_ratio(moved: Moved) -> float | None:
    """Return rows of token and rank per pair of token and expert, of what leaves ranks; None where nothing does."""
    rows, pairs = (sum(_across(of, rank)[0] for rank in range(len(of))) for of in (moved.rows, moved.pairs))
    return rows / pairs if pairs else None
