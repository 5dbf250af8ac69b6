"""Time of a step by hand, dry runs as a whole, and their bytes and memory beside those of real ranks."""

import gc
from dataclasses import replace

import msgspec
import pytest
import torch

from parbench.bench.world.torch_compat import allocations, profiling
from parbench.workloads.costs.flops import again_bytes, stage_flops
from parbench.workloads.costs.memory import owned_elements
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import build, checkpoint, draw_tokens, loss_of
from parbench.workloads.pipeline_parallel.bubbles import closed_form
from parbench.workloads.pipeline_parallel.schedules import NAMES
from parbench.workloads.planner.dry_run import Axis, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.models import model_of
from parbench.workloads.step.memory import SavedTensors
from tests.studies import planned_components
from tests.studies.planned_components import EVEN, POINTS, Point, point
from tests.support.planner_asks import H100, SIMPLE_HARDWARE, make_spec
from tests.support.ranks import Ranks


def timed(spec: StepSpec, hardware: Hardware = SIMPLE_HARDWARE, *, exact: bool = True) -> DryRun:
    assert spec.refusal() is None
    return dry_run(spec, hardware, exact=exact)


def axis(time: DryRun, name: str) -> Axis:
    return next(each for each in time.axes if each.name == name)


def hiding(across: float = 10e9, **overlap: float) -> Hardware:
    efficiency = msgspec.structs.replace(SIMPLE_HARDWARE.efficiency, overlap=overlap)
    return msgspec.structs.replace(
        SIMPLE_HARDWARE, efficiency=efficiency, across_bytes_per_second=across
    )


def test_one_rank_computes_and_updates_and_nothing_else() -> None:
    for how in (
        "none",
        "selective",
        "full",
    ):  # checkpointing pays in arithmetic or in memory traffic
        spec = make_spec("dp=1", "llama3-8b", microbatches=3, checkpointing=how)
        time, at = timed(spec), spec.at(0)
        assert (time.axes, time.bubble_method) == ((), "no pipeline")
        each = stage_flops(at).total / 100e12 + again_bytes(at) / 1e12
        assert time.compute_seconds == pytest.approx(3 * each), how
        assert time.update_seconds == pytest.approx(owned_elements(at) * 28 / 1e12)
        assert time.seconds == time.compute_seconds + time.update_seconds
    wide = timed(make_spec("dp=1", "llama3-8b", element_bytes=4))
    assert wide.compute_seconds == pytest.approx(
        2 * timed(make_spec("dp=1", "llama3-8b")).compute_seconds
    )


def test_tensor_and_expert_communication_is_bytes_over_bandwidth_and_all_exposed() -> None:
    tp = axis(timed(make_spec("tp=8", "llama3-8b", microbatches=2)), "tp")
    assert tp.seconds == pytest.approx(tp.sent_bytes / 100e9)
    assert (tp.exposed_seconds, tp.hidden_seconds, tp.where) == (tp.seconds, 0, "inside a node")
    again = axis(timed(make_spec("tp=8", "llama3-8b", microbatches=2, checkpointing="full")), "tp")
    assert again.seconds / tp.seconds == pytest.approx(1.5, rel=0.02)
    across = axis(timed(make_spec("tp=16", "gpt-175b")), "tp")
    assert across.seconds / across.sent_bytes == pytest.approx(1 / 80e9)
    ep = axis(timed(make_spec("fsdp=8,ep=8", "mixtral-8x7b"), hiding(fsdp=0.9, dp=0.9)), "ep")
    assert ep.exposed_seconds == ep.seconds > 0


