"""A MoE layer matches the dense one for every way of routing and dropping."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbench.workloads.expert_parallel.dispatch import ExpertRows
from parbench.workloads.expert_parallel.moe_case import Moe, make_moe
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    ReferenceMoeLayer,
    weigh_experts,
)
from parbench.workloads.model.shapes import Shape
from parbench.workloads.step.step_routing import draw_experts

GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64
)
LLAMA = replace(GPT, recipe="llama", ffn=48)
BATCH = 2
TOKENS = 32


def make_small_moe(shape: Shape = GPT, **params: Any) -> Moe:
    return make_moe({"microbatch": BATCH, **params}, shape, 1)


def make_layer(moe: Moe, kind: type[MoeLayer] = MoeLayer, shape: Shape = GPT) -> MoeLayer:
    layer = kind(shape, moe)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return layer


def run_layer(shape: Shape, moe: Moe, kind: type[MoeLayer]) -> dict[str, Tensor]:
    """Return the output and all gradients of a layer."""
    layer = make_layer(moe, kind, shape)
    if moe.routing != "router":
        layer.assigned_ids = draw_experts(moe, TOKENS, seed=0, purpose=0)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 16, shape.hidden, generator=random).requires_grad_()
    output = layer(x)
    output.backward(torch.randn(output.shape, generator=random))
    results = {"output": output.detach(), "input": x.grad}
    for name, parameter in layer.named_parameters():
        results[name] = parameter.grad
    return results


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "params",
    [
        {"routing": "zipf", "capacity": 0.5},
        {"renormalize": False},
        {"shared": 2, "expert_ffn": 24},
        {"shared": 0, "top_k": 1},
        {"top_k": 8, "capacity": 0.75},
    ],
)
def test_layer_matches_dense_layer(shape: Shape, params: dict[str, Any]) -> None:
    moe = make_small_moe(shape, **params)
    actual = run_layer(shape, moe, MoeLayer)
    expected = run_layer(shape, moe, ReferenceMoeLayer)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
def test_reference_layer_of_one_token(renormalize: bool) -> None:
    """Compare with the sum over its experts of weight times FFN, and the shared expert."""
    layer = make_layer(make_small_moe(renormalize=renormalize), ReferenceMoeLayer)
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(1, 32, generator=generator)
    logits = (token @ layer.router.weight.T)[0]
    expert_ids = logits.topk(2).indices
    weights = logits[expert_ids].softmax(-1) if renormalize else logits.softmax(-1)[expert_ids]
    assert layer.shared is not None
    expected = layer.shared(token)
    for weight, expert in zip(weights, expert_ids.tolist(), strict=True):
        hidden = nn.functional.gelu(token @ layer.experts.up[expert])
        expected = expected + weight * (hidden @ layer.experts.down[expert])
    torch.testing.assert_close(layer(token[None])[0], expected)


def test_single_expert_is_not_renormalized() -> None:
    """Otherwise its weight would be 1, and the router would have no gradient."""
    scores = torch.tensor([[0.7, 0.3]])
    moe = make_small_moe(top_k=1, experts=2)
    assert weigh_experts(moe, scores, torch.tensor([[0]])).item() == pytest.approx(0.7)


def test_reference_layer_has_capacity_of_each_source() -> None:
    """All tokens choose the same experts; each source keeps its first two."""
    layer = make_layer(make_small_moe(capacity=1.0, shared=0), ReferenceMoeLayer)
    assert isinstance(layer, ReferenceMoeLayer)
    layer.assigned_ids = torch.tensor([[0, 1]] * 16)
    layer.positions_by_source = [range(0, 16, 2), range(1, 16, 2)]
    output = layer(torch.ones(1, 16, 32))
    assert output.any(-1)[0].tolist() == [True] * 4 + [False] * 12


@pytest.mark.parametrize("counts", [[0, 4, 0], [0, 0, 0]])
def test_experts_without_rows_have_zero_gradients(counts: list[int]) -> None:
    experts = make_layer(make_small_moe(experts=3)).experts
    x = torch.randn(sum(counts), 32, requires_grad=True)
    output = experts(ExpertRows(tokens=x, counts=torch.tensor(counts)))
    output.backward(torch.ones(output.shape))
    assert experts.up.grad is not None
    has_gradient = [bool(gradient.any()) for gradient in experts.up.grad]
    assert has_gradient == [count > 0 for count in counts]
