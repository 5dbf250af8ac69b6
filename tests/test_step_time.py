"""Time of a step: by hand on a plain machine, then what must hold for any."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import H100, PLAIN, ask

from workloads.pipeline.bubbles import closed_form
from workloads.pipeline.schedules import NAMES
from workloads.planner.ask import Ask, refusal
from workloads.planner.catalog import Model, model_of
from workloads.planner.expert_places import expert_shards
from workloads.planner.hardware import Efficiency, Hardware
from workloads.planner.link_time import by_hardware
from workloads.planner.stage_flops import again_bytes, stage_flops
from workloads.planner.stage_parts import elements_of, parts_of
from workloads.planner.step_time import Axis, StepTime, step_time


def timed(step: Ask, hardware: Hardware = PLAIN, *, exact: bool = True) -> StepTime:
    assert refusal(step) is None
    return step_time(step, parts_of(step), hardware, by_hardware(hardware), exact=exact)


def axis(time: StepTime, name: str) -> Axis:
    return next(each for each in time.axes if each.name == name)


def hiding(**overlap: float) -> Hardware:
    return msgspec.structs.replace(PLAIN, efficiency=msgspec.structs.replace(PLAIN.efficiency, overlap=overlap))


def test_one_rank_computes_and_updates_and_nothing_else() -> None:
    step = ask("dp=1", "llama3-8b", microbatches=3)
    [part] = parts_of(step)
    time = timed(step)
    assert time.axes == ()
    assert time.compute_seconds == pytest.approx(3 * stage_flops(step, part).total / 100e12)
    assert time.update_seconds == pytest.approx(elements_of(step, part)[0] * 28 / 1e12)
    assert time.seconds == time.compute_seconds + time.update_seconds
    assert time.bubble_method == "no pipeline"


def test_the_parts_are_the_step() -> None:
    time = timed(ask("dp=2,fsdp=2,pp=2,cp=2,tp=2", "llama3-8b", microbatches=4), H100)
    parts = time.compute_seconds + time.update_seconds + time.bubble_seconds
    assert time.seconds == pytest.approx(parts + sum(each.exposed_seconds for each in time.axes))
    assert {each.name for each in time.axes} == {"dp", "fsdp", "pp", "cp", "tp"}


def test_float32_takes_twice_as_long() -> None:
    one, other = (timed(ask("dp=1", "llama3-8b", element_bytes=e)).compute_seconds for e in (2, 4))
    assert other == pytest.approx(2 * one)


def test_tensor_communication_is_bytes_over_bandwidth_and_all_exposed() -> None:
    time = timed(ask("tp=8", "llama3-8b", microbatches=2))
    tp = axis(time, "tp")
    assert tp.seconds == pytest.approx(tp.sent_bytes / 100e9)
    assert (tp.exposed_seconds, tp.hidden_seconds, tp.where) == (tp.seconds, 0, "inside a node")


def test_tensor_parallel_beyond_a_node_pays_the_slow_link() -> None:
    inside, across = (axis(timed(ask(f"tp={tp}", "gpt-175b")), "tp") for tp in (8, 16))
    assert across.seconds / across.sent_bytes == pytest.approx(1 / 80e9)
    assert inside.seconds / inside.sent_bytes == pytest.approx(1 / 100e9)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_of_what_could_hide_a_share_does_while_compute_lasts(overlap: float) -> None:
    fsdp = axis(timed(ask("fsdp=8", "llama3-8b"), hiding(fsdp=overlap)), "fsdp")
    assert fsdp.exposed_seconds == pytest.approx(fsdp.seconds * (1 - overlap))


def test_what_exceeds_compute_stays_exposed_whatever_the_share() -> None:
    step = ask("fsdp=64", "llama3-8b", checkpointing="none")
    slow = msgspec.structs.replace(hiding(fsdp=1.0), across_bytes_per_second=1e7)
    time = timed(step, slow)
    fsdp = axis(time, "fsdp")
    assert fsdp.exposed_seconds == pytest.approx(fsdp.seconds - time.compute_seconds)


def test_gradients_hide_behind_one_backward_pass() -> None:
    slow = msgspec.structs.replace(hiding(dp=1.0), across_bytes_per_second=1e7)
    step = ask("dp=64", "llama3-8b", microbatches=4)
    dp = axis(timed(step, slow), "dp")
    backward = stage_flops(step, parts_of(step)[0]).backward / 100e12
    assert dp.exposed_seconds == pytest.approx(dp.seconds - backward)


@pytest.mark.parametrize("method", ["allgather_kv", "ulysses"])
def test_rings_hide_behind_attention_and_other_methods_do_not(method: str) -> None:
    machine = hiding(cp=1.0)
    ring = axis(timed(ask("cp=4", "llama3-8b", cp_method="ring"), machine), "cp")
    other = axis(timed(ask("cp=4", "llama3-8b", cp_method=method), machine), "cp")
    assert ring.exposed_seconds < ring.seconds
    assert other.exposed_seconds == other.seconds


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_have_the_closed_forms_bubble(name: str) -> None:
    shape = model_of("small-llama").shape
    alike = Model(name="alike", shape=replace(shape, vocabulary=2))  # no head to speak of, so that stages are alike
    step = ask("pp=4", alike, schedule=name, microbatches=16)
    time = timed(step, msgspec.structs.replace(PLAIN, inside_bytes_per_second=1e30))
    each = time.compute_seconds / 16 / 3
    form = closed_form(name, ranks=4, microbatches=16, chunks=step.stages_per_rank, f=each, i=each, w=each)
    assert time.bubble_method.startswith("simulated")
    assert time.bubble_seconds == pytest.approx(form.makespan_bubble_seconds, rel=2e-2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_closed_form_and_simulation_agree_where_stages_are_alike(name: str) -> None:
    step = ask("pp=8", "gpt-175b", schedule=name, microbatches=32, microbatch=1)
    exact, formula = timed(step, H100), timed(step, H100, exact=False)
    assert "closed form" in formula.bubble_method
    assert exact.seconds == pytest.approx(formula.seconds, rel=0.02)


def test_too_many_actions_are_not_simulated() -> None:
    time = timed(ask("pp=12", "gpt-175b", microbatches=4096))
    assert time.bubble_method.startswith("closed form (P-1)(F+B)")


def test_a_schedule_without_a_closed_form_is_simulated_all_the_same() -> None:
    time = timed(ask("pp=4", "llama3-8b", schedule="zb_h2", microbatches=5), exact=False)
    assert time.bubble_method.startswith("simulated")


def test_slow_messages_lengthen_the_bubble() -> None:
    step = ask("pp=4", "llama3-8b", microbatches=8)
    slow = msgspec.structs.replace(PLAIN, inside_bytes_per_second=1e9)
    assert timed(step, slow).bubble_seconds > timed(step).bubble_seconds
    assert timed(step, slow, exact=False).bubble_seconds > timed(step, exact=False).bubble_seconds
    assert axis(timed(step, slow), "pp").exposed_seconds == 0


def test_more_microbatches_make_the_bubble_a_smaller_share() -> None:
    few, many = (timed(ask("pp=4", "llama3-8b", microbatches=m)) for m in (4, 64))
    assert many.bubble_seconds / many.seconds < few.bubble_seconds / few.seconds / 4


@given(st.sampled_from(["dp=2", "fsdp=4", "pp=2", "cp=2", "tp=4", "fsdp=2,pp=2,tp=2"]), st.floats(0.1, 1.0))
@settings(deadline=None, max_examples=30)
def test_a_slower_machine_is_never_faster(mesh: str, share: float) -> None:
    step = ask(mesh, "llama3-8b", microbatches=4)
    slower = msgspec.structs.replace(
        H100,
        flops_per_second=H100.flops_per_second * share,
        inside_bytes_per_second=H100.inside_bytes_per_second * share,
        across_bytes_per_second=H100.across_bytes_per_second * share,
    )
    assert timed(step, slower).seconds >= timed(step, H100).seconds


@given(st.dictionaries(st.sampled_from(["dp", "fsdp", "cp"]), st.floats(0, 1)))
@settings(deadline=None, max_examples=30)
def test_exposed_lies_between_nothing_and_all(overlap: dict[str, float]) -> None:
    hardware = msgspec.structs.replace(H100, efficiency=Efficiency(overlap=overlap))
    for each in timed(ask("dp=2,fsdp=2,cp=2,tp=2", "llama3-8b"), hardware).axes:
        assert 0 <= each.exposed_seconds <= each.seconds


def test_the_update_touches_what_a_rank_owns() -> None:
    for mesh, owned in (("dp=8", 1), ("fsdp=8", 8), ("dp=2,fsdp=4", 4)):
        step = ask(mesh, "llama3-8b")
        parameters = elements_of(step, parts_of(step)[0])[0]
        assert timed(step).update_seconds == pytest.approx(parameters / owned * 28 / 1e12)


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=8,ep=4", "dp=8,ep=8"])
def test_the_update_touches_a_ranks_experts_once(mesh: str) -> None:
    step = ask(mesh, "mixtral-8x7b")
    dense, experts = elements_of(step, parts_of(step)[0])
    expected = dense / step.fsdp + experts / expert_shards(step.mesh)
    assert timed(step).update_seconds == pytest.approx(expected * 28 / 1e12)


def test_exchanges_with_experts_are_exposed() -> None:
    ep = axis(timed(ask("fsdp=8,ep=8", "mixtral-8x7b"), hiding(fsdp=0.9, dp=0.9)), "ep")
    assert ep.exposed_seconds == ep.seconds > 0


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_recomputation_costs_what_it_repeats(checkpointing: str) -> None:
    step = ask("dp=1", "llama3-8b", checkpointing=checkpointing)
    [part] = parts_of(step)
    flops = stage_flops(step, part).total / 100e12
    moved = again_bytes(step, part) / 1e12
    assert timed(step).compute_seconds == pytest.approx(flops + moved)


def test_recomputed_layers_gather_and_scatter_again() -> None:
    none, full = (timed(ask("tp=8", "llama3-8b", checkpointing=how)) for how in ("none", "full"))
    assert axis(full, "tp").seconds / axis(none, "tp").seconds == pytest.approx(1.5, rel=0.02)


def test_an_assumption_is_told_beside_each_axis() -> None:
    time = timed(ask("dp=2,fsdp=2,pp=2,tp=2", "llama3-8b", microbatches=4), H100)
    assert axis(time, "tp").assumption == "nothing hides it"
    assert "in the bubble" in axis(time, "pp").assumption
    assert axis(time, "fsdp").assumption.startswith("max(10% of it, what exceeds ")


def test_the_last_stages_head_makes_the_others_wait() -> None:
    small = msgspec.structs.replace(PLAIN, inside_bytes_per_second=1e30)
    wide = ask("pp=4", "llama3-8b", microbatches=64)
    time = timed(wide, small)
    first, *_, last = (stage_flops(wide, part).total for part in parts_of(wide))
    assert last > first
    assert time.compute_seconds == pytest.approx(64 * last / 100e12)
