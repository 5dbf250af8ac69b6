"""A rank's part of a step on a mesh: its groups and tokens, sums of gradients, waits that add up to what was asked."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns, let_experts_wait
from parbench.workloads.mesh.axes import CP_METHODS, coordinate_of
from parbench.workloads.mesh.mesh_stages import (
    count_wrong_fills,
    make_groups,
    plan_of,
    shares_of,
    tokens_of,
)
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.timed_compute import TimedCompute, TimedLinear
from parbench.workloads.model.transformer import build
from tests.support.mesh_steps import Params
from tests.support.ranks import Ranks

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
MOE = moe_of({"ep": 1, "experts": 8, "top_k": 2}, TINY, 1)
Made = tuple[dict[str, list[int]], list[int]]


def made(world: World, meshes: list[Params]) -> list[Made]:
    """Return this rank's groups by axis, no two of which are one, and its twins."""
    found = []
    for params in meshes:
        groups = make_groups(world, strategies.mesh(params, world.size))
        world.barrier()
        by_axis = {axis: dist.get_process_group_ranks(group) for axis, group in groups.axes.items()}
        assert len({group.group_name for group in groups.axes.values()}) == len(by_axis), params
        found.append((by_axis, dist.get_process_group_ranks(groups.replica_group)))
        for group in groups.made:
            dist.destroy_process_group(group)
    return found


def test_groups_are_made_as_the_mesh_says(two_ranks: Ranks) -> None:
    """One of all ranks is the world; gradients over cp have one of their own, experts of all ranks no copies."""
    expected: dict[str, tuple[str, int]] = {
        "dp=2": ("dp", 0),
        "cp=2": ("cp dp", 0),
        "dp=2,ep=2": ("dp ep", 4),
        "fsdp=2": ("fsdp edp", 4),
    }
    meshes = [{"mesh": mesh, "experts": experts} for mesh, (_, experts) in expected.items()]
    for found in two_ranks.call("tests.workloads.mesh.test_mesh_stages:made", meshes=meshes):
        assert found == [
            ({axis: [0, 1] for axis in axes.split()}, [0, 1]) for axes, _ in expected.values()
        ]


def hybrid(mesh: str, world: int, **more: Any) -> StepSpec:
    return strategies.mesh({"mesh": mesh, **more}, world)


def test_the_ranks_of_cp_and_tp_have_every_token_once() -> None:
    for mesh, world in {
        "cp=2,tp=2": 4,
        "tp=2,cp=2": 4,
        "dp=2,cp=4,tp=2": 16,
        "pp=2,tp=4": 8,
    }.items():
        for method in CP_METHODS:
            if method == "ulysses" and "cp=4" in mesh:
                continue  # not so many heads
            case = hybrid(mesh, world, cp_method=method)
            places = [coordinate_of(case.mesh, rank) for rank in range(world)]
            mine = [tokens_of(case, at) for at in places if at["dp"] == at["pp"] == 0]
            assert sorted(token for tokens in mine for token in tokens) == list(range(64)), (
                mesh,
                method,
            )
            assert len({len(tokens) for tokens in mine}) == 1, (mesh, method)
    # a run of tp is of its part of cp in order, and without cp of the whole sequence
    case = hybrid("cp=2,tp=2", 4, cp_method="zigzag", sequence=8)
    found = [tokens_of(case, {"cp": 0, "tp": tp}) for tp in (0, 1)]
    assert found == [(0, 1), (6, 7)]
    assert plan_of(hybrid("tp=2", 2)).ranks == 1
    assert tokens_of(hybrid("tp=2", 2), {"cp": 0, "tp": 1}) == tuple(range(32, 64))


def test_linear_layers_attention_under_cp_and_experts_share_by_multiply_adds() -> None:
    dense = shares_of(TINY, None, cp=1)
    assert (dense.linear, dense.experts, dense.attention) == (1.0, 0.0, 0.0)
    cut = shares_of(TINY, None, cp=2)
    weights, pairs = 4 * 128 * 128 + 2 * 128 * 512, 128 * 65  # h (s + 1)
    assert cut.attention == pytest.approx(pairs / (weights + pairs))
    assert shares_of(TINY, None, cp=4) == cut
    mixed = shares_of(TINY, MOE, cp=1)  # a token meets k experts and the shared one
    each = 2 * 128 * 256
    assert mixed.experts == pytest.approx(2 * each / (4 * 128 * 128 + each + 2 * each))
    all_three = shares_of(TINY, MOE, cp=2)
    assert all_three.experts < mixed.experts
    for found in (cut, mixed, all_three):
        assert found.linear + found.experts + found.attention == pytest.approx(1)


def test_a_gradient_that_is_not_what_was_filled_in_is_counted() -> None:
    model = build(TINY, 0, CPU)
    exchange_ffns(model, TINY, MOE, 0)
    let_experts_wait(model, 0.5, 64, TimedCompute(CPU), others=0.5)
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, TimedLinear)
    }
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == len(linears)
    for name, linear in linears.items():
        whole = name == "head" or "shared" in name
        linear.weight.grad = torch.full_like(linear.weight, 6.0 if whole else 3.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 0
    linears["layers.1.attention.q"].weight.grad = torch.full((128, 128), 6.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 128 * 128
