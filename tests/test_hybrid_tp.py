"""Layers over tp take and give each rank's own positions, hold their part, and gather and scatter twice a block."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bench.world import World
from workloads.communication import counted
from workloads.experts.moe import exchange_ffns
from workloads.experts.moe_case import moe_of
from workloads.hybrid.hybrid_tp import split_layers
from workloads.layout import local
from workloads.model import Transformer, build
from workloads.shapes import SHAPES

SHAPE = replace(SHAPES["tiny"], hidden=32, ffn=64, sequence=16, vocabulary=50, layers=1)
LLAMA = replace(SHAPE, recipe="llama")


def _split(world: World, *, llama: bool, mixture: bool) -> tuple[Transformer, Transformer, Any]:
    shape = LLAMA if llama else SHAPE
    models = [build(shape, 0, world.device) for _ in range(2)]
    if mixture:
        for model in models:
            exchange_ffns(model, shape, moe_of({"ep": 1, "experts": 4}, shape, 1), 0)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    split_layers(models[1].layers, mesh, mixtures=mixture)
    return models[0], models[1], mesh.get_group("tp")


def apart(world: World, llama: bool, mixture: bool) -> tuple[float, float, bool]:
    """Return how far a layer and its gradients are from one process's, and whether it gives a plain tensor."""
    alone, model, _ = _split(world, llama=llama, mixture=mixture)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    mine = slice(world.rank * 16 // world.size, (world.rank + 1) * 16 // world.size)
    expected, found = alone.layers[0](x), model.layers[0](x[:, mine])
    expected.square().sum().backward()
    found.square().sum().backward()
    q, reference = model.layers[0].attention.q.weight.grad, alone.layers[0].attention.q.weight.grad  # type: ignore[union-attr]
    gradients = (q.full_tensor() - reference).abs().max() / reference.abs().max()  # type: ignore[operator,union-attr]
    return float((found - expected[:, mine]).detach().abs().max()), float(gradients), not isinstance(found, DTensor)


def calls(world: World, mixture: bool) -> dict[tuple[str, int], int]:
    """Return how often forward and backward make each call, by operation and bytes."""
    _, model, group = _split(world, llama=False, mixture=mixture)
    x = torch.randn(2, 16 // world.size, 32, requires_grad=True)
    found = counted(lambda: model.layers[0](x).sum().backward(), {"tp": group})
    return dict(Counter((call.op, call.num_bytes) for call in found))


def held(world: World, mixture: bool) -> dict[str, tuple[int, int]]:
    """Return of each parameter of the layer the elements in all and those on this rank."""
    _, model, _ = _split(world, llama=True, mixture=mixture)
    return {name: (p.numel(), local(p).numel()) for name, p in model.layers[0].named_parameters()}


def test_a_layer_gives_each_rank_its_positions_of_what_one_process_gives(two_ranks: Ranks) -> None:
    for llama, mixture in ((False, False), (True, False), (False, True)):
        for forward, gradients, plain in two_ranks.call("test_hybrid_tp:apart", llama=llama, mixture=mixture):
            assert forward < 1e-5
            assert gradients < 1e-4
            assert plain


def test_each_block_gathers_and_scatters_once_each_way(two_ranks: Ranks) -> None:
    whole = 2 * 16 * 32 * 4
    for found in two_ranks.call("test_hybrid_tp:calls", mixture=False):
        assert found == {("all_gather", whole): 4, ("reduce_scatter", whole): 4}
    for found in two_ranks.call("test_hybrid_tp:calls", mixture=True):
        assert found == {("all_gather", whole): 2, ("reduce_scatter", whole): 2}


def test_a_mixture_is_whole_on_every_rank(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_hybrid_tp:held", mixture=False):
        assert {name for name, (whole, mine) in found.items() if mine * 2 == whole} == {
            *(f"attention.{name}.weight" for name in ("q", "k", "v", "out")),
            *(f"ffn.{name}.weight" for name in ("gate", "up", "down")),
        }
    for found in two_ranks.call("test_hybrid_tp:held", mixture=True):
        assert all(mine == whole for name, (whole, mine) in found.items() if name.startswith("ffn."))
