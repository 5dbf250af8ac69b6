"""A MoE layer matches the dense one for every way of routing, dropping and chunking."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbench.workloads.expert_parallel import dispatch
from parbench.workloads.expert_parallel.dispatch import Rows, Stages, Trip
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of
from parbench.workloads.expert_parallel.moe_layer import (
    DenseMoe,
    MoeLayer,
    aux_loss,
    balance_loss,
    exchange_ffns,
    mixtures,
)
from parbench.workloads.expert_parallel.routing import routes
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import Transformer, build, draw_tokens
from tests.support.fake_time import FakeTime

CPU = torch.device("cpu")
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64
)
LLAMA = replace(GPT, recipe="llama", ffn=48)
BATCH = 2
TOKENS = 32


def make_moe(shape: Shape = GPT, **params: Any) -> Moe:
    return moe_of({"microbatch": BATCH, **params}, shape, 1)


def make_layer(moe: Moe, kind: type[MoeLayer] = MoeLayer) -> MoeLayer:
    layer = kind(GPT, moe)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return layer


def make_model(moe: Moe, shape: Shape = GPT, *, dense: bool = False) -> Transformer:
    model = build(shape, 0, CPU)
    exchange_ffns(model, shape, moe, 0, dense=dense)
    return model


def run_layer(shape: Shape, moe: Moe, *, dense: bool) -> dict[str, Tensor]:
    """Return the output and all gradients of a model's first layer."""
    layer = mixtures(make_model(moe, shape, dense=dense))[0]
    layer.router.weight.data.mul_(20)  # scores that differ
    generator = moe.generator(0, 4)
    if generator is not None:
        layer.given = torch.tensor(routes(generator, 0, 32, TOKENS))
    random = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 16, shape.hidden, generator=random).requires_grad_()
    out = layer(x)
    out.backward(torch.randn(out.shape, generator=random))
    results = {"out": out.detach(), "input": x.grad}
    for name, parameter in layer.named_parameters():
        results[name] = parameter.grad
    return results


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "params",
    [
        {"routing": "hot_rank:3", "capacity": 0.5},
        {"scores": "sigmoid"},
        {"shared": 2, "expert_ffn": 24},
        {"shared": 0, "top_k": 1},
        {"top_k": 8, "capacity": 0.75},
        {"chunks": 3, "capacity": 0.75},
    ],
)
def test_layer_matches_dense_layer(shape: Shape, params: dict[str, Any]) -> None:
    moe = make_moe(shape, **params)
    actual = run_layer(shape, moe, dense=False)
    expected = run_layer(shape, moe, dense=True)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dense_layer_of_one_token() -> None:
    """Compare with the sum over its experts of score times FFN, and the shared expert."""
    layer = make_layer(make_moe(), DenseMoe)
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(1, 32, generator=generator)
    scores = (token @ layer.router.weight.T).softmax(-1)[0]
    assert layer.shared is not None
    expected = layer.shared(token)
    for expert in scores.topk(2).indices.tolist():
        hidden = nn.functional.gelu(token @ layer.experts.up[expert])
        output = hidden @ layer.experts.down[expert]
        expected = expected + scores[expert] * output
    torch.testing.assert_close(layer(token[None])[0], expected)


@pytest.mark.parametrize("counts", [[0, 4, 0], [0, 0, 0]])
def test_experts_without_rows_have_zero_gradients(counts: list[int]) -> None:
    experts = make_layer(make_moe(experts=3)).experts
    x = torch.randn(sum(counts), 32, requires_grad=True)
    out = experts(Rows(tokens=x, counts=torch.tensor(counts)))
    out.backward(torch.ones(out.shape))
    assert experts.up.grad is not None
    has_gradient = [bool(gradient.any()) for gradient in experts.up.grad]
    assert has_gradient == [count > 0 for count in counts]


def test_balance_loss() -> None:
    even_scores = torch.full((8, 4), 0.25)
    even_routes = torch.tensor([[0, 1], [2, 3]] * 4)
    assert float(balance_loss(even_scores, even_routes)) == pytest.approx(1.0)
    scores = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 8)
    uneven_routes = torch.tensor([[0, 1]] * 8)
    expected = 4 * (0.5 * 0.7 + 0.5 * 0.1)
    assert float(balance_loss(scores, uneven_routes)) == pytest.approx(expected)
    # The sum of sigmoid scores is not 1.
    assert float(balance_loss(scores / 2, uneven_routes)) == pytest.approx(expected)


def test_aux_loss_is_mean_over_layers() -> None:
    model = make_model(make_moe(aux=0.5))
    tokens = draw_tokens(GPT, BATCH, 0, 0)
    model(tokens[:, :-1])
    losses = []
    for mixture in mixtures(model):
        assert mixture.aux is not None
        losses.append(float(mixture.aux.detach()))
    loss = aux_loss(model)
    assert isinstance(loss, Tensor)
    assert float(loss.detach()) == pytest.approx(0.5 * sum(losses) / 2)
    assert aux_loss(model) == 0.0  # the layers forget their losses


def test_chunk_travels_during_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def stages(chunk: int) -> Stages:
        log.append(f"send {chunk}")
        yield
        log.append(f"compute {chunk}")
        yield Rows(tokens=torch.zeros(0, 32), counts=torch.zeros(8, dtype=torch.int64))
        log.append(f"return {chunk}")
        yield
        log.append(f"receive {chunk}")
        yield torch.full((TOKENS, 32), float(chunk + 1))

    numbers = iter(range(2))
    monkeypatch.setattr(dispatch, "start_trip", lambda *args: Trip(stages(next(numbers))))
    layer = make_layer(make_moe(chunks=2))
    pairs = torch.zeros(TOKENS, 2, dtype=torch.int64)
    out = layer.route(torch.zeros(TOKENS, 32), torch.ones(TOKENS, 2), pairs)
    assert log == [
        *("send 0", "send 1"),
        *("compute 0", "return 0", "compute 1", "return 1"),
        *("receive 0", "receive 1"),
    ]
    assert float(out.mean()) == 1 + 2


def test_timed_rows_wait_twice_as_long_backward() -> None:
    clock = FakeTime()
    experts = make_layer(make_moe()).experts
    experts.waiter = clock.waiter()
    experts.seconds_per_row = 0.25
    x = torch.ones(100, 32, requires_grad=True)
    out = experts(Rows(tokens=x, counts=torch.tensor([100])))
    assert not out.any()
    out.sum().backward()
    assert clock.sleeps == pytest.approx([25.0, 50.0])
    for tensor in (x, *experts.parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.any()
