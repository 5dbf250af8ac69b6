"""A case's parameters define a mixture of experts, or are refused with an equation."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.text import UserError
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of, num_expert_parameters
from parbench.workloads.expert_parallel.routing import ROUTER
from parbench.workloads.model.shapes import SHAPES, Shape
from tests.support.refusals import usage_error
from tests.support.training_steps import DEFINITION_BY_NAME

TINY = SHAPES["tiny"]
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64
)


def make_moe(nproc: int = 4, shape: Shape = TINY, **params: Any) -> Moe:
    return moe_of({"microbatch": 4, **params}, shape, nproc)


def refuse(name: str, nproc: int, **params: Any) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    spec = WorldSpec(nproc=nproc, backend="gloo", device="cpu")
    return definition.refuse(definition.whole(params), spec)


def test_moe_defaults() -> None:
    moe = make_moe()
    assert (moe.ep, moe.etp, moe.tp, moe.experts, moe.top_k) == (4, 1, 1, 8, 2)
    assert (moe.experts_per_rank, moe.expert_ffn, moe.shared) == (2, 256, 1)
    assert (moe.variant, moe.routing, moe.slots(256)) == ("all_to_all", ROUTER, None)
    split = make_moe(etp=2, tp=2)
    assert (split.ep, split.etp, split.tp, split.experts_per_rank) == (2, 2, 2, 4)


@pytest.mark.parametrize(
    ("params", "expert_ffn"),
    [
        ({"top_k": 4}, 128),
        ({"top_k": 3}, 168),  # 170.7, down to a multiple of 16 bytes
        ({"top_k": 3, "etp": 2}, 160),  # both halves are multiples of 16 bytes
        ({"expert_ffn": 40}, 40),
    ],
)
def test_moe_expert_ffn(params: dict[str, Any], expert_ffn: int) -> None:
    assert make_moe(**params).expert_ffn == expert_ffn


def test_moe_slots_of_capacity() -> None:
    assert make_moe(capacity=1.25).slots(256) == 80
    assert make_moe(capacity=1.0, top_k=1).slots(60) == 8


def test_moe_generator() -> None:
    generator = make_moe(routing="zipf:2", experts=16, top_k=4).generator(5, 4)
    assert generator is not None
    assert (generator.name, generator.strength, generator.seed) == ("zipf", 2.0, 5)
    assert (generator.experts, generator.top_k, generator.parts) == (16, 4, 4)
    assert make_moe().generator(0, 4) is None


@pytest.mark.parametrize("name", ["ep_dispatch", "ep_layer", "ep_step"])
def test_impossible_mixture_is_refused(name: str) -> None:
    table: list[tuple[int, dict[str, Any], str]] = [
        (4, {"ep": 3}, "world size(4) % ep(3) != 0"),
        (4, {"experts": 6}, "experts(6) % ep(4) != 0"),
        (2, {"top_k": 9}, "top_k(9) > experts(8)"),
        (2, {"expert_ffn": 30}, "expert_ffn(30) % 8 != 0"),
        (2, {"hidden": 36, "heads": 2}, "hidden(36) % 8 != 0"),
        (2, {"chunks": 2, "variant": "allgather"}, "chunks(2) > 1 with variant(allgather)"),
        (2, {"chunks": 300}, "chunks(300) > tokens of a microbatch(256)"),
        (4, {"ep": 4, "etp": 2}, "world size(4) % (ep(4) * etp(2)) != 0"),
        (4, {"etp": 4, "expert_ffn": 66}, "expert_ffn(66) % etp(4) != 0"),
        (4, {"etp": 4, "expert_ffn": 80}, "expert_ffn(80) / etp(4) % 8 != 0"),
    ]
    for nproc, params, equation in table:
        assert str(refuse(name, nproc, **params)).startswith(equation), params
    assert [refuse(name, nproc) for nproc in (1, 2, 4, 8)] == [None] * 4


def test_impossible_attention_split_is_refused() -> None:
    table: list[tuple[int, dict[str, Any], str | None]] = [
        (3, {"tp": 2, "ep": 1}, "world size(3) % tp(2) != 0"),
        (8, {"tp": 8}, "heads(4) % tp(8) != 0"),
        (4, {"tp": 4, "kv_heads": 2}, "kv_heads(2) % tp(4) != 0"),
        (4, {"tp": 4, "sequence": 66}, "sequence(66) % tp(4) != 0"),
        (2, {"tp": 2, "fsdp": True}, "tp(2) > 1 with fsdp(true)"),
        (2, {"tp": 2, "chunks": 129}, "chunks(129) > tokens of a microbatch(128)"),
        (2, {"checkpointing": "selective"}, "checkpointing(selective)"),
        (2, {"tp": 2, "chunks": 128}, None),
        (4, {"tp": 2, "ep": 2, "etp": 2}, None),
        (2, {"checkpointing": "full"}, None),
    ]
    for nproc, params, equation in table:
        error = refuse("ep_step", nproc, **params)
        assert error is None if equation is None else str(error).startswith(equation), params


def test_attention_split_needs_divisible_hidden() -> None:
    shape = replace(TINY, hidden=136, heads=3, kv_heads=3)
    error = usage_error(moe_of, {"tp": 3, "ep": 1, "microbatch": 1}, shape, 3)
    assert error == "hidden(136) % tp(3) != 0"


def test_layer_alone_has_no_tp() -> None:
    for name in ("ep_dispatch", "ep_layer"):
        with pytest.raises(UserError, match="tp"):
            refuse(name, 2, tp=2)


def test_impossible_capacity_and_routing_are_refused() -> None:
    assert usage_error(moe_of, {"capacity": -0.5}, TINY, 2).startswith("capacity(-0.5) < 0")
    assert "'hot'" in str(refuse("ep_layer", 2, routing="hot"))


def test_flops_of_mixture() -> None:
    """Two experts of half the size and no shared one are the dense FFN and a router."""
    moe, shared = (make_moe(1, GPT, shared=count) for count in (0, 1))
    router = 6 * GPT.layers * GPT.hidden * 8
    flops = flops_per_token(GPT, moe)
    assert flops == flops_per_token(GPT) + router
    assert flops_per_token(GPT, make_moe(1, GPT, shared=0, experts=16)) == flops + router
    expert = 6 * GPT.layers * num_expert_parameters(GPT, shared)
    assert flops_per_token(GPT, shared) == flops + expert
