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

PARAMS = {**make_params("ep_step", {"sequence": 8, "experts": 4, "ep": 1}), "microbatch": 2}
SPEC = StepSpec.of(PARAMS)


def make_routes(positions: list[int], routing: str = "zipf") -> Routes:
    """Return the routes of a rank with some positions of each sequence."""
    moe = moe_of({**PARAMS, "routing": routing}, SPEC.shape, 1)
    world: Any = SimpleNamespace(size=2, seed=3, device=torch.device("cpu"))
    rank_routes = Routes(world, SPEC, moe, positions)
    rank_routes.begin(0, range(8))
    return rank_routes


def make_layers(count: int = 1) -> dict[int, MoeLayer]:
    moe = moe_of(PARAMS, SPEC.shape, 1)
    return {2 + number: MoeLayer(SPEC.shape, moe) for number in range(count)}


def given_routes(layer: MoeLayer) -> Tensor:
    assert layer.given is not None
    return layer.given


def test_generated_routes_of_whole_microbatch() -> None:
    layers = make_layers()
    rank_routes = make_routes([0])
    rank_routes.give(layers, 3, whole=True)
    assert rank_routes.generator is not None
    expected = routes(rank_routes.generator, 0, 3 * 16, 16)
    assert given_routes(layers[2]).tolist() == [list(experts) for experts in expected]


@pytest.mark.parametrize("positions", [[0, 1], [5, 7, 2]])
def test_generated_routes_of_positions(positions: list[int]) -> None:
    complete, part = make_layers(), make_layers()
    make_routes([0]).give(complete, 3, whole=True)
    make_routes(positions).give(part, 3)
    by_position = given_routes(complete[2]).view(2, 8, 2)
    assert torch.equal(given_routes(part[2]), by_position[:, positions].flatten(0, 1))
    assert part[2].microbatch == 3


def test_routes_change_with_step_and_microbatch() -> None:
    rank_routes = make_routes(list(range(8)))
    layers = make_layers(3)
    by_call = []
    for step in (0, 1, 0):
        rank_routes.begin(step, [0, 1])
        with pytest.MonkeyPatch.context() as patch:
            # Drawing must not take time within the step.
            patch.setattr(routes_module, "routes", lambda *_: pytest.fail("drawn within the step"))
            for microbatch in (0, 1):
                rank_routes.give(layers, microbatch)
                assert torch.equal(given_routes(layers[3]), given_routes(layers[2]))
                by_call.append(given_routes(layers[2]).tolist())
    assert by_call[:2] == by_call[4:]
    assert by_call[0] not in by_call[1:4]


def test_router_chooses_without_generator() -> None:
    layers = make_layers()
    make_routes([0, 1], routing="router").give(layers, 0)
    assert layers[2].given is None


@pytest.mark.parametrize(
    ("chosen", "misrouted"),
    [
        ([[0, 1], [2, 3]], 0),
        ([[1, 0], [3, 2]], 0),
        ([[0, 2], [3, 2]], 1),
        ([[0, 2], [0, 1]], 2),
        ([[0, 0], [3, 2]], 1),
    ],
)
def test_count_misrouted_tokens(chosen: list[list[int]], misrouted: int) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert count_misrouted(scores, torch.tensor(chosen), 1e-5) == misrouted


@pytest.mark.parametrize(("limit", "misrouted"), [(1e-5, 0), (1e-7, 1)])
def test_count_misrouted_ignores_near_scores(limit: float, misrouted: int) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.3 + 1e-6, 0.0]])
    assert count_misrouted(scores, torch.tensor([[0, 1]]), limit) == misrouted
