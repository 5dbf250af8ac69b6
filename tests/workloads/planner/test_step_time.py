"""Time of a step by hand, and dry runs as a whole."""

from dataclasses import replace

import msgspec
import pytest
from planner_asks import H100, PLAIN, ask

from workloads.pipeline_parallel.bubbles import closed_form
from workloads.pipeline_parallel.schedules import NAMES
from workloads.planner.ask import Ask, refusal
from workloads.planner.dry_run import dry_run
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import by_hardware
from workloads.planner.models import Model, model_of
from workloads.planner.placement import expert_shards
from workloads.planner.stage_flops import again_bytes, stage_flops
from workloads.planner.stage_parts import elements_of, parts_of
from workloads.planner.step_time import Axis, StepTime, step_time


def timed(step: Ask, hardware: Hardware = PLAIN, *, exact: bool = True) -> StepTime:
    assert refusal(step) is None
    return step_time(step, parts_of(step), hardware, by_hardware(hardware), exact=exact)


def axis(time: StepTime, name: str) -> Axis:
    return next(each for each in time.axes if each.name == name)


def hiding(across: float = 10e9, **overlap: float) -> Hardware:
    efficiency = msgspec.structs.replace(PLAIN.efficiency, overlap=overlap)
    return msgspec.structs.replace(PLAIN, efficiency=efficiency, across_bytes_per_second=across)


def test_one_rank_computes_and_updates_and_nothing_else() -> None:
    step = ask("dp=1", "llama3-8b", microbatches=3)
    [part] = parts_of(step)
    time = timed(step)
    assert (time.axes, time.bubble_method) == ((), "no pipeline")
    assert time.compute_seconds == pytest.approx(3 * stage_flops(step, part).total / 100e12)
    assert time.update_seconds == pytest.approx(elements_of(step, part)[0] * 28 / 1e12)
    assert time.seconds == time.compute_seconds + time.update_seconds
    assert timed(replace(step, element_bytes=4)).compute_seconds == pytest.approx(2 * time.compute_seconds)


def test_checkpointing_pays_in_arithmetic_or_in_memory_traffic() -> None:
    for how in ("none", "selective", "full"):
        step = ask("dp=1", "llama3-8b", checkpointing=how)
        [part] = parts_of(step)
        seconds = stage_flops(step, part).total / 100e12 + again_bytes(step, part) / 1e12
        assert timed(step).compute_seconds == pytest.approx(seconds), how
    none, full = (timed(ask("tp=8", "llama3-8b", checkpointing=how)) for how in ("none", "full"))
    assert axis(full, "tp").seconds / axis(none, "tp").seconds == pytest.approx(1.5, rel=0.02)


def test_the_update_touches_what_a_rank_owns() -> None:
    for model, mesh in (
        ("llama3-8b", "dp=2,fsdp=4"),
        ("mixtral-8x7b", "fsdp=8"),
        ("mixtral-8x7b", "fsdp=8,ep=4"),
        ("mixtral-8x7b", "dp=8,ep=8"),
    ):
        step = ask(mesh, model)
        dense, experts = elements_of(step, parts_of(step)[0])
        owned = dense / step.fsdp + experts / expert_shards(step.mesh)
        assert timed(step).update_seconds == pytest.approx(owned * 28 / 1e12), (model, mesh)


def test_the_parts_are_the_step_and_each_axis_says_what_it_assumes() -> None:
    time = timed(ask("dp=2,fsdp=2,pp=2,cp=2,tp=2", "llama3-8b", microbatches=4), H100)
    parts = time.compute_seconds + time.update_seconds + time.bubble_seconds
    assert time.seconds == pytest.approx(parts + sum(each.exposed_seconds for each in time.axes))
    assert {each.name for each in time.axes} == {"dp", "fsdp", "pp", "cp", "tp"}
    assert axis(time, "tp").assumption == "nothing hides it"
    assert "in the bubble" in axis(time, "pp").assumption
    assert axis(time, "fsdp").assumption.startswith("max(10% of it, what exceeds ")


def test_tensor_and_expert_communication_is_bytes_over_bandwidth_and_all_exposed() -> None:
    tp = axis(timed(ask("tp=8", "llama3-8b", microbatches=2)), "tp")
    assert tp.seconds == pytest.approx(tp.sent_bytes / 100e9)
    assert (tp.exposed_seconds, tp.hidden_seconds, tp.where) == (tp.seconds, 0, "inside a node")
    across = axis(timed(ask("tp=16", "gpt-175b")), "tp")
    assert across.seconds / across.sent_bytes == pytest.approx(1 / 80e9)
    ep = axis(timed(ask("fsdp=8,ep=8", "mixtral-8x7b"), hiding(fsdp=0.9, dp=0.9)), "ep")
    assert ep.exposed_seconds == ep.seconds > 0


def test_of_what_could_hide_a_share_does_while_compute_lasts() -> None:
    for overlap in (0.0, 0.5, 1.0):
        fsdp = axis(timed(ask("fsdp=8", "llama3-8b"), hiding(fsdp=overlap)), "fsdp")
        assert fsdp.exposed_seconds == pytest.approx(fsdp.seconds * (1 - overlap)), overlap
    time = timed(ask("fsdp=64", "llama3-8b", microbatches=2), hiding(1e7, fsdp=1.0))
    assert axis(time, "fsdp").hidden_seconds == pytest.approx(time.compute_seconds)
    step = ask("dp=64", "llama3-8b", microbatches=4)  # whose gradients hide behind one backward pass
    backward = stage_flops(step, parts_of(step)[0]).backward / 100e12
    assert axis(timed(step, hiding(1e7, dp=1.0)), "dp").hidden_seconds == pytest.approx(backward)


