"""The calls of a step: their bytes are the measured hybrid step's closed forms, axis by axis."""

from collections import defaultdict
from dataclasses import replace

import pytest
from planner_asks import ask

from workloads.costs import sent_bytes as sent_in_call
from workloads.experts.moe_case import moe_of
from workloads.experts.moe_costs import even_dispatch_bytes
from workloads.hybrid.hybrid_costs import sent_bytes
from workloads.planner.ask import Ask, as_measured, refusal
from workloads.planner.calls import BUCKET_BYTES, calls_of
from workloads.planner.catalog import model_of
from workloads.planner.expert_places import expert_shards
from workloads.planner.link_time import Call
from workloads.planner.stage_parts import Part, elements_of, parts_of


def by_axis(step: Ask, part: Part) -> dict[str, float]:
    """Return the bytes of each axis."""
    found: dict[str, float] = defaultdict(float)
    for call in calls_of(step, part, 8):
        found[call.axis] += call.sent
    return dict(found)


def calls(step: Ask, axis: str, part: int = 0) -> list[Call]:
    return [call for call in calls_of(step, parts_of(step)[part], 8) if call.axis == axis]


# a mesh, and microbatches; where FSDP has no pipeline the measured step reduces gradients once, so one of them
SHARED = [
    ("dp=2,fsdp=2,tp=2", 1),
    ("dp=2,pp=2,tp=2", 4),
    ("fsdp=2,pp=2,cp=2", 4),
    ("dp=2,cp=2,tp=2", 3),
    ("fsdp=4,cp=2", 1),
    ("pp=4,tp=2", 4),
    ("dp=2,fsdp=2,pp=2,cp=2,tp=2", 4),
]


@pytest.mark.parametrize("model", ["small", "small-llama"])
@pytest.mark.parametrize(("mesh", "microbatches"), SHARED)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
@pytest.mark.parametrize("cp_method", ["zigzag", "allgather_kv", "ulysses"])
def test_bytes_are_those_of_the_measured_step(
    model: str, mesh: str, microbatches: int, schedule: str, cp_method: str
) -> None:
    step = ask(
        mesh,
        model,
        microbatch=2,
        microbatches=microbatches,
        element_bytes=4,
        schedule=schedule,
        cp_method=cp_method,
        sharded_vocabulary=False,
    )
    assert refusal(step) is None
    for part in parts_of(step):
        theirs = sent_bytes(
            step.model.shape,
            step.mesh,
            microbatch=2,
            microbatches=microbatches,
            element_bytes=4,
            coordinate={"pp": part.pp_rank},
            schedule=schedule,
            cp_method=cp_method,
        )
        assert by_axis(step, part) == pytest.approx(theirs), part


def test_axes_of_one_rank_send_nothing() -> None:
    step = ask("dp=1")
    assert calls_of(step, parts_of(step)[0], 8) == ()


def test_every_microbatch_reduces_its_shards() -> None:
    one, four = (by_axis(step, parts_of(step)[0]) for step in (ask("fsdp=4"), ask("fsdp=4", microbatches=4)))
    assert four["fsdp"] == 4 * one["fsdp"]


def test_fsdp_sends_three_times_its_parameters() -> None:
    step = ask("fsdp=8", "llama3-8b")
    [part] = parts_of(step)
    assert by_axis(step, part)["fsdp"] == pytest.approx(3 * elements_of(step, part)[0] * 2 * 7 / 8)


def test_a_pipeline_gathers_and_reduces_once() -> None:
    step = ask("fsdp=8,pp=2", "llama3-8b", microbatches=16)
    part = parts_of(step)[0]
    assert by_axis(step, part)["fsdp"] == pytest.approx(2 * elements_of(step, part)[0] * 2 * 7 / 8)


def test_recomputation_sends_a_layers_forward_again() -> None:
    plain, full = (ask("tp=4,cp=2", "llama3-8b", checkpointing=how) for how in ("none", "full"))
    [part] = parts_of(plain)
    gathers = {call.op: call.count for call in calls(plain, "tp")}, {call.op: call.count for call in calls(full, "tp")}
    assert gathers[0]["all_gather"] == 4 * 32 + 2
    assert gathers[1]["all_gather"] == 6 * 32 + 2
    assert by_axis(full, part)["cp"] > by_axis(plain, part)["cp"]


def test_a_split_vocabulary_gathers_and_scatters_at_both_ends() -> None:
    whole, split = (ask("tp=4", "llama3-8b", sharded_vocabulary=sharded) for sharded in (False, True))
    each = sent_in_call("all_gather", 8192 * 4096 * 2, 4)
    activations = [sum(call.sent for call in calls(step, "tp") if call.op != "all_reduce") for step in (whole, split)]
    assert activations[1] - activations[0] == pytest.approx(4 * each)


def test_gradients_are_summed_in_buckets_over_replicas_and_the_ranks_of_a_sequence() -> None:
    step = ask("dp=4,cp=2", "llama3-8b")
    [call] = calls(step, "dp")
    assert call.place.ranks == 8
    assert call.num_bytes <= BUCKET_BYTES
    assert call.num_bytes * call.count == pytest.approx(elements_of(step, parts_of(step)[0])[0] * 2)


