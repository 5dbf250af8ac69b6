"""A rank's part of a step on a mesh: its groups, its tokens, and its share of simulated compute."""

import pytest
import torch
import torch.distributed as dist

from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns, let_experts_wait
from parbench.workloads.mesh.axes import coordinate_of
from parbench.workloads.mesh.mesh_stages import (
    count_wrong_fills,
    make_groups,
    shares_of,
    tokens_of,
)
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.timed_compute import TimedCompute, TimedLinear
from parbench.workloads.model.transformer import build
from tests.support.ranks import Ranks

TINY = SHAPES["tiny"]
MOE = moe_of({"ep": 1, "experts": 8, "top_k": 2}, TINY, 1)


def list_groups(world: World, mesh: str, experts: int) -> dict[str, list[int]]:
    """Return the ranks of this rank's groups by axis."""
    spec = strategies.mesh({"mesh": mesh, "experts": experts}, world.size)
    groups = make_groups(world, spec)
    world.barrier()
    by_axis = {axis: dist.get_process_group_ranks(group) for axis, group in groups.axes.items()}
    for group in groups.made:
        dist.destroy_process_group(group)
    return by_axis


@pytest.mark.parametrize(
    ("mesh", "experts", "axes"),
    [
        ("cp=2", 0, ["cp", "dp"]),  # gradients over cp have their own group
        ("dp=2,ep=2", 4, ["dp", "ep"]),
        ("fsdp=2", 4, ["fsdp", "edp"]),
    ],
)
def test_mesh_makes_groups(two_ranks: Ranks, mesh: str, experts: int, axes: list[str]) -> None:
    arguments = {"mesh": mesh, "experts": experts}
    by_axis, _ = two_ranks.call(f"{__name__}:list_groups", **arguments)
    assert by_axis == {axis: [0, 1] for axis in axes}


@pytest.mark.parametrize("mesh", ["cp=2,tp=2", "tp=2,cp=2"])
@pytest.mark.parametrize("method", ["ring", "striped", "zigzag", "ulysses"])
def test_ranks_of_cp_and_tp_have_every_token_once(mesh: str, method: str) -> None:
    spec = strategies.mesh({"mesh": mesh, "cp_method": method}, 4)
    tokens: list[int] = []
    for rank in range(4):
        part = tokens_of(spec, coordinate_of(spec.mesh, rank))
        assert len(part) == 16
        tokens.extend(part)
    assert sorted(tokens) == list(range(64))


def test_shares_of_compute_are_multiply_adds() -> None:
    """Only attention over ranks and experts wait apart from the linear layers."""
    assert shares_of(TINY, None, cp=1).linear == 1.0
    attention = shares_of(TINY, None, cp=2).attention
    weights = 4 * 128 * 128 + 2 * 128 * 512
    pairs = 128 * 65  # h (s + 1)
    assert attention == pytest.approx(pairs / (weights + pairs))
    experts = shares_of(TINY, MOE, cp=1).experts
    expert = 2 * 128 * 256  # a token meets two of them and the shared one
    assert experts == pytest.approx(2 * expert / (4 * 128 * 128 + 3 * expert))


def test_wrong_fill_of_timed_gradient_is_counted() -> None:
    cpu = torch.device("cpu")
    model = build(TINY, 0, cpu)
    exchange_ffns(model, TINY, MOE, 0)
    let_experts_wait(model, 0.5, 64, TimedCompute(cpu), others=0.5)
    for name, module in model.named_modules():
        if isinstance(module, TimedLinear):
            is_replicated = name == "head" or "shared" in name
            fill = 6.0 if is_replicated else 3.0
            module.weight.grad = torch.full_like(module.weight, fill)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 0
    query = model.get_parameter("layers.1.attention.q.weight")
    query.grad = torch.full_like(query, 6.0)
    assert count_wrong_fills(model, 3.0, tp=2, num_ranks=2) == 128 * 128
