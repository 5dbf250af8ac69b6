"""The experts of a token do not depend on its rank, and are compared with one router's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.expert_parallel.moe_layer import MoeLayer, count_misrouted
from parbench.workloads.presets import PRESETS
from parbench.workloads.step import step_routing
from parbench.workloads.step.step_routing import StepRouting, draw_experts
from tests.support.workloads.ep_steps import make_params
from tests.support.workloads.training_steps import Params

SMALL = {"sequence": 8, "experts": 4, "ep": 1, "microbatch": 2, "routing": "zipf"}
PARAMS = make_params("ep_step", SMALL)
SPEC = PRESETS["ep_step"](PARAMS, 1)
LAYER = 2


def make_routing(positions: list[int]) -> StepRouting:
    """Return the routing of a rank with some positions of each sequence."""
    world: Any = SimpleNamespace(size=2, seed=3, device=torch.device("cpu"))
    routing = StepRouting(world, SPEC, positions)
    routing.draw(0, range(8))
    return routing


def assign_experts(
    routing: StepRouting, microbatch: int, *, is_reference: bool = False
) -> Tensor:
    """Return the expert ids that a layer takes in a microbatch."""
    layer = MoeLayer(SPEC.shape, make_moe(PARAMS, SPEC.shape, 1))
    routing.assign({LAYER: layer}, microbatch, is_reference=is_reference)
    assert layer.microbatch == microbatch
    assert layer.assigned_ids is not None
    return layer.assigned_ids


def draw_loads(routing: str, *, experts: int = 8, top_k: int = 2, tokens: int = 4000) -> Tensor:
    """Return the share of tokens that take each expert, which are k different ones."""
    params: Params = {"routing": routing, "experts": experts, "top_k": top_k, "ep": 1}
    moe = make_moe(params, SPEC.shape, 1)
    ids = draw_experts(moe, tokens, seed=0, purpose="test")
    assert ids.shape == (tokens, top_k)
    assert int((ids.sort(1).values.diff(dim=1) == 0).sum()) == 0
    return torch.bincount(ids.flatten(), minlength=experts) / tokens


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (5, 3), (4, 4)])
def test_balanced_experts_have_equal_loads(experts: int, top_k: int) -> None:
    loads = draw_loads("balanced", experts=experts, top_k=top_k, tokens=20)
    assert loads.tolist() == pytest.approx([top_k / experts] * experts)


def test_popular_experts_have_more_tokens() -> None:
    """With one expert per token, the share of an expert is its popularity."""
    loads = draw_loads("zipf", top_k=1).sort(descending=True).values
    expected = 1 / torch.arange(1, 9)
    assert loads.tolist() == pytest.approx((expected / expected.sum()).tolist(), abs=0.02)


def test_rank_takes_its_positions() -> None:
    positions = [5, 7, 2]
    complete = assign_experts(make_routing([0]), 3, is_reference=True)
    part = assign_experts(make_routing(positions), 3)
    by_position = complete.view(2, 8, 2)
    assert torch.equal(part, by_position[:, positions].flatten(0, 1))


def test_experts_change_with_step_and_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = make_routing(list(range(8)))
    drawn = []
    for step in (0, 1, 0):
        routing.draw(step, [0, 1])
        with monkeypatch.context() as patch:
            # Drawing must not take time within the step.
            patch.setattr(
                step_routing, "draw_experts", lambda *_: pytest.fail("drawn within the step")
            )
            drawn.append(assign_experts(routing, 0).tolist())
            drawn.append(assign_experts(routing, 1).tolist())
    assert drawn[:2] == drawn[4:]
    assert drawn[0] not in drawn[1:4]


@pytest.mark.parametrize(
    ("expert_ids", "misrouted"),
    [
        ([[1, 0], [3, 2]], 0),
        ([[0, 2], [0, 1]], 2),
        ([[0, 0], [3, 2]], 1),
    ],
)
def test_count_misrouted_tokens(expert_ids: list[list[int]], misrouted: int) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert count_misrouted(scores, torch.tensor(expert_ids), 1e-5) == misrouted


def test_count_misrouted_ignores_near_scores() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.3 + 1e-6, 0.0]])
    expert_ids = torch.tensor([[0, 1]])
    assert count_misrouted(scores, expert_ids, 1e-5) == 0
    assert count_misrouted(scores, expert_ids, 1e-7) == 1
