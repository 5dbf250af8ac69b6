"""What a case means of a mixture, and the equations by which one that cannot be built is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases import Setting
from bench.errors import UserError
from bench.params import Param
from workloads.definitions import DEFINITIONS
from workloads.experts.moe import exchange_ffns
from workloads.experts.moe_case import (
    LAYER_PARAMS,
    STEP_PARAMS,
    Moe,
    moe_flops_per_token,
    moe_of,
    num_expert_parameters,
    num_moe_parameters,
    num_routed_parameters,
    num_split_parameters,
    refuse_moe,
)
from workloads.experts.routing import BALANCED, ROUTER
from workloads.model import build
from workloads.shapes import SHAPES, Shape, flops_per_token

TINY = SHAPES["tiny"]
SMALL = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64)
LLAMA = Shape(recipe="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=16, vocabulary=64)
NAMES = ("ep_dispatch", "ep_layer", "ep_step")


def meant(nproc: int = 4, shape: Shape = TINY, **params: Any) -> Moe:
    return moe_of({"microbatch": 4, **params}, shape, nproc)


def refusal(name: str, nproc: int, **given: Any) -> str | None:
    definition = next(d for d in DEFINITIONS if d.name == f"workload.{name}")
    return definition.refuse(definition.case(given).params, Setting(nproc=nproc, backend="gloo", device="cpu"))


def test_defaults_are_eight_experts_over_all_ranks() -> None:
    moe = meant()
    assert (moe.ep, moe.experts, moe.top_k, moe.experts_per_rank) == (4, 8, 2, 2)
    assert (moe.expert_ffn, moe.shared, moe.variant, moe.routing) == (256, 1, "all_to_all", ROUTER)
    assert moe.slots(256) is None


def test_experts_are_finer_the_more_of_them_a_token_takes() -> None:
    assert meant(top_k=4).expert_ffn == 128
    assert meant(top_k=3).expert_ffn == 168  # 170.7, down to whole 16 bytes
    assert meant(top_k=3, etp=2).expert_ffn == 160  # so that its halves are whole 16 bytes too
    assert meant(expert_ffn=40).expert_ffn == 40


def test_ranks_that_split_experts_are_not_dealt_others() -> None:
    moe = meant(etp=2)
    assert (moe.ep, moe.etp, moe.experts_per_rank) == (2, 2, 4)


def test_slots_are_those_of_a_sources_microbatch() -> None:
    assert meant(capacity=1.25).slots(256) == 80
    assert meant(capacity=1.0, top_k=1).slots(60) == 8


def test_a_generator_has_what_the_case_says() -> None:
    generator = meant(routing="zipf:2", experts=16, top_k=4).generator(5, 4, 256)
    assert generator is not None
    assert (generator.name, generator.strength, generator.seed) == ("zipf", 2.0, 5)
    assert (generator.experts, generator.top_k, generator.parts, generator.tokens) == (16, 4, 4, 256)
    assert meant().generator(0, 4, 256) is None
    balanced = meant().generator(0, 4, 256, BALANCED)
    assert balanced is not None
    assert balanced.name == BALANCED


# ---- refusals


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("nproc", "params", "words"),
    [
        (4, {"ep": 3}, "world size(4) % ep(3) != 0"),
        (2, {"ep": 4}, "world size(2) % ep(4) != 0"),
        (4, {"experts": 6}, "experts(6) % ep(4) != 0"),
        (3, {"experts": 8}, "experts(8) % ep(3) != 0"),
        (2, {"top_k": 9}, "top_k(9) > experts(8)"),
        (2, {"variant": "padded"}, "variant(padded) needs capacity > 0: it sends as many slots as the capacity says"),
        (2, {"expert_ffn": 30}, "expert_ffn(30) % 8 != 0: grouped products want rows of whole 16 bytes"),
        (2, {"hidden": 36, "heads": 2}, "hidden(36) % 8 != 0: grouped products want rows of whole 16 bytes"),
        (2, {"chunks": 2, "variant": "dedup"}, "chunks(2) > 1 with variant(dedup): only all_to_all is sent in chunks"),
        (2, {"chunks": 300}, "chunks(300) > tokens of a microbatch(256)"),
        (2, {"routing": "idle_rank", "top_k": 5}, "top_k(5) > experts(8) - idle(4)"),
        (4, {"etp": 8}, "world size(4) % (ep(1) * etp(8)) != 0"),
        (4, {"ep": 4, "etp": 2}, "world size(4) % (ep(4) * etp(2)) != 0"),
        (4, {"etp": 4, "expert_ffn": 66}, "expert_ffn(66) % etp(4) != 0"),
        (
            4,
            {"etp": 4, "expert_ffn": 80},
            "expert_ffn(80) / etp(4) % 8 != 0: grouped products want rows of whole 16 bytes",
        ),
        (2, {"kv_heads": 3}, "heads(4) % kv_heads(3) != 0"),
    ],
)
def test_what_cannot_be_built_is_refused_by_equation(name: str, nproc: int, params: dict[str, Any], words: str) -> None:
    assert refusal(name, nproc, **params) == words


def test_unknown_routing_is_refused() -> None:
    assert str(refusal("ep_layer", 2, routing="hot")).startswith("routing = 'hot' is not known: routing is router")


def test_a_capacity_below_zero_is_no_capacity() -> None:
    with pytest.raises(UserError, match=r"capacity = -1 is not allowed: capacity is a number of at least 0"):
        refusal("ep_step", 2, capacity=-1)
    assert refuse_moe(TINY, {"capacity": -0.5}, 2) == (
        "capacity(-0.5) < 0: capacity is a factor above 0, or 0 for dropless"
    )


@pytest.mark.parametrize(("param", "value"), [("experts", 0), ("top_k", 0), ("chunks", 0), ("shared", -1), ("aux", -1)])
def test_sizes_below_their_least_are_refused(param: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{param} = {value} is not allowed"):
        refusal("ep_step", 2, **{param: value})


def test_selective_checkpointing_is_refused() -> None:
    assert "checkpointing(selective) is not for experts" in str(refusal("ep_step", 2, checkpointing="selective"))
    assert refusal("ep_step", 2, checkpointing="full") is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_defaults_run_on_any_power_of_two_of_ranks(name: str, nproc: int) -> None:
    assert refusal(name, nproc) is None


def test_the_three_scopes_have_the_same_parameters_of_a_mixture() -> None:
    def names(params: tuple[Param, ...]) -> list[str]:
        return [param.name for param in params]

    assert names(STEP_PARAMS) == [*names(LAYER_PARAMS), "aux", "fsdp", "tp"]
    routing = {params[5].name: params[5].default for params in (LAYER_PARAMS, STEP_PARAMS)}
    assert routing == {"routing": ROUTER}
    assert LAYER_PARAMS[5].default == BALANCED


@pytest.mark.parametrize(
    ("nproc", "params", "words"),
    [
        (3, {"tp": 2, "ep": 1}, "world size(3) % tp(2) != 0"),
        (8, {"tp": 8}, "heads(4) % tp(8) != 0"),
        (4, {"tp": 4, "kv_heads": 2}, "kv_heads(2) % tp(4) != 0"),
        (4, {"tp": 4, "sequence": 66}, "sequence(66) % tp(4) != 0"),
        (2, {"tp": 2, "fsdp": True}, "tp(2) > 1 with fsdp(true): what attention does not split is under DDP alone"),
        (2, {"tp": 2, "chunks": 129}, "chunks(129) > tokens of a microbatch(128)"),
        (2, {"tp": 2, "chunks": 128}, None),
        (2, {"tp": 1, "fsdp": True, "sequence": 33}, None),
        (4, {"tp": 2, "ep": 2, "etp": 2}, None),
        (6, {"tp": 2, "ep": 2}, None),
    ],
)
def test_attention_that_cannot_be_split_is_refused_by_equation(
    nproc: int, params: dict[str, Any], words: str | None
) -> None:
    assert refusal("ep_step", nproc, **params) == words


def test_the_hidden_size_divides_where_heads_do() -> None:
    """It is heads times their size; the equation is there for whoever lets it be otherwise."""
    unlike = replace(TINY, hidden=136, heads=3, kv_heads=3)
    assert refuse_moe(unlike, {"tp": 3, "ep": 1, "microbatch": 1}, 3) == "hidden(136) % tp(3) != 0"


def test_attention_alone_is_split_of_what_is_no_layer() -> None:
    assert meant(tp=2).tp == 2
    assert meant().tp == 1
    for name in ("ep_dispatch", "ep_layer"):
        with pytest.raises(UserError, match="tp"):
            refusal(name, 2, tp=2)


# ---- closed forms


@pytest.mark.parametrize("shape", [SMALL, LLAMA, replace(LLAMA, kv_heads=4)])
def test_what_is_split_of_attention_is_all_but_the_last_bias(shape: Shape) -> None:
    model = build(shape, 0, torch.device("cpu"))
    split = [
        p.numel() for name, p in model.named_parameters() if ".attention." in name and not name.endswith("out.bias")
    ]
    assert num_split_parameters(shape) == sum(split)


@pytest.mark.parametrize("shape", [SMALL, LLAMA])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_parameters_are_those_of_the_model(shape: Shape, shared: int) -> None:
    moe = meant(1, shape, shared=shared, expert_ffn=24, experts=6)
    model = build(shape, 0, torch.device("cpu"))
    exchange_ffns(model, shape, moe, 0)
    assert num_moe_parameters(shape, moe) == sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert num_routed_parameters(shape, moe) == routed == shape.layers * 6 * num_expert_parameters(shape, moe)


def test_flops_are_those_of_the_experts_that_a_token_meets() -> None:
    """Two experts of half the size and no shared one are the dense FFN, and a router."""
    moe = meant(1, SMALL, shared=0)
    assert moe_flops_per_token(SMALL, moe) == flops_per_token(SMALL) + 6 * SMALL.layers * SMALL.hidden * 8
    more = meant(1, SMALL, shared=0, experts=16)
    assert moe_flops_per_token(SMALL, more) - moe_flops_per_token(SMALL, moe) == 6 * SMALL.layers * SMALL.hidden * 8
    shared = meant(1, SMALL, shared=1)
    added = 6 * SMALL.layers * num_expert_parameters(SMALL, shared)
    assert moe_flops_per_token(SMALL, shared) - moe_flops_per_token(SMALL, moe) == added
