"""A dry run as a whole: sizes that are known, sums that must hold, and seconds for sixteen thousand ranks."""

import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import H100, PLAIN, ask

from workloads.planner.ask import Ask
from workloads.planner.catalog import model_of, num_model_parameters
from workloads.planner.dry_run import dry_run
from workloads.planner.hardware import PRESETS
from workloads.planner.stage_flops import stage_flops
from workloads.planner.stage_parts import parts_of

# of the peak in what is executed; MFU counts the masked half of attention too, an eighth of this model's work
_MOST_MFU = 0.55 / (1 - 1 / 8)


def test_seventy_billion_on_a_thousand_gpus_is_of_the_right_size() -> None:
    run = dry_run(ask("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
    assert run.fits
    assert 0.3 < run.mfu < 0.5  # Llama 3's own: 0.38 to 0.43 (arXiv 2407.21783, table 4)
    assert run.tokens_per_second == pytest.approx(1024 * 8192 / run.time.seconds)
    assert run.mfu == pytest.approx(run.model_flops_per_second / 989.4e12)


@pytest.mark.measures
def test_sixteen_thousand_ranks_take_no_longer_than_a_person_waits() -> None:
    began = time.perf_counter()
    run = dry_run(ask("dp=128,pp=16,tp=8", "llama3-70b", microbatches=64, checkpointing="full"), H100)
    assert time.perf_counter() - began < 5
    assert run.ask.world == 16384
    assert run.fits


def test_the_first_rank_of_a_pipeline_is_the_fullest() -> None:
    run = dry_run(ask("pp=4,tp=8", "llama3-70b", microbatches=16), H100)
    assert run.fullest.part.pp_rank == 0
    assert [held.part.pp_rank for held in run.ranks] == [0, 1, 3]


def test_a_step_that_does_not_fit_says_what_it_needs_and_what_there_is() -> None:
    run = dry_run(ask("tp=8", "llama3-70b"), H100)
    assert not run.fits
    assert run.missing.startswith("llama3-70b with tp=8 needs 188.1 GB on pp rank 0: 80 layers with embedding and head")
    assert "(141.1 GB of state, 46.9 GB of activations, 0.0 GB of buffers) > 73.6 GB usable of 80" in run.missing


def test_it_fits_exactly_up_to_what_is_usable() -> None:
    run = dry_run(ask("dp=2"), PLAIN)
    needed = run.fullest.memory.total
    assert dry_run(ask("dp=2"), msgspec.structs.replace(PLAIN, memory_bytes=needed)).fits
    assert not dry_run(ask("dp=2"), msgspec.structs.replace(PLAIN, memory_bytes=needed - 1)).fits


def test_replicas_add_tokens_and_little_time() -> None:
    one, eight = (dry_run(ask(f"dp={dp},tp=8", "llama3-8b"), H100) for dp in (1, 8))
    assert eight.tokens_per_second / one.tokens_per_second == pytest.approx(8, rel=0.2)
    assert eight.tokens_per_second < 8 * one.tokens_per_second


def test_a_calls_time_can_come_from_elsewhere() -> None:
    step = ask("dp=2,tp=4", "llama3-8b")
    free = dry_run(step, H100, seconds=lambda call: 0.0)
    assert free.time.exposed_seconds == 0
    assert free.time.seconds < dry_run(step, H100).time.seconds


def test_mfu_does_not_count_recomputation() -> None:
    plain, full = (dry_run(ask("dp=1", "llama3-8b", checkpointing=how), PLAIN) for how in ("none", "full"))
    assert full.time.compute_seconds / plain.time.compute_seconds == pytest.approx(4 / 3, rel=0.03)
    assert full.mfu < plain.mfu


def test_the_readmes_worked_number() -> None:
    run = dry_run(ask("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
    tp = next(axis for axis in run.time.axes if axis.name == "tp")
    assert run.time.compute_seconds == pytest.approx(7.05, abs=0.005)
    assert tp.exposed_seconds == pytest.approx(1.81, abs=0.005)
    assert run.time.bubble_seconds == pytest.approx(0.80, abs=0.005)
    assert run.time.seconds == pytest.approx(9.7, abs=0.05)
    assert run.mfu == pytest.approx(0.41, abs=0.005)
    assert run.fullest.memory.total == pytest.approx(64e9, rel=0.01)


def test_only_the_fullest_rank_decides_whether_it_fits() -> None:
    run = dry_run(ask("pp=4,tp=8", "llama3-70b", microbatches=16), H100)
    last = run.ranks[-1].memory.total
    between = (last + run.fullest.memory.total) / 2
    assert last < between
    machine = msgspec.structs.replace(PLAIN, memory_bytes=between)
    assert not dry_run(run.ask, machine).fits


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_every_preset_trains_eight_billion_on_a_node(name: str) -> None:
    run = dry_run(ask("fsdp=8", "llama3-8b", checkpointing="selective"), PRESETS[name])
    assert run.fits
    assert 0.2 < run.mfu < _MOST_MFU


def test_newer_machines_are_faster() -> None:
    steps = [dry_run(ask("fsdp=8", "llama3-8b"), PRESETS[name]).time.seconds for name in ("a100", "h100", "b200")]
    assert steps == sorted(steps, reverse=True)


def test_zero3_at_a_fixed_batch_stops_scaling_and_tensor_with_pipeline_does_not() -> None:
    slow = msgspec.structs.replace(PRESETS["a100"], rails=1)

    def rate(mesh: str, **more: Any) -> float:
        step = ask(mesh, "gpt-175b", checkpointing="full", **more)
        return dry_run(step.with_batch(1536), slow).model_flops_per_second

    sharded = [rate(f"fsdp={n}", microbatch=1536 // n) for n in (384, 768, 1536)]
    mixed = [rate(f"dp={n // 96},pp=12,tp=8") for n in (384, 768, 1536)]
    assert sharded[0] > mixed[0]  # which pays for tensor parallelism and its bubble
    assert sharded[2] < 0.5 * mixed[2]


@pytest.mark.parametrize(
    ("mesh", "sequence"), [("fsdp=8", 8192), ("fsdp=8,cp=2", 16384), ("fsdp=8,cp=8", 65536), ("fsdp=8,cp=16", 131072)]
)
def test_context_parallel_keeps_activations_at_the_same_size(mesh: str, sequence: int) -> None:
    run = dry_run(ask(mesh, model_of("llama3-8b", sequence), checkpointing="selective"), H100)
    base = dry_run(ask("fsdp=8", "llama3-8b", checkpointing="selective"), H100)
    assert run.fullest.memory.activations == pytest.approx(base.fullest.memory.activations)


def test_attention_makes_long_sequences_slower_for_each_token() -> None:
    short, long = (
        dry_run(ask("fsdp=8,cp=8", model_of("llama3-8b", sequence)), H100).tokens_per_second
        for sequence in (8192, 131072)
    )
    flops = [stage_flops(step, parts_of(step)[0]).total / step.tokens for step in _long_and_short()]
    assert flops[1] > 2 * flops[0]
    assert long < 16 * short


def _long_and_short() -> tuple[Ask, Ask]:
    return (
        ask("fsdp=8,cp=8", model_of("llama3-8b", 8192)),
        ask("fsdp=8,cp=8", model_of("llama3-8b", 131072)),
    )


def test_a_mixture_computes_less_than_a_dense_model_of_its_size() -> None:
    mixed = dry_run(ask("fsdp=64,ep=8", "mixtral-8x7b", checkpointing="selective"), H100)
    dense = dry_run(ask("fsdp=64", "llama3-70b", checkpointing="selective"), H100)
    sizes = [num_model_parameters(run.ask.model) for run in (mixed, dense)]
    assert sizes[1] / sizes[0] < 1.6
    assert dense.time.compute_seconds / mixed.time.compute_seconds > 4


@given(
    st.sampled_from(["dp", "fsdp", "pp", "cp", "tp"]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["1f1b", "gpipe", "interleaved", "zb_h1"]),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_all_numbers_are_finite_and_not_negative(axis: str, how: str, schedule: str, microbatch: int) -> None:
    step = ask(f"{axis}=4", "llama3-8b", checkpointing=how, schedule=schedule, microbatch=microbatch, microbatches=8)
    run = dry_run(step, H100)
    numbers = [run.time.compute_seconds, run.time.update_seconds, run.time.bubble_seconds, run.mfu]
    for each in run.time.axes:
        numbers += [each.seconds, each.exposed_seconds, each.hidden_seconds, each.sent_bytes]
    for held in run.ranks:
        numbers += [held.memory.state, held.memory.activations, held.memory.buffers]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert 0 < run.mfu < _MOST_MFU


def test_what_counts_more_than_is_run_says_so_above_the_peak() -> None:
    step = ask("cp=64,tp=8", model_of("llama3-8b", 4194304), checkpointing="selective")
    run = dry_run(step, H100)
    assert run.mfu > 1
    [caveat] = run.caveats
    assert caveat.startswith(f"MFU {run.mfu:.1%} is above 100%: it counts attention whole")
    assert caveat.endswith(f"executed is {run.executed_share:.1%} of the peak")
    assert run.executed_share == pytest.approx(0.55 * run.time.compute_seconds / run.time.seconds, rel=1e-3)
    assert dry_run(ask("fsdp=8", "llama3-8b"), H100).caveats == ()