def test_rings_hide_behind_attention_and_other_methods_do_not() -> None:
    step = ask("cp=16", "llama3-8b", cp_method="ring", microbatches=2)
    attention = stage_flops(step, parts_of(step)[0]).attention / 100e12
    assert axis(timed(step, hiding(1e7, cp=1.0)), "cp").hidden_seconds == pytest.approx(2 * 3 * attention)
    for method in ("allgather_kv", "ulysses"):
        other = axis(timed(ask("cp=4", "llama3-8b", cp_method=method), hiding(cp=1.0)), "cp")
        assert other.exposed_seconds == other.seconds, method


def test_equal_stages_have_the_closed_forms_bubble() -> None:
    shape = model_of("small-llama").shape
    alike = Model(name="alike", shape=replace(shape, vocabulary=2))  # no head to speak of, so that stages are alike
    free = msgspec.structs.replace(PLAIN, inside_bytes_per_second=1e30)
    for name in NAMES:
        step = ask("pp=4", alike, schedule=name, microbatches=16)
        time = timed(step, free)
        each = time.compute_seconds / 16 / 3
        form = closed_form(name, ranks=4, microbatches=16, chunks=step.stages_per_rank, f=each, i=each, w=each)
        assert time.bubble_method.startswith("simulated")
        assert time.bubble_seconds == pytest.approx(form.makespan_bubble_seconds, rel=2e-2), name
    wide = ask("pp=4", "llama3-8b", microbatches=64)  # whose last stage's head makes the others wait
    first, *_, last = (stage_flops(wide, part).total for part in parts_of(wide))
    assert last > first
    assert timed(wide, free).compute_seconds == pytest.approx(64 * last / 100e12)


def test_closed_form_and_simulation_agree_and_each_is_taken_where_it_must_be() -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1"):
        step = ask("pp=8", "gpt-175b", schedule=name, microbatches=32)
        exact, formula = timed(step, H100), timed(step, H100, exact=False)
        assert "closed form" in formula.bubble_method
        assert exact.seconds == pytest.approx(formula.seconds, rel=0.02), name
    many = timed(ask("pp=12", "gpt-175b", microbatches=4096))
    assert many.bubble_method.startswith("closed form (P-1)(F+B)")
    without = timed(ask("pp=4", "llama3-8b", schedule="zb_h2", microbatches=5), exact=False)
    assert without.bubble_method.startswith("simulated")


def test_slow_messages_lengthen_the_bubble_and_more_microbatches_make_it_a_smaller_share() -> None:
    step = ask("pp=4", "llama3-8b", microbatches=8)
    slow = msgspec.structs.replace(PLAIN, inside_bytes_per_second=1e9)
    for exact in (True, False):
        assert timed(step, slow, exact=exact).bubble_seconds > timed(step, exact=exact).bubble_seconds
    assert axis(timed(step, slow), "pp").exposed_seconds == 0
    later, sooner = (timed(step, machine, exact=False).bubble_seconds for machine in (slow, PLAIN))
    message = 8192 * 4096 * 2 * (1 / 1e9 - 1 / 100e9)
    assert later - sooner == pytest.approx(2 * 3 * message)
    few, many = (timed(replace(step, microbatches=m)) for m in (4, 64))
    assert many.bubble_seconds / many.seconds < few.bubble_seconds / few.seconds / 4


def test_the_readmes_worked_number() -> None:
    run = dry_run(ask("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
    tp = next(axis for axis in run.time.axes if axis.name == "tp")
    assert run.time.compute_seconds == pytest.approx(7.05, abs=0.005)
    assert tp.exposed_seconds == pytest.approx(1.81, abs=0.005)
    assert run.time.bubble_seconds == pytest.approx(0.80, abs=0.005)
    assert run.time.seconds == pytest.approx(9.7, abs=0.05)
    assert run.mfu == pytest.approx(0.41, abs=0.005)  # Llama 3's own: 0.38 to 0.43 (arXiv 2407.21783, table 4)
    assert run.fullest.memory.total == pytest.approx(64e9, rel=0.01)
    assert run.fits
    assert run.tokens_per_second == pytest.approx(1024 * 8192 / run.time.seconds)
    assert run.mfu == pytest.approx(run.model_flops_per_second / 989.4e12)


def test_the_first_rank_of_a_pipeline_is_the_fullest_and_alone_decides_whether_it_fits() -> None:
    run = dry_run(ask("pp=4,tp=8", "llama3-70b", microbatches=16), H100)
    assert [held.part.pp_rank for held in run.ranks] == [0, 1, 3]
    assert run.fullest.part.pp_rank == 0
    needed = run.fullest.memory.total
    assert run.ranks[-1].memory.total < needed - 1
    for memory_bytes, fits in ((needed, True), (needed - 1, False)):
        assert replace(run, hardware=msgspec.structs.replace(PLAIN, memory_bytes=memory_bytes)).fits is fits


def test_what_counts_more_than_is_run_says_so_above_the_peak() -> None:
    run = dry_run(ask("cp=64,tp=8", model_of("llama3-8b", 4194304), checkpointing="selective"), H100)
    assert run.mfu > 1
    [caveat] = run.caveats
    assert caveat.startswith(f"MFU {run.mfu:.1%} is above 100%: it counts attention whole")
    assert caveat.endswith(f"executed is {run.executed_share:.1%} of the peak")
    assert run.executed_share == pytest.approx(0.55 * run.time.compute_seconds / run.time.seconds, rel=1e-3)
    assert dry_run(ask("fsdp=8", "llama3-8b"), H100).caveats == ()