def test_a_ring_passes_keys_on_once_less_than_it_has_ranks() -> None:
    [call] = calls(ask("cp=4", "llama3-8b", microbatches=3), "cp")
    assert call.op == "send"
    assert call.count == 2 * 3 * 32 * 3


def test_experts_are_reached_four_times_a_layer() -> None:
    step = ask("fsdp=8,ep=8", "mixtral-8x7b", microbatches=2)
    [call] = calls(step, "ep")
    assert call.sent == pytest.approx(2 * 32 * 4 * even_dispatch_bytes(8192, 2, 4096, 2, 8))


def test_tensor_ranks_share_the_tokens_that_go_to_experts_and_only_attention() -> None:
    one, two = (ask(mesh, "mixtral-8x7b") for mesh in ("fsdp=8,ep=8", "fsdp=8,tp=2,ep=8"))
    assert calls(two, "ep")[0].num_bytes == calls(one, "ep")[0].num_bytes / 2
    gathers = {call.op: call.count for call in calls(two, "tp")}
    assert gathers["all_gather"] == 2 * 32 + 2


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=8,ep=8", "fsdp=16,ep=4", "dp=4,fsdp=4,ep=2", "dp=2,fsdp=4,tp=2,ep=4"])
def test_copies_shards_and_parts_of_an_expert_are_all_its_ranks(mesh: str) -> None:
    step = ask(mesh, "mixtral-8x7b")
    copies = calls(step, "edp")[0].place.ranks if calls(step, "edp") else 1
    assert copies * expert_shards(step.mesh) * step.ep == step.world


def test_a_pipelines_ends_have_one_neighbour() -> None:
    step = ask("pp=4", "llama3-8b", microbatches=8)
    assert [calls(step, "pp", part)[0].count for part in range(3)] == [8, 16, 8]
    assert calls(step, "pp")[0].num_bytes == 8192 * 4096 * 2


MESHES = ("dp=8", "fsdp=8", "dp=2,fsdp=4", "pp=4", "cp=4", "tp=8", "dp=2,pp=2,fsdp=2,cp=2,tp=2")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("gpus_per_node", [1, 4, 8, 72])
def test_what_is_sent_does_not_depend_on_the_node(mesh: str, gpus_per_node: int) -> None:
    step = ask(mesh, "llama3-8b", microbatches=4)
    for part in parts_of(step):
        sizes = [(call.axis, call.op, call.num_bytes, call.count) for call in calls_of(step, part, gpus_per_node)]
        assert sizes == [(call.axis, call.op, call.num_bytes, call.count) for call in calls_of(step, part, 8)]


@pytest.mark.parametrize("mesh", MESHES)
def test_calls_are_of_groups_that_the_mesh_has(mesh: str) -> None:
    step = ask(mesh, "llama3-8b", microbatches=4)
    sizes = {"dp": step.dp * step.cp, "fsdp": step.fsdp, "pp": step.pp, "cp": step.cp, "tp": step.tp}
    for call in calls_of(step, parts_of(step)[0], 8):
        assert call.place.ranks == sizes[call.axis]
        assert call.num_bytes > 0
        assert call.count > 0
        assert call.why


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_activations_go_with_the_microbatches(axis: str) -> None:
    four, eight = (ask("pp=2,cp=2,tp=2", "llama3-8b", microbatches=m) for m in (4, 8))
    sent = [sum(call.sent for call in calls(step, axis) if call.op != "all_reduce") for step in (four, eight)]
    assert sent[1] == pytest.approx(2 * sent[0])


def test_sixteen_bits_send_half() -> None:
    wide, narrow = (ask("dp=2,fsdp=2,tp=2", "llama3-8b", element_bytes=e) for e in (4, 2))
    [part] = parts_of(wide)
    halves = {axis: sent / 2 for axis, sent in by_axis(wide, part).items()}
    assert by_axis(narrow, part) == pytest.approx(halves)


def test_a_mixture_that_is_computed_again_sends_over_tensor_ranks_what_the_measured_step_does() -> None:
    """Of its layer attention alone is split: it scatters again, for the experts after it need what it gives."""
    mixture = replace(model_of("tiny-llama"), num_experts=4, top_k=2)
    moe = moe_of({"ep": 2, "experts": 4, "top_k": 2}, mixture.shape, 4)
    more = []
    for how in ("none", "full"):
        step = as_measured(ask("dp=2,tp=2,ep=2", mixture, checkpointing=how))
        [part] = parts_of(step)
        theirs = sent_bytes(
            mixture.shape, step.mesh, microbatch=1, microbatches=1, element_bytes=2, moe=moe, checkpointing=how
        )
        more.append((by_axis(step, part)["tp"], theirs["tp"]))
    (plain, their_plain), (full, their_full) = more
    assert full - plain == their_full - their_plain > 0
