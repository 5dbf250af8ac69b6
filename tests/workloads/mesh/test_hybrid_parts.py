"""What a hybrid step is made of: a rank's tokens, and sums of gradients."""

from typing import Any

import torch
from ranks import Ranks

from bench.world.world import World
from workloads.mesh.axes import CP_METHODS, coordinate_of
from workloads.mesh.mesh_case import Hybrid, hybrid_of
from workloads.mesh.mesh_stages import plan_of, sum_together, tokens_of
from workloads.model.shapes import SHAPES
from workloads.step.sent_bytes import counted


def hybrid(mesh: str, world: int, **more: Any) -> Hybrid:
    return hybrid_of({"mesh": mesh, **more}, SHAPES["tiny"], world)


def test_the_ranks_of_cp_and_tp_have_every_token_once() -> None:
    for mesh, world in {"cp=2,tp=2": 4, "tp=2,cp=2": 4, "dp=2,cp=4,tp=2": 16, "pp=2,tp=4": 8}.items():
        for method in CP_METHODS:
            if method == "ulysses" and "cp=4" in mesh:
                continue  # not so many heads
            case = hybrid(mesh, world, cp_method=method)
            places = [coordinate_of(case.mesh, rank) for rank in range(world)]
            mine = [tokens_of(case, 64, at) for at in places if at["dp"] == at["pp"] == 0]
            assert sorted(token for tokens in mine for token in tokens) == list(range(64)), (mesh, method)
            assert len({len(tokens) for tokens in mine}) == 1, (mesh, method)
    # a run of tp is of its part of cp in order, and without cp of the whole sequence
    case = hybrid("cp=2,tp=2", 4, cp_method="zigzag")
    found = [tokens_of(case, 8, {"cp": 0, "tp": tp}) for tp in (0, 1)]
    assert found == [(0, 1), (6, 7)]
    assert plan_of(hybrid("tp=2", 2), 64).ranks == 1
    assert tokens_of(hybrid("tp=2", 2), 64, {"cp": 0, "tp": 1}) == tuple(range(32, 64))


def summed(world: World) -> tuple[list[list[float]], int]:
    """Return tensors of several sizes, one of none, after they were summed as one, and how many calls that took."""
    tensors = [torch.full((2, 3), world.rank + 1.0), torch.empty(0), torch.arange(4.0).view(2, 2).t()]
    num_calls = len(counted(lambda: sum_together(tensors, world.group), {"dp": world.group}))
    return [tensor.flatten().tolist() for tensor in tensors], num_calls


def test_tensors_of_any_shape_are_summed_in_one_call(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_hybrid_parts:summed") == [([[3.0] * 6, [], [0.0, 4.0, 2.0, 6.0]], 1)] * 2
