"""Every token is one rank's, and attention of a rank's tokens reaches all that come before them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks

from bench.world import World
from workloads.context.attention_kernel import kernel_for
from workloads.hybrid.axes import coordinate_of
from workloads.hybrid.constraints import CP_METHODS
from workloads.hybrid.hybrid_case import hybrid_of
from workloads.hybrid.hybrid_cp import plan_of, reach_all, tokens_of
from workloads.hybrid.hybrid_groups import make_groups
from workloads.model import Attention, build
from workloads.shapes import SHAPES

LLAMA = replace(SHAPES["tiny-llama"], hidden=32, ffn=64, sequence=16, vocabulary=50, layers=1)


def hybrid(mesh: str, world: int, **more: Any) -> Any:
    return hybrid_of({"mesh": mesh, **more}, SHAPES["tiny"], world)


@pytest.mark.parametrize("method", CP_METHODS)
@pytest.mark.parametrize("mesh", ["cp=2,tp=2", "tp=2,cp=2", "dp=2,cp=4,tp=2", "pp=2,tp=4"])
def test_the_ranks_of_cp_and_tp_have_every_token_once(mesh: str, method: str) -> None:
    ranks = 1
    for part in mesh.split(","):
        ranks *= int(part.partition("=")[2])
    if method == "ulysses" and "cp=4" in mesh:
        return
    case = hybrid(mesh, ranks, cp_method=method)
    places = [coordinate_of(case.mesh, rank) for rank in range(ranks)]
    one_copy = [place for place in places if place["dp"] == place["pp"] == 0]
    mine = [tokens_of(case, 64, place).mine for place in one_copy]
    assert sorted(token for tokens in mine for token in tokens) == list(range(64))
    assert len({len(tokens) for tokens in mine}) == 1


def test_a_run_of_tp_is_of_its_part_of_cp_in_order() -> None:
    case = hybrid("cp=2,tp=2", 4, cp_method="zigzag")
    found = [tokens_of(case, 8, {"cp": 0, "tp": tp}) for tp in (0, 1)]
    assert found[0].attended == found[1].attended == (0, 1, 6, 7)
    assert [tokens.mine for tokens in found] == [(0, 1), (6, 7)]


def test_without_cp_attention_has_the_whole_sequence() -> None:
    assert plan_of(hybrid("tp=2", 2), 64).ranks == 1
    assert tokens_of(hybrid("tp=2", 2), 64, {"cp": 0, "tp": 1}).mine == tuple(range(32, 64))


def apart(world: World, method: str) -> float:
    """Return how far attention of this rank's positions is from that of the whole sequence."""
    case = hybrid_of({"mesh": "cp=2", "cp_method": method}, LLAMA, world.size)
    groups = make_groups(world, case)
    place = coordinate_of(case.mesh, world.rank)
    model = build(LLAMA, 0, world.device)
    attention = model.layers[0].attention
    assert isinstance(attention, Attention)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    expected = attention(x)
    kernel = kernel_for(world.device, torch.float32, LLAMA.head_size)
    reach_all(model, case, LLAMA, groups.axes, place, kernel, world.device)
    mine = list(tokens_of(case, 16, place).mine)
    found = (attention(x[:, mine]) - expected[:, mine]).abs().max()
    world.barrier()
    for group in groups.made:
        torch.distributed.destroy_process_group(group)
    return float(found.detach())


@pytest.mark.parametrize("method", CP_METHODS)
def test_attention_is_the_whole_sequence_s(two_ranks: Ranks, method: str) -> None:
    assert max(two_ranks.call("test_hybrid_cp:apart", method=method)) < 1e-5
