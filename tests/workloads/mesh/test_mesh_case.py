"""A case of a mesh means a pipeline and a mixture where they are asked for, and is refused in one sentence."""

from typing import Any

from parbench.bench.machine.world_spec import WorldSpec
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.axes import with_experts
from tests.support.mesh_steps import HYBRID

Given = dict[str, Any]


def hybrid(world: int = 8, **params: Any) -> StepSpec:
    return strategies.mesh(params, world)


def test_a_mesh_carries_a_pipeline_and_a_mixture_where_they_are_asked_for() -> None:
    assert hybrid(4).mesh == {"dp": 4}  # without one all ranks are data parallel
    assert list(hybrid(mesh="pp=2,dp=2,tp=2").mesh) == ["pp", "dp", "tp"]
    dense = hybrid(mesh="dp=4,tp=2")
    assert (dense.pipeline, dense.moe) == (None, None)
    even = hybrid(mesh="pp=4,dp=2", schedule="gpipe", microbatches=6).pipeline
    split = hybrid(2, mesh="pp=2", split="3+1").pipeline
    assert even is not None
    assert split is not None
    assert (even.layers_by_stage, split.layers_by_stage) == ((1, 1, 1, 1), (3, 1))
    assert (even.schedule.name, even.schedule.ranks, even.schedule.microbatches) == ("gpipe", 4, 6)
    for etp, expected in ((1, (4, 8, 3, 1, 1, 2)), (2, (4, 8, 3, 1, 2, 2))):
        moe = hybrid(mesh=f"dp=4,tp=2,ep=4,etp={etp}", experts=8, top_k=3).moe
        assert moe is not None
        assert (moe.ep, moe.experts, moe.top_k, moe.tp, moe.etp, moe.experts_per_rank) == expected


def test_a_mesh_that_deals_out_experts_has_some() -> None:
    given: tuple[tuple[Given, int | None], ...] = (
        ({"mesh": "dp=4,ep=2"}, 8),
        ({"mesh": "dp=4,ep=2", "experts": 4}, 4),
        ({"mesh": "dp=4,ep=2", "experts": 0}, 0),
        ({"mesh": "dp=4,ep=1"}, None),
        ({"mesh": "tp=4,etp=2"}, 8),
        ({"mesh": ""}, None),
        ({}, None),
    )
    for params, experts in given:
        [found] = with_experts(params, WorldSpec(nproc=4, backend="gloo", device="cpu"))
        assert found.get("experts") == experts
        assert {**found, **params} == found
    assert HYBRID.expand is with_experts


def test_what_cannot_run_is_one_sentence() -> None:
    spec, zb_h1 = (
        WorldSpec(nproc=8, backend="gloo", device="cpu"),
        "schedule = zb_h1 is not allowed with",
    )
    cases: tuple[tuple[Given, str | None], ...] = (
        ({"mesh": "dp=2,tp=2"}, "dp(2) * tp(2) != world size(8)"),
        ({"mesh": "dp=8", "experts": 4, "top_k": 5}, "top_k(5) > experts(4)"),
        ({"mesh": "dp=8,etp=2", "experts": 4}, "tp(1) % etp(2) != 0"),
        (
            {"mesh": "dp=8", "experts": 4, "checkpointing": "selective"},
            "checkpointing(selective) is not for experts: ",
        ),
        (
            {"mesh": "pp=2,dp=4", "schedule": "zb_h1", "checkpointing": "full"},
            "checkpointing = full is not allowed with schedule = zb_h1, which splits the backward pass: ",
        ),
        (
            {"mesh": "pp=2,fsdp=4", "schedule": "zb_h1"},
            f"{zb_h1} fsdp(4): torch's FSDP reduces gradients after a ",
        ),
        (
            {"mesh": "pp=2,dp=4", "schedule": "zb_h1", "experts": 4},
            f"{zb_h1} experts(4): tokens come back from ",
        ),
        # these go with a whole backward pass, and where there is no pipeline
        ({"mesh": "pp=2,dp=4", "checkpointing": "selective"}, None),
        ({"mesh": "dp=8", "schedule": "zb_h1", "checkpointing": "full"}, None),
        ({"mesh": "pp=2,fsdp=4"}, None),
        ({"mesh": "pp=2,dp=4", "experts": 4, "checkpointing": "full"}, None),
    )
    for params, sentence in cases:
        told = HYBRID.refuse(HYBRID.whole(params), spec)
        assert told is None if sentence is None else str(told).startswith(sentence), params
