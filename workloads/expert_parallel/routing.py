"""Synthetic expert routing: how often each expert is chosen relative to the others. Pure."""

import random

NO_EXPERT = -1
"""The expert id of a dropped pair of token and expert."""
ROUTER = "router"
"""The routing in which the trained router selects experts."""
BALANCED = "balanced"
"""The routing in which all experts take as equal numbers of tokens as possible."""
ZIPF = "zipf"
"""The routing in which the popularity of experts follows Zipf's law."""
HOT_RANK = "hot_rank"
"""The routing in which the experts of one rank are more popular than all others."""
ROUTINGS = (ROUTER, BALANCED, ZIPF, HOT_RANK)
HOT_FACTOR = 3.0
"""The popularity of the experts of the hot rank. Other experts have popularity 1."""


def compute_popularity(routing: str, experts: int, *, ranks: int, seed: int) -> list[float]:
    """Return the popularity of each expert, in the order of expert ids.

    A token chooses an expert with a probability proportional to the expert's popularity. With
    ``zipf``, the r-th expert in a random order of ``seed`` has the popularity 1 / r. With
    ``hot_rank``, the experts of the first rank have ``HOT_FACTOR``, if ``experts`` are spread
    evenly over ``ranks`` ranks (at least two). All other popularities are 1.
    """
    if routing == ZIPF:
        order = random.Random(f"popularity {seed}").sample(range(1, experts + 1), experts)
        return [1 / rank for rank in order]
    popularity = [1.0] * experts
    if routing == HOT_RANK:
        hot_experts = experts // min(max(ranks, 2), experts)
        popularity[:hot_experts] = [HOT_FACTOR] * hot_experts
    return popularity
