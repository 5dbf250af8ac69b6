"""A case's parameters define a mixture of experts, or are refused with an equation."""

from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.text import UserError
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of, num_expert_parameters
from parbench.workloads.model.shapes import SHAPES
from tests.support.training_steps import DEFINITION_BY_NAME

TINY = SHAPES["tiny"]


def make_moe(nproc: int = 4, **params: Any) -> Moe:
    return moe_of({"microbatch": 4, **params}, TINY, nproc)


def refuse(name: str, nproc: int, params: dict[str, Any]) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    spec = WorldSpec(nproc=nproc, backend="gloo", device="cpu")
    return definition.refuse(definition.whole(params), spec)


def test_moe_defaults() -> None:
    moe = make_moe()
    assert (moe.ep, moe.etp, moe.tp) == (4, 1, 1)
    assert moe.experts == 8
    assert moe.experts_per_rank == 2
    assert moe.top_k == 2
    assert moe.shared == 1
    assert moe.slots(256) is None
    assert moe.generator(0, 4) is None
    assert make_moe(etp=2, tp=2).ep == 2


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


@pytest.mark.parametrize(
    ("nproc", "params", "equation"),
    [
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
        (2, {"routing": "hot"}, "'hot'"),
    ],
)
def test_impossible_mixture_is_refused(nproc: int, params: dict[str, Any], equation: str) -> None:
    assert equation in str(refuse("ep_layer", nproc, params))


@pytest.mark.parametrize(
    ("nproc", "params", "equation"),
    [
        (3, {"tp": 2, "ep": 1}, "world size(3) % tp(2) != 0"),
        (8, {"tp": 8}, "heads(4) % tp(8) != 0"),
        (4, {"tp": 4, "kv_heads": 2}, "kv_heads(2) % tp(4) != 0"),
        (4, {"tp": 4, "sequence": 66}, "sequence(66) % tp(4) != 0"),
        (2, {"tp": 2, "fsdp": True}, "tp(2) > 1 with fsdp(true)"),
        (2, {"tp": 2, "chunks": 129}, "chunks(129) > tokens of a microbatch(128)"),
        (2, {"checkpointing": "selective"}, "checkpointing(selective)"),
    ],
)
def test_impossible_step_is_refused(nproc: int, params: dict[str, Any], equation: str) -> None:
    assert equation in str(refuse("ep_step", nproc, params))


@pytest.mark.parametrize(
    ("nproc", "params"),
    [
        (1, {}),
        (8, {}),
        (2, {"tp": 2, "chunks": 128}),
        (4, {"tp": 2, "ep": 2, "etp": 2}),
        (2, {"checkpointing": "full"}),
    ],
)
def test_possible_step_is_accepted(nproc: int, params: dict[str, Any]) -> None:
    assert refuse("ep_step", nproc, params) is None


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(UserError, match=r"capacity\(-0.5\) < 0"):
        make_moe(capacity=-0.5)


def test_layer_alone_has_no_tp() -> None:
    with pytest.raises(UserError, match="tp"):
        refuse("ep_layer", 2, {"tp": 2})


def test_flops_of_mixture() -> None:
    """Two experts of half the size and no shared one are the dense FFN and a router."""
    moe = make_moe(1, shared=0)
    router = 6 * TINY.layers * TINY.hidden * 8
    flops = flops_per_token(TINY, moe)
    assert flops == flops_per_token(TINY) + router
    assert flops_per_token(TINY, make_moe(1, shared=0, experts=16)) == flops + router
    shared = make_moe(1, shared=1)
    expert = 6 * TINY.layers * num_expert_parameters(TINY, shared)
    assert flops_per_token(TINY, shared) == flops + expert
