"""Routes are a token's own, whichever rank takes it, drawn before a step is timed, and held against one router's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel import routes as routes_module
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routes import NEAR, Routes, count_misrouted
from parbench.workloads.expert_parallel.routing import NOWHERE, routes
from tests.support.ep_steps import make_params

PARAMS = {**make_params("ep_step", {"sequence": 8, "experts": 4, "ep": 1}), "microbatch": 2}
OPTIONS = StepSpec.of(PARAMS)


class OneOf:
    """What routes ask of a world: each rank of it tells what it took, one after the other."""

    size, seed, device = 2, 3, torch.device("cpu")

    def __init__(self) -> None:
        self.told: list[object] = []

    def gather(self, found: object) -> list[object]:
        self.told.append(found)
        return self.told


def routes_at(mine: list[int], world: Any = None, routing: str = "zipf") -> Routes:
    moe = moe_of({**PARAMS, "routing": routing}, OPTIONS.shape, 1)
    given: Any = world or OneOf()
    found = Routes(given, OPTIONS, moe, mine)
    found.begin(0, range(8))
    return found


def layers(count: int = 1) -> dict[int, MoeLayer]:
    moe = moe_of(PARAMS, OPTIONS.shape, 1)
    return {2 + n: MoeLayer(OPTIONS.shape, moe) for n in range(count)}


def given(mixture: MoeLayer) -> Tensor:
    assert mixture.given is not None
    return mixture.given


def test_parts_of_a_generators_routes_are_cut_by_position_out_of_the_microbatchs_part_of_the_batch() -> (
    None
):
    whole, mine_of = layers(), layers()
    one = routes_at([0])
    one.give(whole, 3, whole=True)
    assert one.generator is not None
    assert [tuple(of) for of in given(whole[2]).tolist()] == routes(one.generator, 0, 3 * 16, 16)
    for mine in ([0, 1], [5, 7, 2]):
        routes_at(mine).give(mine_of, 3)
        assert torch.equal(
            given(mine_of[2]).view(2, len(mine), 2), given(whole[2]).view(2, 8, 2)[:, mine]
        )
    assert mine_of[2].microbatch == 3


def test_routes_change_with_step_and_microbatch_and_are_drawn_before_the_step_is_timed() -> None:
    taken, mixtures = routes_at(list(range(8))), layers(3)
    seen = []
    for step in (0, 1, 0):
        taken.begin(step, [0, 1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes_module, "routes", lambda *_: pytest.fail("drawn within the step"))
            for microbatch in (0, 1):
                taken.give(mixtures, microbatch)
                assert (
                    len({id(mixture.given) for mixture in mixtures.values()}) == 1
                )  # the same in all layers
                seen.append(given(mixtures[2]).tolist())
    assert seen[:2] == seen[4:]
    assert seen[0] not in seen[1:4]
    with pytest.raises(KeyError, match="8"):
        taken.give(mixtures, 8)
    routes_at([0, 1], routing="router").give(mixtures, 0)  # without a generator the router chooses
    assert mixtures[2].given is None


def test_what_ranks_took_is_given_again_by_position_and_a_token_that_no_rank_took_goes_nowhere() -> (
    None
):
    expected, world = {layer: torch.randint(4, (2, 8, 2)) for layer in (2, 3)}, OneOf()
    for mine in ([0, 3, 5], [1, 2, 4, 6], [1, 0]):
        mixtures, one = layers(2), routes_at(mine, world, routing="router")
        for layer, mixture in mixtures.items():
            mixture.chosen[6] = expected[layer][:, mine].flatten(0, 1)
        one.frozen = one._taken(mixtures)
    assert one.frozen is not None
    assert one.frozen.keys() == {6}
    one.give(mixtures, 6)
    for layer, mixture in mixtures.items():
        assert torch.equal(one.frozen[6][layer][:, :7], expected[layer][:, :7])
        assert (one.frozen[6][layer][:, 7] == NOWHERE).all()
        assert torch.equal(given(mixture), expected[layer][:, [1, 0]].flatten(0, 1))
    one.give(mixtures, 6, whole=True)
    assert torch.equal(given(mixtures[3]), one.frozen[6][3].flatten(0, 1))


def test_each_token_that_left_a_better_expert_out_counts_once_unless_scores_are_near() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    for taken, wrong in (
        ([[0, 1], [2, 3]], 0),
        ([[1, 0], [3, 2]], 0),
        ([[0, 2], [3, 2]], 1),
        ([[0, 2], [0, 1]], 2),
        ([[0, 0], [3, 2]], 1),
    ):
        assert count_misrouted(scores, torch.tensor(taken), 1e-5) == wrong, taken
    near = torch.tensor([[0.4, 0.3, 0.3 + 1e-6, 0.0]])
    assert [count_misrouted(near, torch.tensor([[0, 1]]), limit) for limit in (1e-5, 1e-7)] == [
        0,
        1,
    ]
    assert NEAR[torch.float32] < 1e-4
