"""Routes that a router's own scores contradict are counted, unless the scores are too near to tell."""

import pytest
import torch
from torch import Tensor

from workloads.experts.misrouted import NEAR, count_misrouted, count_misrouted_in
from workloads.experts.moe import exchange_ffns, mixtures, take_routes
from workloads.experts.moe_case import moe_of
from workloads.model import build
from workloads.shapes import Shape

SCORES = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
SHAPE = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64)


@pytest.mark.parametrize(
    ("routes", "wrong"),
    [
        ([[0, 1], [2, 3]], 0),
        ([[1, 0], [3, 2]], 0),
        ([[0, 2], [3, 2]], 1),
        ([[0, 2], [0, 1]], 2),
        ([[0, 0], [3, 2]], 1),
    ],
)
def test_each_token_that_left_a_better_expert_out_counts_once(routes: list[list[int]], wrong: int) -> None:
    assert count_misrouted(SCORES, torch.tensor(routes), 1e-5) == wrong


def test_near_scores_may_come_in_any_order() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.3 + 1e-6, 0.0]])
    assert count_misrouted(scores, torch.tensor([[0, 1]]), 1e-5) == 0
    assert count_misrouted(scores, torch.tensor([[0, 1]]), 1e-7) == 1
    assert NEAR[torch.float32] < 1e-4


def test_all_layers_of_a_model_are_compared() -> None:
    moe = moe_of({"microbatch": 2}, SHAPE, 1)
    model = build(SHAPE, 0, torch.device("cpu"))
    exchange_ffns(model, SHAPE, moe, 0, dense=True)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens)
    right = {n: mixture.chosen[0] for n, mixture in enumerate(mixtures(model))}

    def counted(chosen: dict[int, Tensor]) -> int:
        take_routes(model, 0, chosen)
        return count_misrouted_in(model, lambda: model(tokens), chosen, torch.float32)

    assert sorted(right) == [0, 1]
    assert counted(right) == 0
    other = right[1].clone()
    other[5] = (other[5] + 1) % 8
    assert counted({0: right[0], 1: other}) == 1
    assert not any(mixture.router._forward_hooks for mixture in mixtures(model))
