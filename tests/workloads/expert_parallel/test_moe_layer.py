"""A MoE layer computes the same as the plain one, for every way of routing, dropping and chunking."""

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
    kernel_note,
    mixtures,
)
from parbench.workloads.expert_parallel.routing import NOWHERE, routes
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import Transformer, build, draw_tokens
from tests.support.fake_time import FakeTime

CPU = torch.device("cpu")
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64
)
BATCH = 2
TOKENS = 32


def make_moe(shape: Shape = GPT, **params: Any) -> Moe:
    return moe_of({"microbatch": BATCH, **params}, shape, 1)


def make_layer(moe: Moe, kind: type[MoeLayer] = MoeLayer) -> MoeLayer:
    layer = kind(GPT, moe)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return layer


def make_model(moe: Moe, shape: Shape = GPT, *, dense: bool = False) -> Transformer:
    model = build(shape, 0, CPU)
    exchange_ffns(model, shape, moe, 0, dense=dense)
    return model


def run_layer(shape: Shape, moe: Moe, *, dense: bool, hot: bool) -> dict[str, Tensor]:
    """Return the output and all gradients of a model's first layer."""
    layer = mixtures(make_model(moe, shape, dense=dense))[0]
    with torch.no_grad():
        layer.router.weight.mul_(20)  # scores that differ
    if hot:
        generator = replace(moe, routing="hot_rank", strength=3.0).generator(0, 4)
        assert generator is not None
        layer.given = torch.tensor(routes(generator, 0, 32, TOKENS))
    random = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 16, shape.hidden, generator=random).requires_grad_()
    out = layer(x)
    out.backward(torch.randn(out.shape, generator=random))
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(layer.parameters()))
    return {"out": out.detach(), "input": x.grad, **gradients}


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("params", "hot"),
    [
        ({"capacity": 0.5}, True),
        ({"scores": "sigmoid"}, False),
        ({"shared": 2, "expert_ffn": 24}, False),
        ({"shared": 0, "top_k": 1}, False),
        ({"top_k": 8, "capacity": 0.75}, False),
        ({"chunks": 3, "capacity": 0.75}, False),
        ({"chunks": 32}, False),
    ],
)
def test_layer_matches_dense_layer(recipe: str, params: dict[str, Any], hot: bool) -> None:
    shape = GPT if recipe == "gpt" else replace(GPT, recipe="llama", ffn=48)
    moe = make_moe(shape, **params)
    actual = run_layer(shape, moe, dense=False, hot=hot)
    expected = run_layer(shape, moe, dense=True, hot=hot)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dense_layer_of_one_token() -> None:
    """Compare with the sum over its experts of score times FFN, and the shared expert."""
    layer = make_layer(make_moe(), DenseMoe)
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    scores = (x[0] @ layer.router.weight.T).softmax(-1)[0]
    assert layer.shared is not None
    expected = layer.shared(x[0])
    for expert in scores.argsort(descending=True)[:2].tolist():
        hidden = nn.functional.gelu(x[0] @ layer.experts.up[expert])
        expected = expected + scores[expert] * (hidden @ layer.experts.down[expert])
    torch.testing.assert_close(layer(x)[0], expected)


@pytest.mark.parametrize("counts", [[0, 4, 0], [0, 0, 0]])
def test_experts_without_rows_have_zero_gradients(counts: list[int]) -> None:
    experts = make_layer(make_moe(experts=3)).experts
    x = torch.randn(sum(counts), 32, requires_grad=True)
    out = experts(Rows(tokens=x, counts=torch.tensor(counts)))
    out.backward(torch.ones(out.shape))
    assert experts.up.grad is not None
    assert [bool(part.any()) for part in experts.up.grad] == [count > 0 for count in counts]
    assert x.grad is not None


def test_token_without_experts_has_shared_expert_only() -> None:
    layer = make_layer(make_moe())
    x = torch.randn(1, 2, 32)
    layer.given = torch.tensor([[0, 1], [NOWHERE, NOWHERE]])
    assert layer.shared is not None
    routed = (layer(x) - layer.shared(x)).abs().amax(-1)[0]
    assert routed[0] > 1e-6
    assert routed[1] <= 1e-6


