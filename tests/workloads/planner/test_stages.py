"""What a rank of a pipeline holds, computes and sends: orders, measured steps and closed forms agree."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from planner_asks import ask

from workloads.costs.mesh_costs import sent_bytes, state_elements
from workloads.expert_parallel.moe_case import moe_of
from workloads.model.shapes import BUCKET_BYTES, flops_per_token, num_layer_weights
from workloads.pipeline_parallel.schedules import NAMES, make_schedule, peak_held
from workloads.planner.ask import Ask, as_measured, refusal
from workloads.planner.calls import calls_of
from workloads.planner.link_time import Call
from workloads.planner.models import model_of, num_model_parameters
from workloads.planner.rank_memory import (
    RankMemory,
    activation_bytes,
    gathered_bytes,
    head_bytes,
    layer_bytes,
    memory_of,
    total_state_bytes,
)
from workloads.planner.stage_flops import active_layer_weights, again_bytes, model_flops_per_token, stage_flops
from workloads.planner.stage_parts import Part, elements_of, in_flight, parts_of, sends_of, stages_of, summed_elements


def test_in_flight_is_what_the_order_of_actions_holds_and_no_more_than_there_is() -> None:
    for schedule in NAMES:
        for ranks, microbatches in ((2, 4), (4, 16)):
            order = make_schedule(schedule, ranks=ranks, microbatches=microbatches)
            for rank in range(ranks):
                held = peak_held(order, rank, lambda stage: 1) / order.chunks
                found = in_flight(schedule, rank=rank, ranks=ranks, microbatches=microbatches, chunks=order.chunks)
                assert found == pytest.approx(held), (schedule, ranks, rank)
    assert in_flight("1f1b", rank=0, ranks=8, microbatches=3, chunks=1) == 3
    assert in_flight("1f1b", rank=0, ranks=1, microbatches=3, chunks=1) == 1


def test_the_ranks_that_differ_are_first_middle_and_last() -> None:
    parts = parts_of(ask("pp=4", microbatches=8))
    ends = [(0, True, False, 4), (1, False, False, 3), (3, False, True, 1)]
    assert [(part.pp_rank, part.embedding, part.head, part.in_flight) for part in parts] == ends
    for mesh, words in (
        ("dp=4", ["pp rank 0: 8 layers with embedding and head"]),
        ("pp=2", ["pp rank 0: 4 layers with embedding", "pp rank 1: 4 layers with head"]),
    ):
        assert [part.words for part in parts_of(ask(mesh, microbatches=4))] == words


def test_stages_are_those_of_the_schedule_and_messages_those_of_its_boundaries() -> None:
    for schedule, sends in (("1f1b", [1, 2, 1]), ("interleaved", [3, 4, 3]), ("zb_v", [2, 4, 2])):
        step = ask("pp=4", schedule=schedule, microbatches=8)
        order = make_schedule(schedule, ranks=4, microbatches=8)
        assert [stages_of(step, rank) for rank in range(4)] == [order.stages_of(rank) for rank in range(4)], schedule
        assert [sends_of(step, part) for part in parts_of(step)] == sends, schedule
    first = parts_of(ask("pp=4", schedule="zb_v", microbatches=8))[0]  # a fold brings the last stage back to it
    assert (first.embedding, first.head) == (True, True)


def test_parameters_are_those_that_the_measured_step_holds() -> None:
    for model, mesh in (
        ("small", "dp=2,fsdp=2,tp=2"),
        ("small-llama", "dp=2,pp=2,tp=2"),
        ("small", "fsdp=2,pp=2,cp=2"),
        ("small-llama", "fsdp=8"),
    ):
        step = ask(mesh, model, microbatches=4, sharded_vocabulary=False)
        assert refusal(step) is None
        for part in parts_of(step):
            theirs = state_elements(step.model.shape, step.mesh, {"pp": part.pp_rank}).total
            assert elements_of(step, part)[0] / step.fsdp == pytest.approx(theirs), (model, mesh)


def test_all_stages_together_hold_the_model_and_do_its_work_once() -> None:
    for model in ("llama3-70b", "gpt-175b", "mixtral-8x7b"):
        whole, staged = ask("dp=1", model), ask("pp=4", model, microbatches=8)
        first, middle, last = (sum(elements_of(staged, part)) for part in parts_of(staged))
        assert first + 2 * middle + last == num_model_parameters(model_of(model)), model
        first, middle, last = (stage_flops(staged, part).total for part in parts_of(staged))
        assert first + 2 * middle + last == pytest.approx(stage_flops(whole, parts_of(whole)[0]).total), model
        assert first == middle < last, model


def test_tensor_ranks_split_the_vocabulary_and_sum_norms_and_whole_ends() -> None:
    whole, split = (ask("tp=2", "llama3-8b", sharded_vocabulary=sharded) for sharded in (False, True))
    [part] = parts_of(whole)
    ends, norms = 2 * 128256 * 4096, (2 * 32 + 1) * 4096
    assert elements_of(whole, part)[0] - elements_of(split, part)[0] == pytest.approx(ends / 2)
    assert summed_elements(split, part) == norms
    assert summed_elements(whole, part) == norms + ends


def test_experts_are_dealt_out_and_computed_as_much_wherever_they_are() -> None:
    here, there = ask("fsdp=8", "mixtral-8x7b"), ask("fsdp=8,ep=4", "mixtral-8x7b")
    [part] = parts_of(here)
    assert elements_of(there, part)[1] == elements_of(here, part)[1] / 4
    assert stage_flops(here, part) == stage_flops(there, part)


def test_the_models_count_is_that_of_the_measured_steps_and_of_a_mixture_the_experts_that_a_token_meets() -> None:
    for name in ("small", "small-llama", "gpt-7.5b"):
        assert model_flops_per_token(model_of(name)) == flops_per_token(model_of(name).shape), name
    model = model_of("mixtral-8x7b")
    expected = num_layer_weights(model.shape) + model.expert_parameters + 4096 * 8
    assert active_layer_weights(model) == expected
    # 12.9 billion active parameters are quoted, embedding included
    assert 32 * expected + 2 * 32000 * 4096 == pytest.approx(12.9e9, rel=0.01)


def test_what_is_executed_is_the_models_count_less_the_masked_half_of_attention() -> None:
    for name in ("small", "llama3-8b"):
        step = ask("dp=1", name, microbatch=2)
        flops = stage_flops(step, parts_of(step)[0])
        assert (flops.again, flops.backward) == (0, 2 * flops.forward)
        whole = model_flops_per_token(step.model) * step.local_tokens
        assert flops.total + 3 * flops.attention == pytest.approx(whole), name
    short, long = (ask("dp=1", model_of("llama3-8b", sequence)) for sequence in (4096, 16384))
    [part] = parts_of(short)
    assert stage_flops(long, part).attention == 16 * stage_flops(short, part).attention


def test_axes_inside_a_sequence_divide_the_work_and_data_axes_none_of_a_microbatch() -> None:
    one = ask("dp=1", "llama3-8b")
    [part] = parts_of(one)
    for mesh, microbatch, share in (("tp=4", 1, 0.25), ("cp=4", 1, 0.25), ("dp=8", 1, 1), ("fsdp=8", 4, 4)):
        found = stage_flops(ask(mesh, "llama3-8b", microbatch=microbatch), part).total
        assert found == pytest.approx(share * stage_flops(one, part).total), mesh


def test_full_checkpointing_runs_the_layers_again_and_selective_moves_what_it_dropped() -> None:
    none, selective, full = (ask("dp=1", "llama3-8b", checkpointing=how) for how in ("none", "selective", "full"))
    [part] = parts_of(full)
    flops = stage_flops(full, part)
    assert flops.again == pytest.approx(flops.forward - 2 * 4096 * 128256 * 8192)  # but not the head
    assert stage_flops(selective, part).again == 0
    dropped = 2 + 2 + 2 + 0.5 + 4 * 3.5 - (5 + 0.5 + 2 * 3.5)
    assert again_bytes(selective, part) == pytest.approx(2 * 32 * (8192 * 4096 * 2 * dropped + 4 * 32 * 8192))
    assert again_bytes(none, part) == again_bytes(full, part) == 0


TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256  # of llama3-8b


def memory(mesh: str, model: str = "llama3-8b", **more: Any) -> RankMemory:
    step = ask(mesh, model, **more)
    return memory_of(step, parts_of(step)[0])


def state_parts(mesh: str, **more: Any) -> tuple[float, float, float]:
    found = memory(mesh, **more)
    return found.parameters, found.gradients, found.optimizer


def head(step: Ask) -> float:
    return head_bytes(step, parts_of(step)[-1])


def test_a_parameter_takes_sixteen_bytes_of_which_fsdp_leaves_a_share() -> None:
    psi = num_model_parameters(model_of("llama3-8b"))
    assert state_parts("dp=8") == (2 * psi, 2 * psi, 12 * psi)
    assert state_parts("dp=8", element_bytes=4) == (4 * psi, 4 * psi, 8 * psi)
    assert state_parts("fsdp=64") == pytest.approx((2 * psi / 64, 2 * psi / 64, 12 * psi / 64))
    assert total_state_bytes(model_of("llama3-8b"), 2) == memory("cp=4").state == 16 * psi
    for mesh, tolerance in (("tp=4", 1e-3), ("pp=4", 0.25)):
        assert memory(mesh, microbatches=4).state == pytest.approx(4 * psi, rel=tolerance), mesh
    found = RankMemory(parameters=1, gradients=2, optimizer=3, activations=4, buffers=5)
    assert (found.state, found.total) == (6, 15)


def test_a_pipelines_first_rank_holds_most_and_only_the_last_logits() -> None:
    step = ask("pp=4", "llama3-8b", microbatches=8)
    first, middle, last = (activation_bytes(step, part) for part in parts_of(step))
    each = 8 * layer_bytes(step)
    assert (first, middle, last) == (4 * each, 3 * each, each + head(step))
    for schedule in ("gpipe", "looped_bfs"):  # which hold every microbatch and all logits
        step = ask("pp=2", "llama3-8b", microbatches=8, schedule=schedule)
        held = activation_bytes(step, parts_of(step)[-1])
        assert held == 8 * 16 * layer_bytes(step) + 8 * (TOKENS * HIDDEN * 4 + TOKENS * VOCABULARY * 6), schedule


def test_kernels_that_are_not_fused_keep_more_of_llama_alone() -> None:
    fused, composed = (ask("tp=4", "llama3-8b", fused_kernels=fused) for fused in (True, False))
    elements = TOKENS * HIDDEN / 4
    assert layer_bytes(composed) - layer_bytes(fused) == 2 * elements * (8 - 2) + elements * 2
    assert head(composed) - head(fused) == elements * (8 - 2)
    gpt = [layer_bytes(ask("tp=4", "gpt-7.5b", fused_kernels=fused)) for fused in (True, False)]
    assert gpt[0] == gpt[1]


def test_activations_grow_with_the_microbatch_and_shrink_with_the_ranks_of_a_sequence() -> None:
    for how in ("none", "selective", "full"):
        step = ask("cp=2,tp=2", "llama3-8b", microbatch=1, checkpointing=how)
        [part] = parts_of(step)
        held = activation_bytes(step, part)
        assert activation_bytes(replace(step, microbatch=2), part) == pytest.approx(2 * held), how
        assert activation_bytes(replace(step, mesh={"cp": 4, "tp": 2}), part) == pytest.approx(held / 2), how
    wide, narrow = (memory("dp=1", element_bytes=e).activations for e in (4, 2))
    as_wide = 32 * 4 * 32 * TOKENS + 4 * TOKENS * VOCABULARY  # log-sum-exps and the loss
    assert wide - as_wide == pytest.approx(2 * (narrow - as_wide))


def test_gathered_are_two_layers_and_a_gradient_or_a_whole_stage() -> None:
    for mesh, model, experts, gathered in (
        ("fsdp=8", "llama3-8b", 0.0, 3 * 1e6 * 2),
        ("fsdp=4,pp=2", "llama3-8b", 0.0, 2 * 32e6 * 2),
        ("dp=8", "llama3-8b", 0.0, 0),
        ("fsdp=8,ep=8", "mixtral-8x7b", 1e12, 3 * 1e6 * 2),  # experts that are not sharded
        ("fsdp=16,ep=8", "mixtral-8x7b", 32e6, 3 * 2e6 * 2),
    ):
        step = ask(mesh, model, microbatches=4)
        part = replace(parts_of(step)[0], layers=32)
        assert gathered_bytes(step, part, 32e6, experts) == gathered, mesh


def by_axis(step: Ask, part: Part) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for call in calls_of(step, part, 8):
        found[call.axis] += call.sent
    return dict(found)


def calls(step: Ask, axis: str, part: int = 0) -> list[Call]:
    return [call for call in calls_of(step, parts_of(step)[part], 8) if call.axis == axis]


# where FSDP has no pipeline the measured step reduces gradients once, so one microbatch of it
SHARED = [
    ("small", "dp=2,fsdp=2,tp=2", 1, "1f1b", "zigzag"),
    ("small-llama", "dp=2,pp=2,tp=2", 4, "gpipe", "zigzag"),
    ("small-llama", "fsdp=2,pp=2,cp=2", 4, "1f1b", "allgather_kv"),
    ("small", "dp=2,cp=2,tp=2", 3, "1f1b", "ulysses"),
    ("small-llama", "fsdp=4,cp=2", 1, "1f1b", "zigzag"),
    ("small", "pp=4,tp=2", 4, "interleaved", "zigzag"),
    ("small-llama", "dp=2,fsdp=2,pp=2,cp=2,tp=2", 4, "interleaved", "ulysses"),
]


def test_bytes_are_those_of_the_measured_step() -> None:
    for model, mesh, microbatches, schedule, method in SHARED:
        sizes: dict[str, Any] = {"microbatch": 2, "microbatches": microbatches, "element_bytes": 4}
        how: dict[str, Any] = {"schedule": schedule, "cp_method": method}
        step = ask(mesh, model, **sizes, **how, sharded_vocabulary=False)
        assert refusal(step) is None
        for part in parts_of(step):
            theirs = sent_bytes(step.model.shape, step.mesh, coordinate={"pp": part.pp_rank}, **sizes, **how)
            assert by_axis(step, part) == pytest.approx(theirs), (model, mesh, part)


def test_a_mixture_that_is_computed_again_sends_over_tensor_ranks_what_the_measured_step_does() -> None:
    """Of its layer attention alone is split: it scatters again, for the experts after it need what it gives."""
    mixture = replace(model_of("tiny-llama"), num_experts=4, top_k=2)
    moe = moe_of({"ep": 2, "experts": 4, "top_k": 2}, mixture.shape, 4)
    more = []
    for how in ("none", "full"):
        step = as_measured(ask("dp=2,tp=2,ep=2", mixture, checkpointing=how))
        theirs = sent_bytes(
            mixture.shape, step.mesh, microbatch=1, microbatches=1, element_bytes=2, moe=moe, checkpointing=how
        )
        more.append((by_axis(step, parts_of(step)[0])["tp"], theirs["tp"]))
    (plain, their_plain), (full, their_full) = more
    assert full - plain == their_full - their_plain > 0


def test_gradients_are_summed_in_buckets_over_replicas_and_the_ranks_of_a_sequence() -> None:
    step = ask("dp=4,cp=2", "llama3-8b")
    [call] = calls(step, "dp")
    assert call.place.ranks == 8
    assert call.num_bytes <= BUCKET_BYTES
    assert call.num_bytes * call.count == pytest.approx(elements_of(step, parts_of(step)[0])[0] * 2)


def test_a_ring_passes_keys_on_once_less_than_it_has_ranks_and_a_pipelines_ends_have_one_neighbour() -> None:
    [ring] = calls(ask("cp=4", "llama3-8b", microbatches=3), "cp")
    assert (ring.op, ring.count) == ("send", 2 * 3 * 32 * 3)
    staged = ask("pp=4", "llama3-8b", microbatches=8)
    assert [calls(staged, "pp", part)[0].count for part in range(3)] == [8, 16, 8]
    assert calls(staged, "pp")[0].num_bytes == 8192 * 4096 * 2


def test_calls_are_of_the_meshs_groups_and_as_large_whatever_the_node() -> None:
    assert calls_of(ask("dp=1"), parts_of(ask("dp=1"))[0], 8) == ()
    for mesh in ("dp=8", "fsdp=8", "dp=2,fsdp=4", "pp=4", "cp=4", "tp=8", "dp=2,pp=2,fsdp=2,cp=2,tp=2"):
        step = ask(mesh, "llama3-8b", microbatches=4)
        sizes = {"dp": step.dp * step.cp, "fsdp": step.fsdp, "pp": step.pp, "cp": step.cp, "tp": step.tp}
        for part in parts_of(step):
            found = {node: calls_of(step, part, node) for node in (1, 8, 72)}
            said = [[(call.axis, call.op, call.num_bytes, call.count) for call in each] for each in found.values()]
            assert said[0] == said[1] == said[2], mesh
            for call in found[8]:
                assert call.place.ranks == sizes[call.axis], mesh
                assert min(call.num_bytes, call.count) > 0
                assert call.why
