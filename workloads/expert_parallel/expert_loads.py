"""What a step's routes make of experts and ranks: loads, drops, rows that travel, and the bytes that follow. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from bench.results.metrics import MetricValue, values
from workloads.costs.moe_costs import Moved, Sent, Sizes, dedup_ratio, sent_by
from workloads.expert_parallel.routing import imbalance, rank_loads


@dataclass(frozen=True, kw_only=True)
class Routed:
    """One source's microbatch in one layer: tokens that chose each expert (E), those kept, and rows by rank."""

    asked: Sequence[int]
    kept: Sequence[int]
    rows: Sequence[int]


Told = Sequence[Sequence[Routed]]
"""What one rank routed, by layer and then by microbatch."""


def merged(told: Sequence[Told], etp: int) -> list[Told]:
    """Return what each ``etp`` ranks in a row routed together: they take each other's tokens."""
    return [
        [
            [_together([of[layer][i] for of in told[first : first + etp]]) for i in range(len(told[0][layer]))]
            for layer in range(len(told[0]))
        ]
        for first in range(0, len(told), etp)
    ]


def _together(sources: Sequence[Routed]) -> Routed:
    return Routed(
        asked=_added([source.asked for source in sources]),
        kept=_added([source.kept for source in sources]),
        rows=_added([source.rows for source in sources]),
    )


def moved_in(sources: Sequence[Routed]) -> Moved:
    """Return who sends how much to whom among the ranks of one copy of the experts, in their order."""
    return Moved(
        pairs=[rank_loads(source.kept, len(sources)) for source in sources], rows=[source.rows for source in sources]
    )


def sent_in_step(variant: str, rank: int, copy: Sequence[Told], sizes: Sizes) -> list[Sent]:
    """Return what ``rank`` of a copy sends in each layer and microbatch."""
    return [
        sent_by(variant, rank, moved_in([told[layer][i] for told in copy]), sizes)
        for layer in range(len(copy[0]))
        for i in range(len(copy[0][layer]))
    ]


def expert_loads(told: Sequence[Told]) -> list[list[int]]:
    """Return by layer how many tokens of all ranks chose each expert, dropped ones among them."""
    return [_added([routed.asked for of in told for routed in of[layer]]) for layer in range(len(told[0]))]


def loads_of_ranks(told: Sequence[Told], ep: int) -> list[list[int]]:
    """Return by layer the pairs that each place's experts compute; each ``ep`` sources in a row are a copy."""
    found: list[list[int]] = []
    for layer in range(len(told[0])):
        loads: list[int] = []
        for first in range(0, len(told), ep):
            kept = _added([routed.kept for of in told[first : first + ep] for routed in of[layer]])
            loads += rank_loads(kept, ep)
        found.append(loads)
    return found


def load_metrics(told: Sequence[Told], ep: int, expected_drop: float | None) -> dict[str, MetricValue]:
    """Return imbalances, of the layer where they are largest, drop rate and deduplication ratio."""
    asked, ranks = expert_loads(told), loads_of_ranks(told, ep)
    total = sum(map(sum, asked))
    kept = sum(map(sum, ranks))
    copies = [told[first : first + ep] for first in range(0, len(told), ep)]
    moved = [
        moved_in([of[layer][i] for of in copy])
        for copy in copies
        for layer in range(len(told[0]))
        for i in range(len(told[0][layer]))
    ]
    found = {
        "imbalance.expert": _worst(asked),
        "imbalance.rank": _worst(ranks),
        "drop_rate": 1 - kept / total if total else None,
        "dedup_ratio": _mean_ratio(moved),
    }
    return values(found if expected_drop is None else {**found, "drop_rate_expected": expected_drop})


def _added(loads: Sequence[Sequence[int]]) -> list[int]:
    return reduce(lambda one, other: [a + b for a, b in zip(one, other, strict=True)], map(list, loads))


def _worst(by_layer: Sequence[Sequence[int]]) -> float | None:
    return max((found for loads in by_layer if (found := imbalance(loads)) is not None), default=None)


def _mean_ratio(moved: Sequence[Moved]) -> float | None:
    """Return the ratio of all together, each flight's weighed by its pairs."""
    if not moved:
        return None
    ranks = len(moved[0].pairs)
    pairs = [[sum(one.pairs[i][j] for one in moved) for j in range(ranks)] for i in range(ranks)]
    rows = [[sum(one.rows[i][j] for one in moved) for j in range(ranks)] for i in range(ranks)]
    return dedup_ratio(Moved(pairs=pairs, rows=rows))
