"""Closed forms of a mesh are those of its axes where it has one, and fall as they should where it has several."""

from dataclasses import replace
from typing import Any

import pytest

from workloads.context.cp_costs import AttentionSizes, attention_bytes
from workloads.costs import ddp_sent_bytes, fsdp_sent_bytes, tp_sent_bytes, zero2_sent_bytes
from workloads.experts.moe_case import moe_of
from workloads.hybrid.axes import coordinate_of, multiplied, size_of
from workloads.hybrid.hybrid_costs import axes_of, place_of, sent_bytes, state_elements
from workloads.pipeline.pipeline_case import Pipeline
from workloads.pipeline.pp_bytes import bytes_by_rank
from workloads.pipeline.schedules import make_schedule
from workloads.pipeline.split import layers_of_stages
from workloads.shapes import SHAPES, num_parameters

TINY = SHAPES["tiny"]  # 4 layers, hidden 128: every parameter's rows divide by 8
PSI = num_parameters(TINY)
MOE = moe_of({"ep": 2, "experts": 4}, TINY, 2)


def sent(mesh: dict[str, int], **more: Any) -> dict[str, float]:
    return sent_bytes(TINY, mesh, **{"microbatch": 2, "microbatches": 4, "element_bytes": 4, **more})


def test_dp_is_ddp_s() -> None:
    assert sent({"dp": 4}) == pytest.approx(ddp_sent_bytes(PSI, 4, 4))


def test_fsdp_gathers_for_every_pass_and_reduces_once() -> None:
    expected = fsdp_sent_bytes(PSI, 4, 4, num_microbatches=4, num_synchronisations=1)["dp"]
    assert sent({"fsdp": 4}) == pytest.approx({"fsdp": expected})


def test_a_pipeline_s_stages_stay_gathered() -> None:
    held = place_of(TINY, {"fsdp": 2, "pp": 2}).parts
    expected = zero2_sent_bytes(sum(part.numel for part in held), 4, 2)["dp"]
    assert sent({"fsdp": 2, "pp": 2})["fsdp"] == pytest.approx(expected)
    assert sent({"fsdp": 2, "pp": 2}, microbatches=8)["fsdp"] == pytest.approx(expected)


def test_padding_counts_as_it_is_sent() -> None:
    odd = replace(TINY, vocabulary=513)
    plain = sent_bytes(TINY, {"fsdp": 4}, microbatch=2, microbatches=4, element_bytes=4)["fsdp"]
    padded = sent_bytes(odd, {"fsdp": 4}, microbatch=2, microbatches=4, element_bytes=4)["fsdp"]
    assert padded - plain == pytest.approx(9 * 2 * 4 * TINY.hidden * 4 * 3 / 4)


def test_dp_over_shards_averages_a_shard() -> None:
    assert sent({"dp": 2, "fsdp": 4})["dp"] == pytest.approx(ddp_sent_bytes(PSI // 4, 4, 2)["dp"])


def test_tp_is_eight_flights_a_layer_and_gradients_of_what_is_whole() -> None:
    layers = tp_sent_bytes(layers=4, microbatch=2, sequence=64, hidden=128, element_bytes=4, tp=4, num_microbatches=4)[
        "tp"
    ]
    norms = 4 * 4 * 128 + 2 * 128
    tables = (512 + 64 + 512) * 128
    assert sent({"tp": 4})["tp"] == pytest.approx(layers + 2 * (norms + tables) * 4 * 3 / 4)


def test_a_mixture_leaves_tp_half_of_the_flights() -> None:
    def flights(**more: Any) -> float:
        return (
            sent({"dp": 2, "tp": 2}, microbatches=2, **more)["tp"]
            - sent({"dp": 2, "tp": 2}, microbatches=1, **more)["tp"]
        )

    assert flights(moe=MOE) == pytest.approx(flights() / 2)


@pytest.mark.parametrize("method", ["ring", "striped", "zigzag", "allgather_kv", "ulysses"])
def test_cp_is_its_method_s_with_the_heads_that_tp_leaves(method: str) -> None:
    sizes = AttentionSizes(microbatch=2, sequence=64, heads=2, kv_heads=2, head_size=32, element_bytes=4)
    each = attention_bytes(method, sizes, 2, 2 if method == "ulysses" else 1).step(4, 4)["cp"]
    assert sent({"cp": 2, "tp": 2}, cp_method=method)["cp"] == pytest.approx(each)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "dualpipe_v"])
def test_pp_is_every_link_s_over_the_positions_of_a_rank(schedule: str) -> None:
    made = make_schedule(schedule, ranks=2, microbatches=4)
    pipeline = Pipeline(schedule=made, layers_by_stage=layers_of_stages(4, made.num_stages))
    for rank, expected in enumerate(bytes_by_rank(pipeline, TINY, 2, 4)):
        at = {"coordinate": {"pp": rank}, "schedule": schedule}
        assert sent({"pp": 2}, **at) == pytest.approx({"pp": expected})
        assert sent({"pp": 2, "cp": 2, "tp": 2}, **at)["pp"] == pytest.approx(expected / 4)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_layer_that_is_computed_again_sends_again_but_for_its_last_sum(how: str) -> None:
    def flights(**more: Any) -> float:
        return sent({"tp": 2}, microbatches=2, **more)["tp"] - sent({"tp": 2}, microbatches=1, **more)["tp"]

    assert flights(checkpointing=how) == pytest.approx(flights() * 11 / 8)
    mixed = {"moe": moe_of({"ep": 1, "experts": 4}, TINY, 1)}
    assert flights(checkpointing=how, **mixed) == pytest.approx(flights(**mixed) * 6 / 4)


