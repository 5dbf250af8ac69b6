"""Synthetic expert routing: how popular each expert is among the tokens. Pure."""

import math
import random
from collections.abc import Sequence

from parbench.bench.text import UserError, format_choices

NO_EXPERT = -1
"""The expert id of a dropped pair of token and expert."""
ROUTER = "router"
"""The routing in which the trained router selects experts."""
BALANCED = "balanced"
ZIPF = "zipf"
HOT_RANK = "hot_rank"
_DEFAULT_STRENGTH = {
    BALANCED: 0.0,  # every expert takes as many tokens
    ZIPF: 1.0,  # the popularity of the r-th expert in a random order is r^-S
    HOT_RANK: 3.0,  # the first rank's experts are S times as popular as the others
}
GENERATORS = tuple(_DEFAULT_STRENGTH)
NAMES = (ROUTER, *GENERATORS)


def parse_routing(text: str) -> tuple[str, float]:
    """Return name and strength of ``NAME`` or ``NAME:STRENGTH``; raise ``UserError`` otherwise."""
    name, colon, number = text.partition(":")
    if name not in NAMES:
        raise UserError(
            f"routing = {text!r} is not known: routing is {format_choices(NAMES, name)}"
        )
    if not colon:
        return name, _DEFAULT_STRENGTH.get(name, 0.0)
    if name in (ROUTER, BALANCED):
        raise UserError(f"routing = {text!r} is not allowed: {name} has no strength")
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if not 0 < strength < math.inf:
        raise UserError(
            f"routing = {text!r} is not allowed: the strength of {name} is a number above 0"
        )
    return name, strength


def compute_popularity(
    name: str, strength: float, experts: int, *, ranks: int, seed: int
) -> list[float]:
    """Return the popularity of each expert relative to others.

    The hot experts of ``hot_rank`` are those of the first of ``ranks`` equal blocks.
    """
    if name == ZIPF:
        order = random.Random(f"popularity {seed}").sample(range(1, experts + 1), experts)
        return [rank**-strength for rank in order]
    popularity = [1.0] * experts
    if name == HOT_RANK:
        hot_experts = experts // min(max(ranks, 2), experts)
        popularity[:hot_experts] = [strength] * hot_experts
    return popularity


def compute_imbalance(loads: Sequence[float]) -> float | None:
    """Return max / mean, None without load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None
