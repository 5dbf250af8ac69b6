"""What a hybrid step is made of: a rank's tokens, sums of gradients, and routes by position and microbatch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from bench.world.world import World
from workloads.expert_parallel.moe_case import moe_of
from workloads.expert_parallel.moe_layer import MoeLayer
from workloads.mesh import mesh_routes as hybrid_routes
from workloads.mesh.axes import CP_METHODS, coordinate_of
from workloads.mesh.gradient_sums import sum_together
from workloads.mesh.mesh_case import Hybrid, hybrid_of
from workloads.mesh.mesh_context import plan_of, tokens_of
from workloads.mesh.mesh_routes import Routes
from workloads.model.shapes import SHAPES
from workloads.step.sent_bytes import counted

SIZES: dict[str, Any] = {"hidden": 32, "ffn": 64, "sequence": 8, "vocabulary": 50, "layers": 2}
SHAPE = replace(SHAPES["tiny"], **SIZES)


def hybrid(mesh: str, world: int, **more: Any) -> Hybrid:
    return hybrid_of({"mesh": mesh, **more}, SHAPES["tiny"], world)


def test_the_ranks_of_cp_and_tp_have_every_token_once() -> None:
    for mesh, world in {"cp=2,tp=2": 4, "tp=2,cp=2": 4, "dp=2,cp=4,tp=2": 16, "pp=2,tp=4": 8}.items():
        for method in CP_METHODS:
            if method == "ulysses" and "cp=4" in mesh:
                continue  # not so many heads
            case = hybrid(mesh, world, cp_method=method)
            places = [coordinate_of(case.mesh, rank) for rank in range(world)]
            mine = [tokens_of(case, 64, at).mine for at in places if at["dp"] == at["pp"] == 0]
            assert sorted(token for tokens in mine for token in tokens) == list(range(64)), (mesh, method)
            assert len({len(tokens) for tokens in mine}) == 1, (mesh, method)
    # a run of tp is of its part of cp in order, and without cp of the whole sequence
    case = hybrid("cp=2,tp=2", 4, cp_method="zigzag")
    found = [tokens_of(case, 8, {"cp": 0, "tp": tp}) for tp in (0, 1)]
    assert found[0].attended == found[1].attended == (0, 1, 6, 7)
    assert [tokens.mine for tokens in found] == [(0, 1), (6, 7)]
    assert plan_of(hybrid("tp=2", 2), 64).ranks == 1
    assert tokens_of(hybrid("tp=2", 2), 64, {"cp": 0, "tp": 1}).mine == tuple(range(32, 64))


def summed(world: World) -> tuple[list[list[float]], int]:
    """Return tensors of several sizes, one of none, after they were summed as one, and how many calls that took."""
    tensors = [torch.full((2, 3), world.rank + 1.0), torch.empty(0), torch.arange(4.0).view(2, 2).t()]
    num_calls = len(counted(lambda: sum_together(tensors, world.group), {"dp": world.group}))
    return [tensor.flatten().tolist() for tensor in tensors], num_calls


def test_tensors_of_any_shape_are_summed_in_one_call(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_hybrid_parts:summed") == [([[3.0] * 6, [], [0.0, 4.0, 2.0, 6.0]], 1)] * 2


MOE = moe_of({"ep": 1, "experts": 4, "routing": "zipf"}, SHAPE, 1)


def layers(count: int = 2) -> dict[int, MoeLayer]:
    return {2 + n: MoeLayer(SHAPE, MOE) for n in range(count)}


def routes(mine: list[int], *, generated: bool = True) -> Routes:
    found = Routes(MOE.generator(0, 1, 64) if generated else None, (2, 8), mine, torch.device("cpu"))
    found.begin(0, range(8))
    return found


def given(mixture: MoeLayer) -> Tensor:
    assert mixture.given is not None
    return mixture.given


def test_parts_of_a_generator_s_routes_are_cut_by_position() -> None:
    whole, mine_of = layers(1), layers(1)
    routes([0]).give_all(whole, 3)
    expected = given(whole[2]).view(2, 8, 2)
    for mine in ([0, 1], [5, 7, 2]):
        routes(mine).give(mine_of, 3)
        assert torch.equal(given(mine_of[2]).view(2, len(mine), 2), expected[:, mine])
    assert mine_of[2].microbatch == 3


def test_routes_change_with_step_and_microbatch_and_are_drawn_before_the_step_is_timed() -> None:
    taken, mixtures = routes(list(range(8))), layers(3)
    seen = []
    for step in (0, 1, 0):
        taken.begin(step, [0, 1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hybrid_routes, "routes", lambda *_: pytest.fail("drawn within the step"))
            for microbatch in (0, 1):
                taken.give(mixtures, microbatch)
                assert len({id(mixture.given) for mixture in mixtures.values()}) == 1  # the same in all layers
                seen.append(given(mixtures[2]).tolist())
    assert seen[:2] == seen[4:]
    assert seen[0] not in seen[1:4]
    with pytest.raises(KeyError, match="8"):
        taken.give(mixtures, 8)
    routes([0, 1], generated=False).give(mixtures, 0)  # without a generator the router chooses
    assert mixtures[2].given is None


def test_what_ranks_took_joins_to_whole_microbatches_and_is_given_again() -> None:
    expected = {layer: torch.randint(4, (2, 8, 2)) for layer in (2, 3)}
    told = []
    for mine in ([0, 3, 5], [1, 2, 4, 6]):
        mixtures, one = layers(), routes(mine, generated=False)
        for layer, mixture in mixtures.items():
            mixture.chosen[6] = expected[layer][:, mine].flatten(0, 1)
        told.append(one.taken(mixtures))
    one = routes([1, 0], generated=False)
    one.frozen = one.joined(told)
    assert one.frozen.keys() == {6}
    mixtures = layers()
    one.give(mixtures, 6)
    for layer, mixture in mixtures.items():
        assert torch.equal(one.frozen[6][layer][:, :7], expected[layer][:, :7])
        assert (one.frozen[6][layer][:, 7] == -1).all()  # a token that no rank took goes nowhere
        assert torch.equal(given(mixture), expected[layer][:, [1, 0]].flatten(0, 1))
    one.give_all(mixtures, 6)
    assert torch.equal(given(mixtures[3]), one.frozen[6][3].flatten(0, 1))