def test_attention_and_dispatch_that_are_computed_again_send_their_forward_twice() -> None:
    sizes = AttentionSizes(microbatch=2, sequence=64, heads=4, kv_heads=4, head_size=32, element_bytes=4)
    each = attention_bytes("ring", sizes, 2, 1).step(4, 4, forwards=2)["cp"]
    assert sent({"cp": 2}, checkpointing="full")["cp"] == pytest.approx(each)
    flight = 2 * 64 * 2 * 128 * 4 / 2
    again = sent({"dp": 2, "ep": 2}, moe=MOE, checkpointing="full")["ep"]
    assert again == pytest.approx(4 * 4 * (6 * flight + 2 * 2 * 8))


SPLIT = moe_of({"ep": 2, "etp": 2, "experts": 4}, TINY, 4)
SPLIT_MESH = {"dp": 2, "tp": 4, "ep": 2, "etp": 2}


def test_ranks_that_split_experts_gather_tokens_and_scatter_sums() -> None:
    found = sent(SPLIT_MESH, moe=SPLIT)
    tokens = 2 * 64 // 4
    forward = tokens * ((2 * 128 + 2) * 4 + 2 * 4)
    backward = tokens * (2 * 128 + 2) * 4
    assert found["etp"] == pytest.approx(4 * 4 * (forward + backward))
    assert sent(SPLIT_MESH, moe=SPLIT, checkpointing="full")["etp"] == pytest.approx(4 * 4 * (2 * forward + backward))
    # each sends on what both have
    whole = sent({**SPLIT_MESH, "etp": 1}, moe=MOE)
    told = 4 * 4 * 2 * 8
    assert found["ep"] - told == pytest.approx(2 * (whole["ep"] - told))
    assert "etp" not in whole


def test_parts_of_experts_are_averaged_over_half_the_copies() -> None:
    routed = state_elements(TINY, SPLIT_MESH, moe=SPLIT).routed
    assert routed == state_elements(TINY, {**SPLIT_MESH, "etp": 1}, moe=MOE).routed / 2
    assert axes_of(SPLIT_MESH, SPLIT)["edp"] == 2
    assert sent(SPLIT_MESH, moe=SPLIT)["edp"] == pytest.approx(2 * routed * 4 / 2)


def test_what_is_no_layer_s_is_not_sent_again() -> None:
    mesh = {"dp": 2, "fsdp": 2, "pp": 2}
    assert sent(mesh, checkpointing="full") == sent(mesh)
    experts = {"dp": 4, "ep": 2}
    assert sent(experts, moe=MOE, checkpointing="full")["edp"] == sent(experts, moe=MOE)["edp"]


def test_dp_takes_the_ranks_of_cp_with_it() -> None:
    assert sent({"dp": 2, "cp": 2})["dp"] == pytest.approx(ddp_sent_bytes(PSI, 4, 4)["dp"])
    assert axes_of({"cp": 2}) == {"dp": 2, "cp": 2}


def test_even_routes_send_t_k_h_e_each_way() -> None:
    found = sent({"dp": 2, "ep": 2}, moe=MOE)
    flight = 2 * 64 * 2 * 128 * 4 / 2
    assert found["ep"] == pytest.approx(4 * 4 * (4 * flight + 2 * 8))
    assert "edp" not in found


def test_copies_of_experts_are_averaged_over_tp_too() -> None:
    mesh = {"dp": 4, "tp": 2, "ep": 2}
    routed = state_elements(TINY, mesh, moe=MOE).routed
    assert sent(mesh, moe=MOE)["edp"] == pytest.approx(2 * routed * 4 * 3 / 4)
    assert axes_of(mesh, MOE)["edp"] == 4


def test_axes_of_one_rank_send_nothing_and_are_left_out() -> None:
    assert sent({"dp": 1, "tp": 2}).keys() == {"tp"}
    assert sent({"dp": 1}) == {}


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 8}, {"dp": 2, "fsdp": 2, "pp": 2}, {"pp": 4, "fsdp": 2}, {"dp": 2, "pp": 2, "cp": 2}],
    ids=str,
)
def test_ranks_of_one_copy_hold_the_model_once(mesh: dict[str, int]) -> None:
    ranks = range(size_of(mesh, *multiplied(mesh)))
    held = sum(state_elements(TINY, mesh, coordinate_of(mesh, rank)).total for rank in ranks)
    assert held == PSI * size_of(mesh, "dp", "cp")


def test_tp_holds_what_is_whole_on_every_rank() -> None:
    whole = sum(part.numel for part in place_of(TINY, {"tp": 2}).parts if part.kind == "whole")
    one_for_all = 4 * 2 * 128
    split = PSI - whole - one_for_all
    assert state_elements(TINY, {"tp": 2}).total == whole + one_for_all + split // 2


def test_state_is_sixteen_bytes_a_parameter() -> None:
    elements = state_elements(TINY, {"fsdp": 4})
    assert elements.bytes(mixed=True).total == 16 * elements.total == 4 * PSI


def test_the_shape_of_large_meshes_is_computed_at_once() -> None:
    shape = SHAPES["llama3-70b"]
    mesh = {"dp": 8, "fsdp": 16, "pp": 16, "tp": 8}
    found = sent_bytes(shape, mesh, microbatch=1, microbatches=64, element_bytes=2, coordinate={"pp": 15})
    assert found.keys() == {"dp", "fsdp", "pp", "tp"}
    elements = sum(state_elements(shape, mesh, {"pp": stage}).total for stage in range(16))
    parts = [part for stage in range(16) for part in place_of(shape, mesh, {"pp": stage}).parts]
    whole = sum(part.numel for part in parts if part.kind == "whole")
    assert elements * 16 * 8 == num_parameters(shape) + 7 * whole  # embeddings, norms and head are on all ranks of tp
