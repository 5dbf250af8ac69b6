"""Published shapes: the direction must come out, and about the size."""

import pytest

from workloads.planner.ask import Ask
from workloads.planner.catalog import model_of
from workloads.planner.dry_run import dry_run
from workloads.planner.hardware import PRESETS
from workloads.planner.published import (
    SELENE,
    Claim,
    bubbles,
    claims,
    megatron_flops_per_second,
    published,
    scaling,
    tensor_drops,
    zero_memory,
)


@pytest.mark.parametrize("claim", zero_memory(), ids=lambda claim: claim.what)
def test_zero_takes_the_memory_that_its_paper_says(claim: Claim) -> None:
    assert claim.predicted == pytest.approx(claim.quoted, rel=0.005)


@pytest.mark.parametrize("claim", bubbles(), ids=lambda claim: claim.what)
def test_simulated_bubbles_are_the_papers(claim: Claim) -> None:
    assert claim.predicted == pytest.approx(claim.quoted, abs=1e-9)


def test_tensor_parallel_collapses_beyond_the_node() -> None:
    at_16, at_32 = (claim.predicted for claim in tensor_drops())
    assert at_32 < at_16 < -0.3
    for claim in tensor_drops():
        assert claim.predicted == pytest.approx(claim.quoted, abs=0.1)


ZERO, MIXED = scaling()[:3], scaling()[3:]


def test_zero3_decays_with_the_gpus_at_a_fixed_batch() -> None:
    rates = [claim.predicted for claim in ZERO]
    assert rates[0] > 1.3 * rates[1] > 1.3 * 1.8 * rates[2]


def test_tensor_pipeline_and_data_parallel_hardly_decay() -> None:
    rates = [claim.predicted for claim in MIXED]
    assert rates[0] > rates[1] > rates[2] > 0.88 * rates[0]
    # the decay is the bubble's: 11 of 384, 192, 96 microbatches
    assert rates[2] / rates[0] == pytest.approx((1 + 11 / 384) / (1 + 11 / 96), rel=0.02)


@pytest.mark.parametrize("claim", [*ZERO, *MIXED], ids=lambda claim: claim.what)
def test_rates_are_of_about_the_quoted_size(claim: Claim) -> None:
    assert claim.predicted == pytest.approx(claim.quoted, rel=0.3)


def test_with_all_of_a_nodes_cards_zero3_would_not_decay() -> None:
    ask = Ask(model=model_of("gpt-175b"), mesh={"fsdp": 1536}, microbatch=1, checkpointing="full")
    rails, one = (megatron_flops_per_second(dry_run(ask, machine)) for machine in (PRESETS["a100"], SELENE))
    assert rails > 2 * one


def test_megatron_counts_what_is_computed_again() -> None:
    ask = Ask(model=model_of("gpt-175b"), mesh={"fsdp": 384}, microbatch=4, checkpointing="full")
    run = dry_run(ask, SELENE)
    assert megatron_flops_per_second(run) / run.model_flops_per_second == pytest.approx(4 / 3, rel=0.02)


def test_every_claim_says_where_it_is_from() -> None:
    found = claims()
    assert len(found) == 18
    assert all(claim.source and claim.group and claim.what for claim in found)


def test_what_a_report_keeps_is_every_claim_in_order() -> None:
    kept = published()
    assert [(one.quoted, one.predicted, one.unit, one.source) for one in kept] == [
        (claim.quoted, claim.predicted, claim.unit, claim.source) for claim in claims()
    ]
    assert len({one.name for one in kept}) == len(kept)
    assert kept[0].name == "ZeRO memory, 7.5 B, 64 ranks: ddp"
