"""Loads, drops and bytes of an expert axis."""

import pytest
import torch

from parbench.workloads.expert_parallel.expert_probe import (
    Routed,
    Sent,
    Sizes,
    expert_loads,
    load_metrics,
    loads_of_ranks,
    routed_by,
    sent_by,
)
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routing import NOWHERE
from parbench.workloads.model.shapes import SHAPES

EVEN = [2, 2, 2, 2]
HOT = [6, 2, 0, 0]
HOT_KEPT = [4, 2, 0, 0]  # an expert has four slots
RANKS = [
    Routed(
        asked=torch.tensor([[EVEN, HOT], [EVEN, EVEN]]),
        kept=torch.tensor([[EVEN, HOT_KEPT], [EVEN, EVEN]]),
    ),
    Routed(
        asked=torch.tensor([[HOT, HOT], [EVEN, EVEN]]),
        kept=torch.tensor([[HOT_KEPT, HOT_KEPT], [EVEN, EVEN]]),
    ),
]
"""Pairs of two ranks by layer, microbatch and expert; each rank has two experts."""


def test_all_to_all_sends_pairs_and_their_counts() -> None:
    """Rank 0 keeps 3 pairs and sends 5; rank 1 sends 1 and keeps 7."""
    pairs = [[3, 5], [1, 7]]
    sizes = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3)
    row = 10 * 4
    sent = sent_by("all_to_all", 0, pairs, sizes)
    assert sent == Sent(dispatch=5 * row, combine=1 * row, told=3 * 8)
    assert sent.forward == 6 * row + 3 * 8
    assert sent.backward == 6 * row


def test_loads_of_experts_and_ranks() -> None:
    assert expert_loads(RANKS) == [[20, 8, 2, 2], [8, 8, 8, 8]]
    assert loads_of_ranks(RANKS, 2) == [[22, 4], [16, 16]]


def test_load_metrics_are_of_worst_layer() -> None:
    metrics = load_metrics(RANKS, 2, 0.5)
    assert metrics["imbalance.expert"].value == 20 / 8
    assert metrics["imbalance.rank"].value == 22 / 13
    assert metrics["drop_rate"].value == pytest.approx(6 / 64)
    assert metrics["drop_rate_expected"].value == 0.5


def test_routed_by_counts_asked_and_kept_pairs() -> None:
    shape = SHAPES["tiny"]
    params = {"microbatch": 1, "ep": 2, "experts": 4, "capacity": 1.0}
    layer = MoeLayer(shape, moe_of(params, shape, 2))
    layer.chosen[5] = torch.tensor([[0, 1], [0, 2], [0, 3], [NOWHERE, NOWHERE]])
    asked, kept = routed_by([layer], 4)
    assert asked.flatten().tolist() == [3, 1, 1, 1]
    assert kept.flatten().tolist() == [2, 1, 1, 1]