def test_of_what_could_hide_a_share_does_while_compute_lasts() -> None:
    for overlap in (0.0, 0.5, 1.0):
        fsdp = axis(timed(make_spec("fsdp=8", "llama3-8b"), hiding(fsdp=overlap)), "fsdp")
        assert fsdp.exposed_seconds == pytest.approx(fsdp.seconds * (1 - overlap)), overlap
    time = timed(make_spec("fsdp=64", "llama3-8b", microbatches=2), hiding(1e7, fsdp=1.0))
    assert axis(time, "fsdp").hidden_seconds == pytest.approx(time.compute_seconds)
    spec = make_spec(
        "dp=64", "llama3-8b", microbatches=4
    )  # whose gradients hide behind one backward pass
    backward = stage_flops(spec.at(0)).backward / 100e12
    assert axis(timed(spec, hiding(1e7, dp=1.0)), "dp").hidden_seconds == pytest.approx(backward)
    inside, far = (
        make_spec(mesh, "mixtral-8x7b", microbatches=2)
        for mesh in ("fsdp=8,ep=8", "fsdp=64,ep=8,tp=4")
    )
    ep = axis(timed(inside, hiding(ep=0.5)), "ep")  # beside what another microbatch computes
    assert ep.exposed_seconds == pytest.approx(ep.seconds / 2)
    time = timed(far, hiding(1e7, ep=1.0))
    assert axis(time, "ep").hidden_seconds == pytest.approx(time.compute_seconds)
    spec = make_spec(
        "cp=16", "llama3-8b", cp_method="ring", microbatches=2
    )  # a ring hides behind attention
    attention = stage_flops(spec.at(0)).attention / 100e12
    assert axis(timed(spec, hiding(1e7, cp=1.0)), "cp").hidden_seconds == pytest.approx(
        2 * 3 * attention
    )
    for method in ("allgather_kv", "ulysses"):
        other = axis(timed(make_spec("cp=4", "llama3-8b", cp_method=method), hiding(cp=1.0)), "cp")
        assert other.exposed_seconds == other.seconds, method


def test_equal_stages_have_the_closed_forms_bubble() -> None:
    model = model_of("small-llama")
    alike = replace(
        model, shape=replace(model.shape, vocabulary=2)
    )  # no head to speak of, so that stages are alike
    free = msgspec.structs.replace(SIMPLE_HARDWARE, inside_bytes_per_second=1e30)
    for name in NAMES:
        spec = make_spec("pp=4", alike, schedule=name, microbatches=16)
        time = timed(spec, free)
        each = time.compute_seconds / 16 / 3
        form = closed_form(
            name, ranks=4, microbatches=16, chunks=spec.stages_per_rank, f=each, i=each, w=each
        )
        assert time.bubble_method.startswith("simulated")
        assert time.bubble_seconds == pytest.approx(form.makespan_bubble_seconds, rel=2e-2), name
    wide = make_spec(
        "pp=4", "llama3-8b", microbatches=64
    )  # whose last stage's head makes the others wait
    first, *_, last = (stage_flops(at).total for at in wide.positions)
    assert last > first
    assert timed(wide, free).compute_seconds == pytest.approx(64 * last / 100e12)


def test_closed_form_and_simulation_agree_and_each_is_taken_where_it_must_be() -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1"):
        spec = make_spec("pp=8", "gpt-175b", schedule=name, microbatches=32)
        exact, formula = timed(spec, H100), timed(spec, H100, exact=False)
        assert "closed form" in formula.bubble_method
        assert exact.seconds == pytest.approx(formula.seconds, rel=0.02), name
    many = timed(make_spec("pp=12", "gpt-175b", microbatches=4096))
    assert many.bubble_method.startswith("closed form (P-1)(F+B)")
    without = timed(make_spec("pp=4", "llama3-8b", schedule="zb_h2", microbatches=5), exact=False)
    assert without.bubble_method.startswith("simulated")


def test_bubble_grows_with_slow_messages_and_shrinks_with_microbatches() -> None:
    spec = make_spec("pp=4", "llama3-8b", microbatches=8)
    slow = msgspec.structs.replace(SIMPLE_HARDWARE, inside_bytes_per_second=1e9)
    assert timed(spec, slow).bubble_seconds > timed(spec).bubble_seconds
    assert axis(timed(spec, slow), "pp").exposed_seconds == 0
    later, sooner = (
        timed(spec, machine, exact=False).bubble_seconds for machine in (slow, SIMPLE_HARDWARE)
    )
    assert later - sooner == pytest.approx(2 * 3 * 8192 * 4096 * 2 * (1 / 1e9 - 1 / 100e9))
    few, many = (timed(replace(spec, microbatches=m)) for m in (4, 64))
    assert many.bubble_seconds / many.seconds < few.bubble_seconds / few.seconds / 4


