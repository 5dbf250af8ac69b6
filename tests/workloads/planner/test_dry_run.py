"""A dry run takes the time computed by hand, and has the bytes and memory of real ranks."""

from dataclasses import replace

import msgspec
import pytest

from parbench.workloads.costs.flops import count_attention_flops, count_rank_flops
from parbench.workloads.costs.memory import count_owned_elements
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.planner.dry_run import Axis, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.models import load_model
from tests.support.workloads.planner_asks import SIMPLE_HARDWARE, make_spec

FAST_LINKS = msgspec.structs.replace(SIMPLE_HARDWARE, inside_bytes_per_second=1e30)


def axis_of(run: DryRun, name: str) -> Axis:
    return next(axis for axis in run.axes if axis.name == name)


def make_slow_hardware(**overlap: float) -> Hardware:
    """Return hardware with slow links that hides a share of some axes' communication."""
    efficiency = msgspec.structs.replace(SIMPLE_HARDWARE.efficiency, overlap=overlap)
    return msgspec.structs.replace(
        SIMPLE_HARDWARE,
        efficiency=efficiency,
        across_bytes_per_second=1e7,
    )


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_dry_run_of_one_rank_is_compute_and_update(checkpointing: str) -> None:
    spec = make_spec("dp=1", "llama3-8b", microbatches=3, checkpointing=checkpointing)
    position = spec.make_rank_view(0)
    run = dry_run(spec, SIMPLE_HARDWARE)
    microbatch_seconds = count_rank_flops(position) / 100e12
    assert run.axes == ()
    assert run.compute_seconds == pytest.approx(3 * microbatch_seconds)
    assert run.update_seconds == pytest.approx(count_owned_elements(position) * 28 / 1e12)
    assert run.seconds == run.compute_seconds + run.update_seconds


def test_experts_share_the_compute_that_hides_shards() -> None:
    spec = make_spec("fsdp=64,ep=8", "mixtral-8x7b")
    run = dry_run(spec, make_slow_hardware(fsdp=1.0, efsdp=1.0))
    hidden = axis_of(run, "fsdp").hidden_seconds + axis_of(run, "efsdp").hidden_seconds
    assert hidden == pytest.approx(run.compute_seconds)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_dry_run_hides_share_of_overlap(overlap: float) -> None:
    run = dry_run(make_spec("fsdp=8", "llama3-8b"), make_slow_hardware(fsdp=overlap))
    axis = axis_of(run, "fsdp")
    assert axis.exposed_seconds == pytest.approx(axis.seconds * (1 - overlap))


@pytest.mark.parametrize(
    ("mesh", "model", "axis"),
    [
        ("fsdp=64", "llama3-8b", "fsdp"),
        ("fsdp=64,ep=8,tp=4", "mixtral-8x7b", "ep"),
        ("fsdp=64,ep=8", "mixtral-8x7b", "efsdp"),
    ],
)
def test_dry_run_hides_no_longer_than_compute(mesh: str, model: str, axis: str) -> None:
    hardware = make_slow_hardware(**{axis: 1.0})
    hardware = msgspec.structs.replace(hardware, inside_bytes_per_second=1e7)
    run = dry_run(make_spec(mesh, model, microbatches=2), hardware)
    assert axis_of(run, axis).hidden_seconds == pytest.approx(run.compute_seconds)


def test_dry_run_hides_ddp_during_one_backward_pass() -> None:
    spec = make_spec("dp=64", "llama3-8b", microbatches=4)
    run = dry_run(spec, make_slow_hardware(dp=1.0))
    attention = count_attention_flops(spec.shape) * spec.local_tokens * spec.shape.layers
    gemms = (count_rank_flops(spec.make_rank_view(0)) - 3.5 * attention) / 3
    backward_seconds = (2 * gemms + 2.5 * attention) / 100e12
    assert axis_of(run, "dp").hidden_seconds == pytest.approx(backward_seconds)


def test_dry_run_hides_ring_attention_only() -> None:
    hardware = make_slow_hardware(cp=1.0)
    spec = make_spec("cp=16", "llama3-8b", cp_method="ring", microbatches=2)
    attention = count_attention_flops(spec.shape) * spec.local_tokens * spec.shape.layers
    attention_seconds = attention / 100e12
    ring = axis_of(dry_run(spec, hardware), "cp")
    assert ring.hidden_seconds == pytest.approx(2 * 3.5 * attention_seconds)
    ulysses = make_spec("cp=4", "llama3-8b", cp_method="ulysses")
    assert axis_of(dry_run(ulysses, hardware), "cp").hidden_seconds == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dry_run_bubble_of_equal_stages(schedule: str) -> None:
    model = load_model("small-llama")
    # Short sequences and a vocabulary of two leave no attention and no head, so that all stages
    # and both halves of the backward pass take as long.
    model = replace(model, shape=replace(model.shape, vocabulary=2, sequence=2))
    spec = make_spec("pp=4", model, schedule=schedule, microbatches=16)
    run = dry_run(spec, FAST_LINKS)
    third = run.compute_seconds / 16 / 3
    passes = PassSeconds(third, third, third)
    bubble = SCHEDULES[schedule].compute_bubble(spec.pipeline_size, passes)
    assert bubble is not None
    assert run.bubble_seconds == pytest.approx(bubble.seconds, rel=0.02)


def test_dry_run_computes_at_the_slowest_stage() -> None:
    spec = make_spec("pp=4", "llama3-8b", microbatches=64)
    flops = [count_rank_flops(position) for position in spec.distinct_views]
    assert flops[-1] > flops[0]
    run = dry_run(spec, FAST_LINKS)
    assert run.compute_seconds == pytest.approx(64 * flops[-1] / 100e12)
