"""Closed forms of what an expert axis sends: bytes that leave a rank for other ranks, by variant and direction. Pure.

h is the hidden size, e the bytes of an element, k the experts of a token, T the tokens of a rank's microbatch, R the
ranks of the axis. What a rank keeps for its own experts is not sent and does not count.
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
    """The sizes that bytes depend on; ``slots`` is an expert's capacity, 0 without one."""

    hidden: int
    element_bytes: int
    top_k: int
    tokens: int
    experts_per_rank: int
    slots: int = 0
    chunks: int = 1


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sends to others in one layer and microbatch; ``told`` are counts and routes, forward alone.

    ``dispatch`` are tokens on their way to experts, ``combine`` what comes back; each backward pass is a flight of
    gradients against its direction, and ``weights`` travel with tokens where experts need them.
    """

    dispatch: float
    combine: float
    dispatch_backward: float
    combine_backward: float
    told: float = 0.0
    weights: float = 0.0
    weights_backward: float = 0.0

    @property
    def forward(self) -> float:
        """All that goes in the forward pass."""
        return self.dispatch + self.combine + self.told + self.weights

    @property
    def backward(self) -> float:
        """All that goes in the backward pass."""
        return self.dispatch_backward + self.combine_backward + self.weights_backward


def sent_by(variant: str, rank: int, moved: Moved, sizes: Sizes) -> Sent:
    """Return what ``rank`` of the axis sends; nothing where it is alone."""
    others = len(moved.pairs) - 1
    row = sizes.hidden * sizes.element_bytes
    if not others:
        return _there_and_back(0.0, 0.0)
    if variant == "all_to_all":
        away, back = _away(moved.pairs, rank) * row, _back(moved.pairs, rank) * row
        return _there_and_back(away, back, told=sizes.chunks * others * sizes.experts_per_rank * COUNT_BYTES)
    if variant == "padded":
        slots = others * sizes.experts_per_rank * sizes.slots * row
        return _there_and_back(slots, slots)
    weights = sizes.top_k * sizes.element_bytes
    if variant == "allgather":
        whole = others * sizes.tokens
        return _there_and_back(
            whole * row, whole * row, told=whole * sizes.top_k * ROUTE_BYTES, weights=(whole * weights, whole * weights)
        )
    if variant == "dedup":
        away, back = _away(moved.rows, rank), _back(moved.rows, rank)
        told = others * COUNT_BYTES + away * sizes.top_k * ROUTE_BYTES
        return _there_and_back(away * row, back * row, told=told, weights=(away * weights, back * weights))
    raise ValueError(f"variant({variant}) is none of all_to_all, padded, allgather, dedup")


def _there_and_back(away: float, back: float, *, told: float = 0.0, weights: tuple[float, float] = (0.0, 0.0)) -> Sent:
    """Return bytes whose gradients go the other way: a source gets back what it sent, and sends again for it."""
    return Sent(
        dispatch=away,
        combine=back,
        dispatch_backward=back,
        combine_backward=away,
        told=told,
        weights=weights[0],
        weights_backward=weights[1],
    )


def _away(moved: Matrix, rank: int) -> int:
    return sum(count for other, count in enumerate(moved[rank]) if other != rank)


def _back(moved: Matrix, rank: int) -> int:
    return sum(row[rank] for source, row in enumerate(moved) if source != rank)


def even_dispatch_bytes(tokens: int, top_k: int, hidden: int, element_bytes: int, ranks: int) -> float:
    """Return T k h e (R-1)/R: what a rank dispatches if its pairs are even over ranks and nothing is dropped."""
    return tokens * top_k * hidden * element_bytes * (ranks - 1) / ranks


def dedup_ratio(moved: Moved) -> float | None:
    """Return rows of token and rank per pair of token and expert, of what leaves ranks; None where nothing does."""
    ranks = range(len(moved.pairs))
    pairs = sum(_away(moved.pairs, rank) for rank in ranks)
    return sum(_away(moved.rows, rank) for rank in ranks) / pairs if pairs else None
