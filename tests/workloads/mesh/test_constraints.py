"""Each rule of a mesh is an equation: it lets through what fits, and refuses the rest with the numbers."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from mesh_steps import HYBRID

from bench.machine.world_spec import WorldSpec
from bench.text import UserError
from workloads.mesh.axes import CP_METHODS, multiplied, refuse, sequences_of
from workloads.mesh.mesh_case import Hybrid, hybrid_of, refuse_hybrid, with_experts
from workloads.model.shapes import SHAPES, Shape

TINY = SHAPES["tiny"]
Given = dict[str, Any]


def reason(mesh: dict[str, int], *, shape: Shape = TINY, **more: Any) -> str | None:
    given = {"microbatches": 4, "microbatch": 1, "world": math.prod(multiplied(mesh).values()), **more}
    return refuse(shape, mesh, **given)


def test_what_fits_is_let_through() -> None:
    fitting: tuple[tuple[dict[str, int], Given], ...] = (
        ({"dp": 2}, {}),
        ({"fsdp": 4, "tp": 2}, {}),
        ({"dp": 2, "fsdp": 2, "pp": 4, "cp": 2, "tp": 4}, {}),
        ({"pp": 2, "dp": 2, "etp": 1}, {}),
        ({"pp": 3}, {"split": "2+1+1"}),
        ({"dp": 2, "tp": 2}, {"shape": replace(TINY, ffn=511), "num_experts": 8}),  # a mixture's FFNs are not split
        ({"dp": 2, "fsdp": 2, "cp": 2, "ep": 8}, {"num_experts": 8}),
        ({"dp": 2, "pp": 2, "ep": 2}, {"num_experts": 8}),
    )
    for mesh, more in fitting:
        assert reason(mesh, **more) is None, (mesh, more)
    for method in CP_METHODS:  # and nothing that leaves ranks unlike heads, layers or tokens
        for dp, pp, cp, tp in itertools.product((1, 2, 3, 4), repeat=4):
            fits = reason({"dp": dp, "pp": pp, "cp": cp, "tp": tp}, cp_method=method) is None
            turns = 2 if CP_METHODS[method] == "zigzag" and cp > 1 else 1
            even = not (4 % tp or 4 % pp or 64 % (turns * cp) or 64 % (cp * tp))
            assert fits == (even and (method != "ulysses" or 4 // tp % cp == 0)), (method, dp, pp, cp, tp)


REFUSED: list[tuple[dict[str, int], Given, str]] = [
    ({"dp": 2, "tp": 4}, {"world": 6}, "dp(2) * tp(4) != world size(6)"),
    ({"dp": 2, "ep": 2}, {"world": 4, "num_experts": 8}, "dp(2) != world size(4)"),
    ({"fdsp": 2}, {}, "mesh axis 'fdsp' is not dp, fsdp, pp, cp, tp, ep or etp; did you mean 'fsdp'?"),
    ({"dp": 0}, {"world": 1}, "dp(0) < 1"),
    ({"dp": 2, "etp": 2}, {}, "etp(2) != 1: experts are whole here on every rank that holds them"),
    ({"tp": 2, "etp": 2}, {"split_experts": True}, "etp(2) > 1 without experts: a dense model has none to split"),
    ({"dp": 2, "tp": 2, "etp": 4}, {"num_experts": 8, "split_experts": True}, "tp(2) % etp(4) != 0"),
    ({"tp": 4}, {"shape": replace(TINY, heads=2, kv_heads=2)}, "heads(2) % tp(4) != 0"),
    ({"tp": 4}, {"shape": SHAPES["tiny-llama"]}, "kv_heads(2) % tp(4) != 0"),
    ({"tp": 4}, {"shape": replace(TINY, hidden=130)}, "hidden(130) % tp(4) != 0"),
    ({"dp": 2, "tp": 2}, {"shape": replace(TINY, ffn=511)}, "ffn(511) % tp(2) != 0"),
    ({"cp": 3}, {}, "sequence(64) % cp(3) != 0"),
    (
        {"cp": 2},
        {"shape": replace(TINY, sequence=66), "cp_method": "zigzag"},
        "sequence(66) % (2 * cp(2)) != 0: zigzag gives each rank two chunks",
    ),
    ({"tp": 2}, {"shape": replace(TINY, sequence=63)}, "sequence(63) % tp(2) != 0"),
    ({"cp": 2, "tp": 2}, {"shape": replace(TINY, sequence=66)}, "sequence(66) % (cp(2) * tp(2)) != 0"),
    ({"cp": 4, "tp": 2}, {"cp_method": "ulysses"}, "heads(4) / tp(2) % cp(4) != 0: ulysses deals out heads"),
    (
        {"cp": 2},
        {"cp_method": "rings"},
        "cp method 'rings' is not ring, striped, zigzag, allgather_kv or ulysses; did you mean 'ring'?",
    ),
    ({"pp": 2}, {"microbatches": 0}, "microbatches(0) < 1"),
    ({"pp": 8}, {}, "layers(4) < pp(8) * chunks(1)"),
    ({"pp": 4}, {"schedule": "interleaved"}, "layers(4) < pp(4) * chunks(2)"),
    ({"pp": 3}, {}, "layers(4) % stages(3) != 0: split = 2+1+... says how many each stage takes"),
    ({"pp": 2}, {"split": "1+2"}, "split = '1+2' holds 3 layers, and the model has layers(4)"),
    ({"pp": 2}, {"schedule": "dualpipe_v", "microbatches": 3}, "dualpipe_v needs microbatches(3) >= stages(4)"),
    (
        {"pp": 2, "fsdp": 2},
        {"schedule": "interleaved", "chunks": 4, "shape": replace(TINY, layers=8)},
        "chunks(4) > 3 with fsdp(2): torch's runtime keeps so many stages gathered and would gather the others again",
    ),
    ({"dp": 2, "ep": 2}, {}, "ep(2) > 1 without experts: a dense model has none to deal out"),
    ({"dp": 4, "ep": 4}, {"num_experts": 6}, "experts(6) % ep(4) != 0"),
    ({"dp": 2, "tp": 2, "ep": 4}, {"num_experts": 8}, "(dp(2) * fsdp(1) * cp(1)) % ep(4) != 0"),
    ({"dp": 2}, {"microbatch": 0}, "microbatch(0) < 1"),
    (
        {"dp": 2, "fsdp": 2, "tp": 2},
        {"global_batch": 32},
        "dp(2) * fsdp(2) * microbatch(1) * microbatches(4) = 16 != global batch(32)",
    ),
    ({"tp": 2}, {"global_batch": 32}, "dp(1) * microbatch(1) * microbatches(4) = 4 != global batch(32)"),
]


def test_what_does_not_fit_is_refused_by_equation() -> None:
    for mesh, more, equation in REFUSED:
        assert reason(mesh, **more) == equation


def test_the_global_batch_is_what_the_data_ranks_take() -> None:
    mesh = {"dp": 2, "fsdp": 3, "pp": 2, "cp": 2, "tp": 2}
    assert sequences_of(mesh, microbatch=2, microbatches=4) == 48
    assert refuse(TINY, mesh, microbatches=4, microbatch=2, world=48, global_batch=48) is None


def hybrid(world: int = 8, **params: Any) -> Hybrid:
    return hybrid_of(params, TINY, world)


def test_a_mesh_carries_a_pipeline_and_a_mixture_where_they_are_asked_for() -> None:
    assert hybrid(4).mesh == {"dp": 4}  # without one all ranks are data parallel
    assert list(hybrid(mesh="pp=2,dp=2,tp=2").mesh) == ["pp", "dp", "tp"]
    assert hybrid(16, mesh="dp=2,pp=2,cp=2,tp=2").gradient_ranks == 8  # all ranks but the pipeline's
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
    spec, zb_h1 = WorldSpec(nproc=8, backend="gloo", device="cpu"), "schedule = zb_h1 is not allowed with"
    cases: tuple[tuple[Given, str | None], ...] = (
        ({"mesh": "dp=2,tp=2"}, "dp(2) * tp(2) != world size(8)"),
        ({"mesh": "dp=8", "experts": 4, "top_k": 5}, "top_k(5) > experts(4)"),
        ({"mesh": "dp=8,etp=2", "experts": 4}, "tp(1) % etp(2) != 0"),
        ({"mesh": "dp=8", "experts": 4, "checkpointing": "selective"}, "checkpointing(selective) is not for experts: "),
        (
            {"mesh": "pp=2,dp=4", "schedule": "zb_h1", "checkpointing": "full"},
            "checkpointing = full is not allowed with schedule = zb_h1, which splits the backward pass: ",
        ),
        ({"mesh": "pp=2,fsdp=4", "schedule": "zb_h1"}, f"{zb_h1} fsdp(4): torch's FSDP reduces gradients after a "),
        ({"mesh": "pp=2,dp=4", "schedule": "zb_h1", "experts": 4}, f"{zb_h1} experts(4): tokens come back from "),
        # these go with a whole backward pass, and where there is no pipeline
        ({"mesh": "pp=2,dp=4", "checkpointing": "selective"}, None),
        ({"mesh": "dp=8", "schedule": "zb_h1", "checkpointing": "full"}, None),
        ({"mesh": "pp=2,fsdp=4"}, None),
        ({"mesh": "pp=2,dp=4", "experts": 4, "checkpointing": "full"}, None),
    )
    for params, sentence in cases:
        told = refuse_hybrid(TINY, params, 8)
        assert told == HYBRID.refuse(HYBRID.whole(params), spec)
        assert told is None if sentence is None else str(told).startswith(sentence), params
    with pytest.raises(UserError, match="world size"):
        hybrid_of({"mesh": "dp=2,tp=2"}, TINY, 8)