def test_the_readmes_worked_number() -> None:
    run = dry_run(make_spec("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
    assert run.compute_seconds == pytest.approx(7.05, abs=0.005)
    assert axis(run, "tp").exposed_seconds == pytest.approx(1.81, abs=0.005)
    assert run.bubble_seconds == pytest.approx(0.80, abs=0.005)
    assert run.seconds == pytest.approx(9.7, abs=0.05)
    assert run.mfu == pytest.approx(
        0.41, abs=0.005
    )  # Llama 3's own: 0.38 to 0.43 (arXiv 2407.21783, table 4)
    assert run.fullest.memory.total == pytest.approx(64e9, rel=0.01)
    assert run.fits
    assert run.tokens_per_second == pytest.approx(1024 * 8192 / run.seconds)
    assert run.mfu == pytest.approx(run.model_flops_per_second / 989.4e12)
    first, *_, last = run.ranks
    assert run.fullest is first
    assert last.memory.total < first.memory.total - 1
    for short, fits in ((0, True), (1, False)):  # the fullest alone decides
        hardware = msgspec.structs.replace(SIMPLE_HARDWARE, memory_bytes=first.memory.total - short)
        assert replace(run, hardware=hardware).fits is fits


def test_what_counts_more_than_is_run_says_so_above_the_peak() -> None:
    run = dry_run(
        make_spec("cp=64,tp=8", model_of("llama3-8b", 4194304), checkpointing="selective"), H100
    )
    executed = 0.55 * run.compute_seconds / run.seconds
    assert run.mfu > 1
    assert [caveat.rpartition("; ")[2] for caveat in run.caveats] == [
        f"what is executed is {executed:.1%} of the peak"
    ]
    assert dry_run(make_spec("fsdp=8", "llama3-8b"), H100).caveats == ()


def assert_planned(of: Point, ranks: Ranks) -> None:
    assert [row for row in planned_components.compare(of, ranks) if row.missed] == [], of.words


def test_bytes_state_and_activations_are_those_that_ranks_counted(two_ranks: Ranks) -> None:
    assert_planned(point(2, "tp_sp", "tiny-llama", "selective"), two_ranks)


@pytest.mark.full
def test_bytes_state_and_activations_are_those_that_ranks_counted_of_every_strategy(
    two_ranks: Ranks, four_ranks: Ranks
) -> None:
    for of in POINTS:
        if of.ranks <= four_ranks.size:
            assert_planned(of, two_ranks if of.ranks == two_ranks.size else four_ranks)
    assert_planned(
        point(4, "hybrid", "tiny", mesh="dp=2,fsdp=2,ep=2", checkpointing="full", **EVEN),
        four_ranks,
    )


def counted_and_kept(name: str, how: str) -> tuple[int, int]:
    model, tokens = build(SHAPES[name], 0, torch.device("cpu")), draw_tokens(SHAPES[name], 2, 0, 0)
    checkpoint(model, how)
    with SavedTensors(model) as saved:
        loss_of(model, tokens)
    gc.collect()  # else what earlier passes left in cycles is freed meanwhile
    with profiling(torch.device("cpu"), memory=True) as profiler:
        loss = loss_of(model, tokens)
    return saved.num_bytes, sum(allocations(profiler)) + tokens.nbytes - loss.nbytes


def test_what_is_counted_of_activations_is_what_the_allocator_keeps() -> None:
    """But for the loss, which stays as well, and the drawn tokens, which were there before."""
    for name in ("tiny", "tiny-llama"):
        for how in ("none", "selective", "full"):
            counted, kept = counted_and_kept(name, how)
            assert counted == kept, (name, how)
