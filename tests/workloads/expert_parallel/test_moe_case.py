"""A case's parameters define a mixture of experts, or are refused with an equation."""

from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.workloads.costs.flops import count_flops_per_token
from parbench.workloads.expert_parallel.moe_case import Moe, make_moe
from parbench.workloads.model.shapes import SHAPES, count_ffn_matrices
from tests.support.workloads.training_steps import DEFINITION_BY_NAME

TINY = SHAPES["tiny"]
Params = dict[str, Any]


def make_tiny_moe(ranks: int = 4, tp: int = 1, **params: Any) -> Moe:
    return make_moe({"microbatch": 4, **params}, TINY, ranks, tp)


def refuse(name: str, nproc: int, params: Params) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    world_spec = WorldSpec(nproc=nproc, backend="gloo", device="cpu")
    return definition.refuse(definition.complete(params), world_spec)


@pytest.mark.parametrize(
    ("params", "expert_ffn"),
    [
        ({"top_k": 4}, 128),
        ({"top_k": 3}, 168),  # 170.7, down to a multiple of 16 bytes
        ({"top_k": 3, "etp": 2}, 160),  # both halves are multiples of 16 bytes
    ],
)
def test_moe_expert_ffn(params: Params, expert_ffn: int) -> None:
    assert make_tiny_moe(**params).expert_ffn == expert_ffn


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ep": 3}, "experts(8) % ep(3) != 0"),
        ({"experts": 6}, "experts(6) % ep(4) != 0"),
        ({"top_k": 9}, "top_k(9) > experts(8)"),
        ({"expert_ffn": 30}, "expert_ffn(30) / etp(1) % 8 != 0"),
        ({"ep": 8}, "(dp(4) * cp(1) * tp(1)) % (ep(8)) != 0"),
        ({"checkpointing": "selective"}, "checkpointing = selective"),
        ({"compute": "simulated:5ms"}, "compute = simulated"),
    ],
)
def test_impossible_mixture_is_refused(params: Params, message: str) -> None:
    assert message in str(refuse("ep_step", 4, params))


@pytest.mark.parametrize(
    ("params", "ep", "etp"),
    [
        ({}, 2, 2),
        ({"ep": 4}, 4, 1),  # 4 * 2 does not divide 4 ranks
        ({"expert_ffn": 24}, 4, 1),  # half of it is not a multiple of 16 bytes
        ({"etp": 4}, 1, 4),
    ],
)
def test_etp_is_tp_by_default(params: Params, ep: int, etp: int) -> None:
    moe = make_tiny_moe(tp=2, **params)
    assert (moe.ep, moe.etp) == (ep, etp)


def test_slots_are_rounded_up() -> None:
    assert make_tiny_moe(capacity=1.25).slots(61) == 20
    assert make_tiny_moe(capacity=0.1 * 3).slots(40) == 3  # 0.1 * 3 is above 0.3
    assert make_tiny_moe(capacity=0.001).slots(64) == 1
    assert make_tiny_moe().slots(64) is None


def test_flops_of_mixture() -> None:
    """Two experts of half the size and no shared one are the dense FFN and a router."""
    routed_flops = count_flops_per_token(TINY, make_tiny_moe(1, shared=0))
    router = 6 * TINY.layers * TINY.hidden * 8
    assert routed_flops == count_flops_per_token(TINY) + router
    moe = make_tiny_moe(1, shared=1)
    shared_expert = 6 * TINY.layers * count_ffn_matrices(TINY) * TINY.hidden * moe.expert_ffn
    assert count_flops_per_token(TINY, moe) == routed_flops + shared_expert
