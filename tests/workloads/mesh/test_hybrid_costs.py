"""Closed forms of a mesh are those of its axes where it has one, and of the model's own parameters as axes cut them."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from workloads.costs.former import (
    ParameterPart,
    ddp_sent_bytes,
    fsdp_sent_bytes,
    numel_by_kind,
    parts_of_rank,
    stages_of_rank,
)
from workloads.costs.mesh_costs import axes_of, place_of, sent_bytes, state_elements
from workloads.expert_parallel.moe_case import Moe, moe_of, num_moe_parameters
from workloads.expert_parallel.moe_layer import exchange_ffns
from workloads.mesh.axes import coordinate_of, multiplied, size_of
from workloads.model.shapes import SHAPES, Shape, num_parameters
from workloads.model.transformer import build
from workloads.pipeline_parallel.schedules import NAMES, default_chunks, make_schedule

TINY = SHAPES["tiny"]  # 4 layers, hidden 128: every parameter's rows divide by 8
PSI = num_parameters(TINY)
MOE = moe_of({"ep": 2, "experts": 4}, TINY, 2)


def sent(mesh: dict[str, int], **more: Any) -> dict[str, float]:
    return sent_bytes(TINY, mesh, **{"microbatch": 2, "microbatches": 4, "element_bytes": 4, **more})


def test_dp_is_ddp_s_with_the_ranks_of_cp_and_averages_a_shard_over_shards() -> None:
    assert sent({"dp": 4}) == pytest.approx(ddp_sent_bytes(PSI, 4, 4))
    assert sent({"dp": 2, "cp": 2})["dp"] == pytest.approx(ddp_sent_bytes(PSI, 4, 4)["dp"])
    assert sent({"dp": 2, "fsdp": 4})["dp"] == pytest.approx(ddp_sent_bytes(PSI // 4, 4, 2)["dp"])
    assert axes_of({"cp": 2}) == {"dp": 2, "cp": 2}
    # axes of one rank send nothing and are left out
    assert sent({"dp": 1, "tp": 2}).keys() == {"tp"}
    assert sent({"dp": 1}) == {}


def test_fsdp_gathers_for_every_pass_and_reduces_once_and_a_pipeline_s_stages_stay_gathered() -> None:
    expected = fsdp_sent_bytes(PSI, 4, 4, num_microbatches=4, num_synchronisations=1)["dp"]
    assert sent({"fsdp": 4}) == pytest.approx({"fsdp": expected})
    held = place_of(TINY, {"fsdp": 2, "pp": 2}).parts
    whole = sum(part.numel for part in held)
    expected = fsdp_sent_bytes(whole, 4, 2, num_kept=whole)["dp"]
    for microbatches in (4, 8):
        assert sent({"fsdp": 2, "pp": 2}, microbatches=microbatches)["fsdp"] == pytest.approx(expected)
    # padding counts as it is sent
    odd = sent_bytes(replace(TINY, vocabulary=513), {"fsdp": 4}, microbatch=2, microbatches=4, element_bytes=4)["fsdp"]
    assert odd - sent({"fsdp": 4})["fsdp"] == pytest.approx(9 * 2 * 4 * TINY.hidden * 4 * 3 / 4)


def test_axes_share_positions_and_a_layer_computed_again_sends_again_but_for_its_last_sum() -> None:
    assert sent({"pp": 2, "cp": 2, "tp": 2})["pp"] == sent({"pp": 2})["pp"] / 4
    for method in ("ring", "striped", "zigzag", "allgather_kv", "ulysses"):  # of the heads that tp leaves
        both, one = (sent({"cp": 2, "tp": tp}, cp_method=method)["cp"] for tp in (2, 1))
        assert both == pytest.approx(one / 2), method
    alone, split = (moe_of({"ep": 1, "etp": etp, "experts": 4}, TINY, etp) for etp in (1, 2))
    for moe, times in ((None, 11 / 8), (alone, 6 / 4)):
        once, again, flights = (
            sent({"tp": 2}, moe=moe, checkpointing=how, microbatches=count)["tp"]
            for how, count in (("none", 1), ("full", 2), ("none", 2))
        )
        assert again - once == pytest.approx((flights - once) * (2 * times - 1))
    none, full = (sent({"tp": 2, "etp": 2}, moe=split, checkpointing=how)["etp"] for how in ("none", "full"))
    assert full - none == pytest.approx(4 * 4 * 2 * 64 / 2 * ((2 * 128 + 2) * 4 + 2 * 4))


def test_even_routes_send_t_k_h_e_each_way_and_copies_of_experts_are_averaged() -> None:
    mesh, flight = {"dp": 2, "ep": 2}, 2 * 64 * 2 * 128 * 4 / 2
    assert sent(mesh, moe=MOE)["ep"] == pytest.approx(4 * 4 * (4 * flight + 2 * 8))
    assert sent(mesh, moe=MOE, checkpointing="full")["ep"] == pytest.approx(4 * 4 * (6 * flight + 2 * 2 * 8))
    assert "edp" not in sent(mesh, moe=MOE)
    copied = {"dp": 4, "tp": 2, "ep": 2}  # over tp too
    routed = state_elements(TINY, copied, moe=MOE).routed
    assert axes_of(copied, MOE)["edp"] == 4
    for how in ("none", "full"):  # what is no layer's is not sent again
        assert sent(copied, moe=MOE, checkpointing=how)["edp"] == pytest.approx(2 * routed * 4 * 3 / 4)
    # parts of experts are averaged over half the copies
    mesh, moe = {"dp": 2, "tp": 4, "ep": 2, "etp": 2}, moe_of({"ep": 2, "etp": 2, "experts": 4}, TINY, 4)
    routed = state_elements(TINY, mesh, moe=moe).routed
    assert routed == state_elements(TINY, {**mesh, "etp": 1}, moe=MOE).routed / 2
    assert axes_of(mesh, moe)["edp"] == 2
    assert sent(mesh, moe=moe)["edp"] == pytest.approx(2 * routed * 4 / 2)


def test_ranks_of_one_copy_hold_the_model_once_but_for_what_tp_holds_whole() -> None:
    for mesh in ({"fsdp": 8}, {"dp": 2, "fsdp": 2, "pp": 2}, {"pp": 4, "fsdp": 2}, {"dp": 2, "pp": 2, "cp": 2}):
        ranks = range(size_of(mesh, *multiplied(mesh)))
        held = sum(state_elements(TINY, mesh, coordinate_of(mesh, rank)).total for rank in ranks)
        assert held == PSI * size_of(mesh, "dp", "cp"), mesh
    elements = state_elements(TINY, {"fsdp": 4})
    assert elements.bytes(mixed=True).total == 16 * elements.total == 4 * PSI


RECIPES = [replace(SHAPES[name], hidden=32, ffn=64, sequence=16, vocabulary=50) for name in ("tiny", "tiny-llama")]
SMALL = RECIPES[0]


def mixture(shape: Shape, ep: int = 1, **more: Any) -> Moe:
    return moe_of({"ep": ep, "experts": 4, **more}, shape, ep)


def whole_of(shape: Shape, moe: Moe | None = None) -> list[ParameterPart]:
    return parts_of_rank(shape, (0,), (shape.layers,), moe=moe)


def test_names_and_sizes_are_those_of_the_model() -> None:
    for shape, moe in product(RECIPES, (None, mixture(SMALL))):
        model = build(shape, 0, torch.device("cpu"))
        if moe is not None:
            exchange_ffns(model, shape, moe, 0)
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {part.name: part.size for part in whole_of(shape, moe)} == expected
    for shape in SHAPES.values():
        assert sum(part.numel for part in whole_of(shape)) == num_parameters(shape)
        moe = mixture(shape)
        assert sum(part.numel for part in whole_of(shape, moe)) == num_moe_parameters(shape, moe)


def test_stages_together_have_every_parameter_once_by_the_split_and_the_schedule() -> None:
    for shape in RECIPES:
        names = [part.name for stage in range(4) for part in parts_of_rank(shape, (stage,), (1, 1, 1, 1))]
        assert sorted(names) == sorted(part.name for part in whole_of(shape))
    names = [part.name.split(".")[1] for part in parts_of_rank(SMALL, (1,), (1, 2, 1)) if "layers" in part.name]
    assert set(names) == {"1", "2"}
    for name, pp in product(NAMES, (2, 4)):
        schedule = make_schedule(name, ranks=pp, microbatches=8)
        for rank in range(pp):
            assert stages_of_rank(name, pp, default_chunks(name), rank) == schedule.stages_of(rank)


def test_tp_divides_matrices_of_layers_and_ep_and_etp_routed_experts_alone() -> None:
    for shape in RECIPES:
        parts = {part.name: part for part in parts_of_rank(shape, (0,), (shape.layers,), tp=2)}
        for part in whole_of(shape):
            split = "attention." in part.name or "ffn." in part.name
            one_for_all = part.name.endswith(("out.bias", "down.bias"))
            assert parts[part.name].numel * (2 if split and not one_for_all else 1) == part.numel, part
            assert parts[part.name].kind == ("split" if split else "whole"), part
    alone = numel_by_kind(whole_of(SMALL, mixture(SMALL)))
    assert numel_by_kind(whole_of(SMALL, mixture(SMALL, 4))) == {**alone, "routed": alone["routed"] // 4}
    moe = moe_of({"ep": 1, "etp": 2, "experts": 4}, SMALL, 2)
    sizes = {part.name: part.size for part in parts_of_rank(SMALL, (0,), (1,), moe=moe) if part.kind == "routed"}
    assert sizes == {"layers.0.ffn.experts.up": (4, 32, 16), "layers.0.ffn.experts.down": (4, 16, 32)}


def test_shards_are_those_of_torch_chunk_and_experts_are_not_sharded() -> None:
    for rows, ranks in ((50, 4), (3, 4), (5, 4), (8, 3), (1, 64), (32, 1)):
        part = ParameterPart(name="x", size=(rows, 2), kind="whole")
        chunks = [len(chunk) * 2 for chunk in torch.chunk(torch.empty(rows, 2), ranks)]
        assert [part.shard(ranks, rank) for rank in range(ranks)] == chunks + [0] * (ranks - len(chunks))
    parts = whole_of(SMALL, mixture(SMALL))
    assert numel_by_kind(parts, 2)["routed"] == sum(math.prod(part.size) for part in parts if part.kind == "routed")
    assert numel_by_kind(parts, 2)["whole"] == pytest.approx(numel_by_kind(parts)["whole"] / 2, rel=0.01)