def test_dropped_pair_leaves_other_weights() -> None:
    layer = make_layer(make_moe(shared=0, capacity=2.0))  # one pair per expert
    x = torch.randn(1, 2, 32)
    layer.given = torch.tensor([[0, 1], [0, 2]])
    dropped = layer(x)
    layer.given = torch.tensor([[0, 1], [NOWHERE, 2]])
    torch.testing.assert_close(dropped, layer(x))


def test_balance_loss() -> None:
    even = torch.full((8, 4), 0.25)
    assert float(balance_loss(even, torch.tensor([[0, 1], [2, 3]] * 4))) == pytest.approx(1.0)
    assert float(balance_loss(even, torch.full((8, 2), NOWHERE))) == 0.0
    uneven = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 8)
    routes = torch.tensor([[0, 1]] * 8)
    expected = 4 * (0.5 * 0.7 + 0.5 * 0.1)
    assert float(balance_loss(uneven, routes)) == pytest.approx(expected)
    # The sum of sigmoid scores is not 1.
    assert float(balance_loss(uneven / 2, routes)) == pytest.approx(expected)


def test_aux_loss_is_mean_over_layers() -> None:
    model = make_model(make_moe(aux=0.5))
    model(draw_tokens(GPT, BATCH, 0, 0)[:, :-1])
    first, second = (mixture.aux for mixture in mixtures(model))
    assert first is not None
    assert second is not None
    expected = 0.5 * (float(first.detach()) + float(second.detach())) / 2
    loss = aux_loss(model)
    assert isinstance(loss, Tensor)
    assert float(loss.detach()) == pytest.approx(expected)
    assert aux_loss(model) == 0.0  # the layers forget their losses
    assert aux_loss(make_model(make_moe())) == 0.0


@pytest.mark.parametrize(
    ("chunks", "order"),
    [
        (1, ["send 0", "compute 0", "return 0", "receive 0"]),
        (
            2,
            [
                "send 0",
                "send 1",
                "compute 0",
                "return 0",
                "compute 1",
                "return 1",
                "receive 0",
                "receive 1",
            ],
        ),
    ],
)
def test_chunk_travels_during_compute(
    monkeypatch: pytest.MonkeyPatch, chunks: int, order: list[str]
) -> None:
    log: list[str] = []

    def stages(number: int) -> Stages:
        log.append(f"send {number}")
        yield
        log.append(f"compute {number}")
        yield Rows(tokens=torch.zeros(0, 32), counts=torch.zeros(8, dtype=torch.int64))
        log.append(f"return {number}")
        yield
        log.append(f"receive {number}")
        yield torch.full((TOKENS, 32), float(number + 1))

    def start_trip(*args: object) -> Trip:
        return Trip(stages(sum(line.startswith("send") for line in log)))

    monkeypatch.setattr(dispatch, "start_trip", start_trip)
    layer = make_layer(make_moe(chunks=chunks))
    pairs = torch.zeros(TOKENS, 2, dtype=torch.int64)
    out = layer.route(torch.zeros(TOKENS, 32), torch.ones(TOKENS, 2), pairs)
    assert log == order
    assert float(out.mean()) == sum(range(1, chunks + 1))


def test_timed_rows_wait_twice_as_long_backward() -> None:
    clock = FakeTime()
    experts = make_layer(make_moe()).experts
    experts.waiter = clock.waiter()
    experts.seconds_per_row = 0.25
    x = torch.ones(100, 32, requires_grad=True)
    out = experts(Rows(tokens=x, counts=torch.tensor([100])))
    assert torch.equal(out, torch.zeros(100, 32))
    out.sum().backward()
    assert clock.sleeps == pytest.approx([25.0, 50.0])
    for tensor in (x, *experts.parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize(
    ("capability", "dtype", "kind"),
    [
        ((9, 0), torch.bfloat16, "grouped"),
        ((10, 3), torch.bfloat16, "grouped"),
        ((9, 0), torch.float32, "looped"),
        ((8, 0), torch.bfloat16, "looped"),
        ((12, 0), torch.bfloat16, "looped"),
    ],
)
def test_kernel_note_names_kind_of_gemm(
    capability: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    assert kind in kernel_note(dtype, capability)
