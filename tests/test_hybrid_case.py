"""What parameters of a hybrid step mean, and which are refused before any rank starts."""

from typing import Any

import pytest

from bench.cases import Setting
from bench.errors import UserError
from workloads.definitions import DEFINITIONS
from workloads.hybrid.hybrid_case import Hybrid, hybrid_of, refuse_hybrid, with_experts
from workloads.shapes import SHAPES

TINY = SHAPES["tiny"]
[DEFINITION] = [one for one in DEFINITIONS if one.name == "workload.hybrid"]


def hybrid(world: int = 8, **params: Any) -> Hybrid:
    return hybrid_of(params, TINY, world)


def test_without_a_mesh_all_ranks_are_data_parallel() -> None:
    assert hybrid(4).mesh == {"dp": 4}


def test_a_mesh_keeps_its_order() -> None:
    assert list(hybrid(mesh="pp=2,dp=2,tp=2").mesh) == ["pp", "dp", "tp"]


def test_a_pipeline_is_there_where_layers_are_dealt_out() -> None:
    assert hybrid(mesh="dp=4,tp=2").pipeline is None
    pipeline = hybrid(mesh="pp=4,dp=2", schedule="gpipe", microbatches=6).pipeline
    assert pipeline is not None
    assert (pipeline.schedule.name, pipeline.schedule.ranks, pipeline.schedule.microbatches) == ("gpipe", 4, 6)
    assert pipeline.layers_by_stage == (1, 1, 1, 1)


def test_a_split_is_the_pipeline_s() -> None:
    pipeline = hybrid(2, mesh="pp=2", split="3+1").pipeline
    assert pipeline is not None
    assert pipeline.layers_by_stage == (3, 1)


def test_a_mixture_is_there_where_experts_are_asked_for() -> None:
    assert hybrid(mesh="dp=8").moe is None
    moe = hybrid(mesh="dp=4,tp=2,ep=4", experts=8, top_k=3).moe
    assert moe is not None
    assert (moe.ep, moe.experts, moe.top_k, moe.tp, moe.etp, moe.experts_per_rank) == (4, 8, 3, 1, 1, 2)


@pytest.mark.parametrize(
    ("given", "experts"),
    [
        ({"mesh": "dp=4,ep=2"}, 8),
        ({"mesh": "dp=4,ep=2", "experts": 4}, 4),
        ({"mesh": "dp=4,ep=2", "experts": 0}, 0),
        ({"mesh": "dp=4,ep=1"}, None),
        ({"mesh": "tp=4,etp=2"}, 8),
        ({"mesh": ""}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_mesh_that_deals_out_experts_has_some(given: dict[str, Any], experts: int | None) -> None:
    [found] = with_experts(given, Setting(nproc=4, backend="gloo", device="cpu"))
    assert found.get("experts") == experts
    assert {**found, **given} == found
    assert DEFINITION.expand is with_experts


def test_experts_are_split_as_the_mesh_says() -> None:
    moe = hybrid(mesh="dp=4,tp=2,ep=4,etp=2", experts=8).moe
    assert moe is not None
    assert (moe.ep, moe.etp, moe.experts_per_rank, moe.expert_ffn) == (4, 2, 2, 256)


def test_a_gradient_is_of_all_ranks_but_the_pipeline_s() -> None:
    assert hybrid(16, mesh="dp=2,pp=2,cp=2,tp=2").gradient_ranks == 8


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"mesh": "dp=2,tp=2"}, "dp(2) * tp(2) != world size(8)"),
        ({"mesh": "tp=8"}, "heads(4) % tp(8) != 0"),
        (
            {"mesh": "pp=2,dp=4", "schedule": "zb_h1", "checkpointing": "full"},
            "checkpointing = full is not allowed with schedule = zb_h1, which splits the backward pass: layers would "
            "be computed again for the input gradient and once more for the weight gradient",
        ),
        (
            {"mesh": "dp=8", "experts": 4, "checkpointing": "selective"},
            "checkpointing(selective) is not for experts: their grouped products are not among what it keeps",
        ),
        (
            {"mesh": "pp=2,fsdp=4", "schedule": "zb_h1"},
            "schedule = zb_h1 is not allowed with fsdp(4): torch's FSDP reduces gradients after a whole backward pass, "
            "and this schedule splits it",
        ),
        (
            {"mesh": "pp=2,dp=4", "schedule": "zb_h1", "experts": 4},
            "schedule = zb_h1 is not allowed with experts(4): tokens come back from their experts once in a backward "
            "pass, and this schedule splits it",
        ),
        ({"mesh": "dp=8", "experts": 4, "top_k": 5}, "top_k(5) > experts(4)"),
        ({"mesh": "dp=8,ep=2"}, "ep(2) > 1 without experts: a dense model has none to deal out"),
        ({"mesh": "dp=4,tp=2,etp=2"}, "etp(2) > 1 without experts: a dense model has none to split"),
        ({"mesh": "dp=8,etp=2", "experts": 4}, "tp(1) % etp(2) != 0"),
    ],
    ids=str,
)
def test_what_cannot_run_is_one_sentence(params: dict[str, Any], sentence: str) -> None:
    assert refuse_hybrid(TINY, params, 8) == sentence
    with pytest.raises(UserError):
        hybrid_of(params, TINY, 8)
    setting = Setting(nproc=8, backend="gloo", device="cpu")
    assert DEFINITION.refuse(dict(DEFINITION.case(params).params), setting) == sentence


@pytest.mark.parametrize(
    "given",
    [
        {"mesh": "dp=2,pp=2,tp=2"},
        {"mesh": "pp=2,dp=4", "checkpointing": "selective"},
        {"mesh": "dp=4,cp=2,ep=2", "experts": 4, "compute": "timed:1ms"},
        {"mesh": "dp=8", "schedule": "zb_h1", "checkpointing": "full"},
        {"mesh": "dp=8,ep=2", "experts": 4, "checkpointing": "full"},
    ],
    ids=str,
)
def test_what_can_run_is_not_refused(given: dict[str, Any]) -> None:
    assert (
        DEFINITION.refuse(dict(DEFINITION.case(given).params), Setting(nproc=8, backend="gloo", device="cpu")) is None
    )
