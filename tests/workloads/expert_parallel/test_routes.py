"""Routes belong to a token, whichever rank takes it, and are compared with one router's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel import routes as routes_module
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routes import Routes, count_misrouted
from parbench.workloads.expert_parallel.routing import routes
from tests.support.ep_steps import make_params

SMALL = {"sequence": 8, "experts": 4, "ep": 1, "microbatch": 2}
PARAMS = make_params("ep_step", SMALL)
SPEC = StepSpec.of(PARAMS)
LAYER = 2


def make_routes(positions: list[int]) -> Routes:
    """Return the routes of a rank with some positions of each sequence."""
    moe = moe_of({**PARAMS, "routing": "zipf"}, SPEC.shape, 1)
    world: Any = SimpleNamespace(size=2, seed=3, device=torch.device("cpu"))
    rank_routes = Routes(world, SPEC, moe, positions)
    rank_routes.begin(0, range(8))
    return rank_routes


def give_routes(rank_routes: Routes, microbatch: int, *, whole: bool = False) -> Tensor:
    """Return the routes that a layer takes in a microbatch."""
    layer = MoeLayer(SPEC.shape, moe_of(PARAMS, SPEC.shape, 1))
    rank_routes.give({LAYER: layer}, microbatch, whole=whole)
    assert layer.microbatch == microbatch
    assert layer.given is not None
    return layer.given


def test_generated_routes_of_whole_microbatch() -> None:
    rank_routes = make_routes([0])
    actual = give_routes(rank_routes, 3, whole=True)
    assert rank_routes.generator is not None
    expected = routes(rank_routes.generator, 0, 3 * 16, 16)
    assert actual.tolist() == list(map(list, expected))


def test_generated_routes_of_positions() -> None:
    positions = [5, 7, 2]
    complete = give_routes(make_routes([0]), 3, whole=True)
    part = give_routes(make_routes(positions), 3)
    by_position = complete.view(2, 8, 2)
    assert torch.equal(part, by_position[:, positions].flatten(0, 1))


def test_routes_change_with_step_and_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_routes = make_routes(list(range(8)))
    drawn = []
    for step in (0, 1, 0):
        rank_routes.begin(step, [0, 1])
        with monkeypatch.context() as patch:
            # Drawing must not take time within the step.
            patch.setattr(
                routes_module, "routes", lambda *_: pytest.fail("drawn within the step")
            )
            drawn.append(give_routes(rank_routes, 0).tolist())
            drawn.append(give_routes(rank_routes, 1).tolist())
    assert drawn[:2] == drawn[4:]
    assert drawn[0] not in drawn[1:4]


@pytest.mark.parametrize(
    ("chosen", "misrouted"),
    [
        ([[1, 0], [3, 2]], 0),
        ([[0, 2], [0, 1]], 2),
        ([[0, 0], [3, 2]], 1),
    ],
)
def test_count_misrouted_tokens(chosen: list[list[int]], misrouted: int) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert count_misrouted(scores, torch.tensor(chosen), 1e-5) == misrouted


def test_count_misrouted_ignores_near_scores() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.3 + 1e-6, 0.0]])
    chosen = torch.tensor([[0, 1]])
    assert count_misrouted(scores, chosen, 1e-5) == 0
    assert count_misrouted(scores, chosen, 1e-7) == 1
