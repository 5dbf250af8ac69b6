"""Dry runs, closed forms and simulations beside what others published of such steps."""

import pytest
from planner_asks import ask

from parbench.bench.results.stats import median
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.measured.published import (
    SELENE,
    bubbles,
    published,
    scaling,
    tensor_drops,
    zero_memory,
)
from parbench.workloads.planner.measured.training_runs import executed_teraflops, training_runs


def test_zeros_memory_and_simulated_bubbles_are_the_papers() -> None:
    for claim in zero_memory():
        assert claim.predicted == pytest.approx(claim.quoted, rel=0.005), claim.name
    for claim in bubbles():
        assert claim.predicted == pytest.approx(claim.quoted, abs=1e-9), claim.name


def test_tensor_parallelism_loses_little_inside_a_node_and_much_with_each_step_beyond_it() -> None:
    alone, with_sequence = tensor_drops()[:4], tensor_drops()[4:]
    assert [one.predicted for one in alone] == [one.predicted for one in with_sequence]
    assert all(f"tp={tp} against tp={tp // 2}" in one.name for tp, one in zip((4, 8, 16, 32), alone, strict=True))
    drops = [one.predicted for one in with_sequence]
    assert 0 > drops[0] > drops[1] > -0.3 > drops[2] > drops[3]
    for claim in with_sequence:  # as the planner has it; without, the last is 20 points off
        assert claim.predicted == pytest.approx(claim.quoted, abs=0.105), claim.name


def test_zero3_decays_with_the_gpus_at_a_fixed_batch_and_tensor_with_pipeline_hardly() -> None:
    found = scaling()
    rates = [claim.predicted for claim in found]
    assert rates[0] > 1.3 * rates[1] > 1.3 * 1.8 * rates[2]
    assert rates[3] > rates[4] > rates[5] > 0.88 * rates[3]
    # the decay is the bubble's: 11 of 384, 192, 96 microbatches
    assert rates[5] / rates[3] == pytest.approx((1 + 11 / 384) / (1 + 11 / 96), rel=0.02)
    for claim in found:
        assert claim.predicted == pytest.approx(claim.quoted, rel=0.3), claim.name


def test_with_all_of_a_nodes_cards_zero3_would_not_decay_and_megatron_counts_recomputation() -> None:
    step = ask("fsdp=1536", "gpt-175b", checkpointing="full")
    rails, one = (executed_teraflops(dry_run(step, machine)) for machine in (PRESETS["a100"], SELENE))
    assert rails > 2 * one
    run = dry_run(ask("fsdp=384", "gpt-175b", microbatch=4, checkpointing="full"), SELENE)
    assert 1e12 * executed_teraflops(run) / run.model_flops_per_second == pytest.approx(4 / 3, rel=0.02)


def test_every_number_has_a_name_of_its_own_and_a_source() -> None:
    assert len({one.name for one in published()}) == len(published()) == 24 + len(list(training_runs()))
    assert all(one.source for one in published())


def test_published_training_runs_are_predicted_within_what_a_plan_may_be_off() -> None:
    *runs, beside = training_runs()
    assert len(runs) >= 12
    assert beside.spec.refusal() is None
    assert dry_run(beside.spec.checkpointed("full"), beside.hardware).fits
    # as its source has it, tokens travel beside compute; where nothing hides them a step takes twice as long
    assert beside.published.predicted == pytest.approx(beside.published.quoted, rel=0.15)
    assert dry_run(beside.spec, PRESETS["h800"]).seconds > 1.7 * beside.predicted.seconds
    # as assumed for all alike: no run has an efficiency of its own
    assert {run.hardware.name for run in runs} == {"a100", "h100", "jean-zay"}
    assert all(run.hardware.efficiency == PRESETS["h100"].efficiency for run in runs)
    errors = [abs(run.published.predicted / run.published.quoted - 1) for run in runs]
    assert median(errors) < 0.15
    assert max(errors) < 0.4
    # the published mesh of the largest model carries it, layers recomputed
    [large] = [run for run in runs if run.spec.world == 16384 and run.spec.shape.sequence == 8192]
    assert large.spec.refusal() is None
    assert dry_run(large.spec.checkpointed("full"), large.hardware).fits
