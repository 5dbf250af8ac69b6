"""What a case means of a mixture, and the equations by which one that cannot be built is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.text import UserError
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.expert_parallel.moe_case import (
    Moe,
    moe_of,
    num_expert_parameters,
)
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns
from parbench.workloads.expert_parallel.routing import ROUTER
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import build

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
GPT = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64)
LLAMA = replace(GPT, recipe="llama", ffn=48)
NAMES = ("ep_dispatch", "ep_layer", "ep_step")
ROWS = "grouped products want rows of whole 16 bytes"


def meant(nproc: int = 4, shape: Shape = TINY, **params: Any) -> Moe:
    return moe_of({"microbatch": 4, **params}, shape, nproc)


def refusal(name: str, nproc: int, **given: Any) -> str | None:
    definition = next(d for d in DEFINITIONS if d.name == f"workload.{name}")
    return definition.refuse(definition.whole(given), WorldSpec(nproc=nproc, backend="gloo", device="cpu"))


def test_what_is_not_given_is_eight_experts_over_all_ranks_finer_the_more_a_token_takes() -> None:
    moe = meant()
    assert (moe.ep, moe.etp, moe.tp, moe.experts, moe.top_k, moe.experts_per_rank) == (4, 1, 1, 8, 2, 2)
    assert (moe.expert_ffn, moe.shared, moe.variant, moe.routing) == (256, 1, "all_to_all", ROUTER)
    assert (meant(top_k=4).expert_ffn, meant(top_k=8).expert_ffn) == (128, 64)
    assert meant(top_k=3).expert_ffn == 168  # 170.7, down to whole 16 bytes
    assert meant(top_k=3, etp=2).expert_ffn == 160  # so that its halves are whole 16 bytes too
    assert meant(expert_ffn=40).expert_ffn == 40
    split = meant(etp=2, tp=2)
    assert (split.ep, split.etp, split.tp, split.experts_per_rank) == (2, 2, 2, 4)
    assert moe.slots(256) is None
    assert meant(capacity=1.25).slots(256) == 80
    assert meant(capacity=1.0, top_k=1).slots(60) == 8


def test_a_generator_has_what_the_case_says() -> None:
    generator = meant(routing="zipf:2", experts=16, top_k=4).generator(5, 4)
    assert generator is not None
    assert (generator.name, generator.strength, generator.seed) == ("zipf", 2.0, 5)
    assert (generator.experts, generator.top_k, generator.parts) == (16, 4, 4)
    assert meant().generator(0, 4) is None


def test_what_cannot_be_built_is_refused_by_equation() -> None:
    refused: list[tuple[int, dict[str, Any], str]] = [
        (4, {"ep": 3}, "world size(4) % ep(3) != 0"),
        (2, {"ep": 4}, "world size(2) % ep(4) != 0"),
        (4, {"experts": 6}, "experts(6) % ep(4) != 0"),
        (3, {"experts": 8}, "experts(8) % ep(3) != 0"),
        (2, {"top_k": 9}, "top_k(9) > experts(8)"),
        (2, {"expert_ffn": 30}, f"expert_ffn(30) % 8 != 0: {ROWS}"),
        (2, {"hidden": 36, "heads": 2}, f"hidden(36) % 8 != 0: {ROWS}"),
        (
            2,
            {"chunks": 2, "variant": "allgather"},
            "chunks(2) > 1 with variant(allgather): only all_to_all is sent in chunks",
        ),
        (2, {"chunks": 300}, "chunks(300) > tokens of a microbatch(256)"),
        (4, {"etp": 8}, "world size(4) % (ep(1) * etp(8)) != 0"),
        (4, {"ep": 4, "etp": 2}, "world size(4) % (ep(4) * etp(2)) != 0"),
        (4, {"etp": 4, "expert_ffn": 66}, "expert_ffn(66) % etp(4) != 0"),
        (4, {"etp": 4, "expert_ffn": 80}, f"expert_ffn(80) / etp(4) % 8 != 0: {ROWS}"),
        (2, {"kv_heads": 3}, "heads(4) % kv_heads(3) != 0"),
    ]
    for name in NAMES:
        for nproc, params, words in refused:
            assert refusal(name, nproc, **params) == words, name
        assert [refusal(name, nproc) for nproc in (1, 2, 4, 8)] == [None] * 4, name


def test_attention_that_cannot_be_split_is_refused_by_equation() -> None:
    asked: list[tuple[int, dict[str, Any], str | None]] = [
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
    ]
    for nproc, params, words in asked:
        assert refusal("ep_step", nproc, **params) == words, params
    # heads times their size is the hidden one; the equation is there for whoever lets it be otherwise
    unlike = replace(TINY, hidden=136, heads=3, kv_heads=3)
    with pytest.raises(UserError, match=r"^hidden\(136\) % tp\(3\) != 0$"):
        moe_of({"tp": 3, "ep": 1, "microbatch": 1}, unlike, 3)
    for name in ("ep_dispatch", "ep_layer"):
        with pytest.raises(UserError, match="tp"):
            refusal(name, 2, tp=2)


def test_refusals_of_capacity_routing_and_checkpointing() -> None:
    with pytest.raises(UserError, match=r"^capacity\(-0.5\) < 0"):
        moe_of({"capacity": -0.5}, TINY, 2)
    assert str(refusal("ep_layer", 2, routing="hot")).startswith("routing = 'hot' is not known: routing is router")
    assert "checkpointing(selective) is not for experts" in str(refusal("ep_step", 2, checkpointing="selective"))
    assert refusal("ep_step", 2, checkpointing="full") is None


def test_parameters_in_all_routed_and_split_are_those_of_the_model() -> None:
    for shape in (GPT, LLAMA, replace(LLAMA, kv_heads=4)):
        for shared in (0, 1, 2):
            moe = meant(1, shape, shared=shared, expert_ffn=24, experts=6)
            model = build(shape, 0, CPU)
            exchange_ffns(model, shape, moe, 0)
            sizes = {name: p.numel() for name, p in model.named_parameters()}
            assert num_parameters(shape, moe) == sum(sizes.values()), (shape, shared)
            routed = sum(size for name, size in sizes.items() if ".experts." in name)
            assert routed == shape.layers * 6 * num_expert_parameters(shape, moe)


def test_flops_are_those_of_the_experts_that_a_token_meets() -> None:
    """Two experts of half the size and no shared one are the dense FFN, and a router."""
    moe, router = meant(1, GPT, shared=0), 6 * GPT.layers * GPT.hidden * 8
    assert flops_per_token(GPT, moe) == flops_per_token(GPT) + router
    more = meant(1, GPT, shared=0, experts=16)
    assert flops_per_token(GPT, more) - flops_per_token(GPT, moe) == router
    shared = meant(1, GPT, shared=1)
    added = 6 * GPT.layers * num_expert_parameters(GPT, shared)
    assert flops_per_token(GPT, shared) - flops_per_token(GPT, moe) == added
