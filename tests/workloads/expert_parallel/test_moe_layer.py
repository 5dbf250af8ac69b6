"""The mixture computes what the plain one does, for every way of routing, dropping and chunking, in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbench.workloads.expert_parallel.dispatch import Rows, Stages, Trip
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of
from parbench.workloads.expert_parallel.moe_layer import (
    DenseMoe,
    MoeLayer,
    Router,
    aux_loss,
    balance_loss,
    exchange_ffns,
    kernel_note,
    kernel_notes,
    let_experts_wait,
    mixtures,
)
from parbench.workloads.expert_parallel.routing import NOWHERE, routes
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.timed_compute import TimedCompute, TimedLinear
from parbench.workloads.model.transformer import Transformer, build, draw_tokens
from tests.support.fake_time import FakeTime

CPU = torch.device("cpu")
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64
)
LLAMA = replace(GPT, recipe="llama", ffn=48)
BATCH, TOKENS = 2, 32


def mixture_of(shape: Shape = GPT, **params: Any) -> Moe:
    return moe_of({"microbatch": BATCH, **params}, shape, 1)


def made(kind: type[MoeLayer], shape: Shape, moe: Moe) -> MoeLayer:
    layer = kind(shape, moe)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.2, generator=chance)
    return layer


def moe_model(moe: Moe, shape: Shape = GPT, *, dense: bool = False) -> Transformer:
    model = build(shape, 0, CPU)
    exchange_ffns(model, shape, moe, 0, dense=dense)
    return model


def assert_as_the_plain_one(shape: Shape, moe: Moe, routing: str | None = None) -> None:
    generator = (
        None if routing is None else replace(moe, routing=routing, strength=3.0).generator(0, 4)
    )
    given = None if generator is None else torch.tensor(routes(generator, 0, 32, TOKENS))
    found = []
    for dense in (False, True):
        [layer, _] = mixtures(moe_model(moe, shape, dense=dense))
        with torch.no_grad():
            layer.router.weight.mul_(20)  # scores that differ
        layer.given = given
        chance = torch.Generator().manual_seed(1)
        x = torch.randn(BATCH, 16, shape.hidden, generator=chance).requires_grad_()
        out = layer(x)
        out.backward(torch.randn(out.shape, generator=chance))
        assert x.grad is not None
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(layer.parameters()))
        found.append({"out": out.detach(), "input": x.grad, **gradients})

    def told(message: str) -> str:
        return f"{shape.recipe}, {moe}, {routing}: {message}"

    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5, msg=told)


def test_every_kind_of_mixture_gives_what_the_plain_one_does() -> None:
    for routing in (None, "hot_rank"):
        assert_as_the_plain_one(GPT, mixture_of(capacity=0.5), routing)
    kinds: list[dict[str, Any]] = [
        {"scores": "sigmoid"},
        {"shared": 0},
        {"shared": 2, "expert_ffn": 24},
        {"top_k": 1},
        {"top_k": 8, "capacity": 0.75},
        {"experts": 3, "top_k": 3},
        {"chunks": 3, "capacity": 0.75},
        {"chunks": 32},
    ]
    for shape in (GPT, LLAMA):
        for params in kinds:
            assert_as_the_plain_one(shape, mixture_of(shape, **params))


def test_the_plain_one_is_plain() -> None:
    """One token, by hand: the sum over its experts of score times FFN, and the shared experts."""
    layer = made(DenseMoe, GPT, mixture_of())
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    scores = (x[0] @ layer.router.weight.T).softmax(-1)[0]
    assert layer.shared is not None
    expected = layer.shared(x[0])
    for expert in scores.argsort(descending=True)[:2].tolist():
        wide = nn.functional.gelu(x[0] @ layer.experts.up[expert])
        expected = expected + scores[expert] * (wide @ layer.experts.down[expert])
    torch.testing.assert_close(layer(x)[0], expected)


def test_scores_are_float32_whatever_the_model_is() -> None:
    for scores in ("softmax", "sigmoid"):
        router = Router(GPT, mixture_of(scores=scores)).bfloat16()
        with torch.no_grad():
            router.weight.normal_(0, 0.1)
        found = router(torch.randn(TOKENS, 32).bfloat16())
        assert found.dtype == torch.float32
        assert bool(((found > 0) & (found < 1)).all())
        assert torch.allclose(found.sum(1), torch.ones(TOKENS)) == (scores == "softmax")


def test_experts_without_rows_have_zero_gradients() -> None:
    experts = made(MoeLayer, GPT, mixture_of(experts=3)).experts
    for counts in ([0, 4, 0], [0, 0, 0]):
        experts.zero_grad()
        x = torch.randn(sum(counts), 32, requires_grad=True)
        out = experts(Rows(tokens=x, counts=torch.tensor(counts)))
        out.backward(torch.ones(out.shape))
        assert experts.up.grad is not None
        assert [bool(part.any()) for part in experts.up.grad] == [count > 0 for count in counts]
        assert x.grad is not None


def test_a_token_that_goes_nowhere_has_the_shared_experts_alone_and_a_drop_leaves_other_weights() -> (
    None
):
    layer, x = made(MoeLayer, GPT, mixture_of()), torch.randn(1, 4, 32)
    layer.given = torch.tensor([[0, 1], [NOWHERE, NOWHERE], [2, 3], [NOWHERE, NOWHERE]])
    assert layer.shared is not None
    alone = layer(x) - layer.shared(x)
    assert [bool(of.abs().max() > 1e-6) for of in alone[0]] == [True, False, True, False]
    layer, x = (
        made(MoeLayer, GPT, mixture_of(shared=0, capacity=2.0)),
        x[:, :2],
    )  # ceil(2 * 2 * 2 / 8) = 1 each
    layer.given = torch.tensor([[0, 1], [0, 2]])
    one_dropped = layer(x)
    layer.given = torch.tensor([[0, 1], [NOWHERE, 2]])
    torch.testing.assert_close(one_dropped, layer(x))


def test_balance_is_one_where_routes_and_scores_are_even_and_more_where_both_lean() -> None:
    even = torch.full((8, 4), 0.25)
    assert float(balance_loss(even, torch.tensor([[0, 1], [2, 3]] * 4))) == pytest.approx(1.0)
    lean = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 8)
    assert float(balance_loss(lean, torch.tensor([[0, 1]] * 8))) == pytest.approx(
        4 * (0.5 * 0.7 + 0.5 * 0.1)
    )
    assert float(balance_loss(even, torch.full((8, 2), NOWHERE))) == 0.0
    assert float(balance_loss(lean / 2, torch.tensor([[0, 1]] * 8))) == pytest.approx(
        1.6
    )  # sigmoids' sum is not 1


def test_a_chunk_is_on_its_way_while_the_one_before_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def stages(number: int) -> Stages:
        """Tell what is asked of a trip, and bring nothing."""
        log.append(f"{number} sent")
        yield
        log.append(f"{number} arrived")
        yield Rows(tokens=torch.zeros(0, 32), counts=torch.zeros(8, dtype=torch.int64))
        log.append(f"{number} given back")
        yield
        log.append(f"{number} received")
        yield torch.full((TOKENS, 32), float(number))

    def start(*given: object) -> Trip:
        return Trip(stages(sum(line.endswith("sent") for line in log)))

    monkeypatch.setattr("parbench.workloads.expert_parallel.dispatch.start_trip", start)
    orders = {
        1: ["0 sent", "0 arrived", "0 given back", "0 received"],
        3: [
            *(
                "0 sent",
                "1 sent",
                "0 arrived",
                "0 given back",
                "2 sent",
                "1 arrived",
                "1 given back",
            ),
            *("2 arrived", "2 given back", "0 received", "1 received", "2 received"),
        ],
    }
    for chunks, order in orders.items():
        log.clear()
        layer = made(MoeLayer, GPT, mixture_of(chunks=chunks))
        out = layer.route(
            torch.zeros(TOKENS, 32),
            torch.ones(TOKENS, 2),
            torch.zeros(TOKENS, 2, dtype=torch.int64),
        )
        assert log == order
        assert float(out.mean()) == sum(range(chunks))


def test_the_loss_that_asks_for_balance_is_the_mean_over_layers_times_its_coefficient() -> None:
    model = moe_model(mixture_of(aux=0.5))
    model(draw_tokens(GPT, BATCH, 0, 0)[:, :-1])
    each = [float(mixture.aux.detach()) for mixture in mixtures(model) if mixture.aux is not None]
    assert len(each) == 2
    found = aux_loss(model)
    assert isinstance(found, Tensor)
    assert float(found.detach()) == pytest.approx(0.5 * sum(each) / 2)
    assert aux_loss(model) == 0.0  # taken once
    assert aux_loss(moe_model(mixture_of())) == 0.0


def test_waiting_experts_share_the_time_of_a_forward_at_the_mean_load() -> None:
    model = moe_model(mixture_of())
    let_experts_wait(model, 8.0, TOKENS, TimedCompute(CPU))
    waits = [mixture.experts.seconds_per_row for mixture in mixtures(model)]
    assert [seconds * TOKENS * 2 for seconds in waits] == pytest.approx([8.0 / 2] * 2)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(linear, TimedLinear) and linear.seconds == 0 for linear in linears)


def test_each_row_takes_its_time_forward_and_twice_that_backward_and_leaves_zeros() -> None:
    for rows in (0, 1, 100):
        clock, x = FakeTime(), torch.ones(rows, 32, requires_grad=True)
        experts = made(MoeLayer, GPT, mixture_of()).experts
        experts.waiter, experts.seconds_per_row = clock.waiter(), 0.25
        out = experts(Rows(tokens=x, counts=torch.tensor([rows])))
        assert torch.equal(out, torch.zeros(rows, 32))
        assert clock.sleeps == [rows * 0.25] * bool(rows)
        out.sum().backward()
        assert clock.sleeps == pytest.approx([rows * 0.25, 2 * rows * 0.25] * bool(rows))
        for tensor in (x, *experts.parameters()):
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_a_row_says_whether_experts_are_grouped_or_looped_over_on_a_gpu() -> None:
    for capability, dtype, grouped in (
        ((9, 0), torch.bfloat16, True),
        ((10, 3), torch.bfloat16, True),
        ((9, 0), torch.float32, False),
        ((8, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False),
    ):
        words = kernel_note(dtype, capability)
        assert words.startswith("experts: grouped" if grouped else "experts: looped"), (
            capability,
            dtype,
        )
        assert (
            grouped
            or f"{str(dtype)[6:]} on compute capability {capability[0]}.{capability[1]}" in words
        )
    assert kernel_notes(CPU, torch.float32) == ()
