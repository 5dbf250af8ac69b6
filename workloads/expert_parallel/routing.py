"""Synthetic expert routing: how popular each expert is among the tokens. Pure."""

import random
from collections.abc import Sequence

NO_EXPERT = -1
"""The expert id of a dropped pair of token and expert."""
ROUTER = "router"
"""The routing in which the trained router selects experts."""
BALANCED = "balanced"
ZIPF = "zipf"
HOT_RANK = "hot_rank"
ROUTINGS = (ROUTER, BALANCED, ZIPF, HOT_RANK)
HOT_FACTOR = 3.0
"""The popularity of hot experts relative to others."""


def compute_popularity(routing: str, experts: int, *, ranks: int, seed: int) -> list[float]:
    """Return the popularity of each expert relative to others.

    With ``zipf``, the r-th expert in a random order has the popularity 1 / r. The hot experts of
    ``hot_rank`` are the first of ``ranks`` equal blocks of experts.
    """
    if routing == ZIPF:
        order = random.Random(f"popularity {seed}").sample(range(1, experts + 1), experts)
        return [1 / rank for rank in order]
    popularity = [1.0] * experts
    if routing == HOT_RANK:
        hot_experts = experts // min(max(ranks, 2), experts)
        popularity[:hot_experts] = [HOT_FACTOR] * hot_experts
    return popularity


def compute_imbalance(loads: Sequence[float]) -> float | None:
    """Return the maximum load relative to the mean, None if all loads are 0."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None
