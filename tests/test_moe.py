"""The mixture computes what the plain one does, for every way of routing, dropping and chunking, in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workloads.experts.moe import (
    DenseMoe,
    MoeLayer,
    Router,
    aux_loss,
    balance_loss,
    exchange_ffns,
    let_experts_wait,
    mixtures,
    take_routes,
)
from workloads.experts.moe_case import Moe, moe_of
from workloads.experts.moe_dispatch import Plan, Rows
from workloads.experts.routing import GENERATORS, NOWHERE, routes
from workloads.model import Ffn, Transformer, build, draw_tokens, loss_of
from workloads.shapes import Shape
from workloads.timed import TimedLinear, Waiter

CPU = torch.device("cpu")
GPT = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, vocabulary=64)
LLAMA = replace(GPT, recipe="llama", ffn=48)
BATCH, TOKENS = 2, 32


def mixture_of(shape: Shape = GPT, **params: Any) -> Moe:
    return moe_of({"microbatch": BATCH, **params}, shape, 1)


def both(shape: Shape, moe: Moe, routing: str | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs and all gradients of the mixture and of the plain one."""
    generator = moe.generator(0, 4, TOKENS, routing)
    given = None if generator is None else torch.tensor(routes(generator, 0, 32, TOKENS))
    found = []
    for dense in (False, True):
        model = build(shape, 0, CPU)
        exchange_ffns(model, shape, moe, 0, dense=dense)
        [layer, _] = mixtures(model)
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
    return found[0], found[1]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


# ---- against the plain one


@pytest.mark.parametrize("routing", [None, *GENERATORS])
@pytest.mark.parametrize("capacity", [0.0, 0.5])
def test_every_routing_gives_what_the_plain_mixture_does(routing: str | None, capacity: float) -> None:
    assert_equal(*both(GPT, mixture_of(capacity=capacity), routing))


@pytest.mark.parametrize("shape", [GPT, LLAMA])
@pytest.mark.parametrize(
    "params",
    [
        {"scores": "sigmoid"},
        {"shared": 0},
        {"shared": 2, "expert_ffn": 24},
        {"top_k": 1},
        {"top_k": 8, "capacity": 0.75},
        {"experts": 3, "top_k": 3},
        {"chunks": 3, "capacity": 0.75},
        {"chunks": 32},
    ],
    ids=str,
)
def test_every_kind_of_mixture_gives_what_the_plain_one_does(shape: Shape, params: dict[str, Any]) -> None:
    assert_equal(*both(shape, mixture_of(shape, **params)))


def test_the_plain_one_is_plain() -> None:
    """One token, by hand: the sum over its experts of score times FFN, and the shared experts."""
    layer = made(DenseMoe, GPT, mixture_of())
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    scores = (x[0] @ layer.router.weight.T).softmax(-1)[0]
    chosen = scores.argsort(descending=True)[:2].tolist()
    expected = layer.shared(x[0]) if layer.shared is not None else 0
    for expert in chosen:
        wide = nn.functional.gelu(x[0] @ layer.experts.up[expert])
        expected = expected + scores[expert] * (wide @ layer.experts.down[expert])
    torch.testing.assert_close(layer(x)[0], expected)


@pytest.mark.parametrize("routing", [None, "zipf"])
def test_the_plain_one_counts_each_source_of_shared_sequences_by_itself(routing: str | None) -> None:
    """Four sources of 4 positions each of both sequences, one after the other, are what mixtures of their own make."""
    moe = replace(mixture_of(capacity=0.75, aux=0.5), tp=4)
    source, plain = made(MoeLayer, GPT, moe), made(DenseMoe, GPT, moe)
    x = torch.randn(BATCH, 16, 32, generator=torch.Generator().manual_seed(0))
    generator = moe.generator(0, 4, TOKENS, routing) if routing else None
    given = None if generator is None else torch.tensor(routes(generator, 0, 0, TOKENS))
    outs, losses, chosen = [], [], []
    for part in range(4):
        source.given = None if given is None else given[8 * part : 8 * part + 8]
        outs.append(source(x[:, 4 * part : 4 * part + 4]))
        assert source.aux is not None
        losses.append(source.aux)
        chosen.append(source.chosen[0])
    plain.given = given
    torch.testing.assert_close(plain(x), torch.cat(outs, 1))
    assert plain.aux is not None
    torch.testing.assert_close(plain.aux, torch.stack(losses).mean())
    assert plain.chosen[0].equal(torch.cat(chosen))


def made(kind: type[MoeLayer], shape: Shape, moe: Moe) -> MoeLayer:
    layer = kind(shape, moe)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.2, generator=chance)
    return layer


# ---- parts


def test_scores_are_float32_whatever_the_model_is() -> None:
    for scores, total in (("softmax", torch.ones(TOKENS)), ("sigmoid", None)):
        router = Router(GPT, mixture_of(scores=scores)).bfloat16()
        with torch.no_grad():
            router.weight.normal_(0, 0.1)
        found = router(torch.randn(TOKENS, 32).bfloat16())
        assert found.dtype == torch.float32
        assert bool(((found > 0) & (found < 1)).all())
        if total is not None:
            torch.testing.assert_close(found.sum(1), total)


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


def test_a_token_that_goes_nowhere_has_the_shared_experts_alone() -> None:
    layer = made(MoeLayer, GPT, mixture_of())
    x = torch.randn(1, 4, 32)
    layer.given = torch.tensor([[0, 1], [NOWHERE, NOWHERE], [2, 3], [NOWHERE, NOWHERE]])
    assert layer.shared is not None
    alone = layer(x) - layer.shared(x)
    assert [bool(of.abs().max() > 1e-6) for of in alone[0]] == [True, False, True, False]


def test_dropped_pairs_leave_the_weights_of_the_others() -> None:
    """Capacity 1 each: the second token keeps its second expert, with the same score as before."""
    layer = made(MoeLayer, GPT, mixture_of(shared=0, capacity=2.0))  # ceil(2 * 2 * 2 / 8) = 1
    x = torch.randn(1, 2, 32)
    layer.given = torch.tensor([[0, 1], [0, 2]])
    both_kept = MoeLayer.forward(layer, x)
    layer.given = torch.tensor([[0, 1], [NOWHERE, 2]])
    torch.testing.assert_close(both_kept, layer(x))


def test_balance_is_one_where_routes_and_scores_are_even_and_more_where_both_lean() -> None:
    even = torch.full((8, 4), 0.25)
    assert float(balance_loss(even, torch.tensor([[0, 1], [2, 3]] * 4))) == pytest.approx(1.0)
    lean = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 8)
    assert float(balance_loss(lean, torch.tensor([[0, 1]] * 8))) == pytest.approx(4 * (0.5 * 0.7 + 0.5 * 0.1))
    assert float(balance_loss(even, torch.full((8, 2), NOWHERE))) == 0.0
    halved = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 8) / 2  # sigmoid scores do not sum to 1
    assert float(balance_loss(halved, torch.tensor([[0, 1]] * 8))) == pytest.approx(1.6)


# ---- models


def moe_model(moe: Moe, shape: Shape = GPT, *, dense: bool = False) -> Transformer:
    model = build(shape, 0, CPU)
    exchange_ffns(model, shape, moe, 0, dense=dense)
    return model


def test_every_layer_has_a_mixture_and_all_else_stays_as_it_was() -> None:
    before = build(GPT, 0, CPU)
    model = moe_model(mixture_of())
    assert len(mixtures(model)) == GPT.layers
    left = {name: p for name, p in model.named_parameters() if ".ffn." not in name}
    assert left.keys() == {name for name, _ in before.named_parameters() if ".ffn." not in name}
    for name, parameter in left.items():
        assert torch.equal(parameter, before.get_parameter(name))
    assert not any(isinstance(layer.ffn, Ffn) for layer in model.layers)


def test_weights_are_those_of_the_seed_whoever_holds_them() -> None:
    one, other = moe_model(mixture_of()), moe_model(mixture_of(), dense=True)
    for (name, p), (same, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(p, q)
    up = one.get_parameter("layers.0.ffn.experts.up")
    assert float(up.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(up[0], up[1])
    assert not torch.equal(up, one.get_parameter("layers.1.ffn.experts.up"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_has_the_gradients_of_the_plain_one(dtype: torch.dtype) -> None:
    found = []
    for dense in (False, True):
        model = moe_model(mixture_of(aux=0.1, routing="zipf"), dense=dense).to(dtype)
        take_routes(model, 0, torch.stack([torch.arange(TOKENS) % 8, (torch.arange(TOKENS) + 3) % 8], 1))
        loss = loss_of(model, draw_tokens(GPT, BATCH, 0, 0)) + aux_loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, expected in found[1].items():
        assert float((found[0][name] - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1e-3), (
            name
        )


def test_routes_are_given_to_all_layers_or_to_each() -> None:
    model = moe_model(mixture_of())
    one, other = torch.zeros(1, 2), torch.ones(1, 2)
    take_routes(model, 3, one)
    assert [mixture.given is one for mixture in mixtures(model)] == [True, True]
    take_routes(model, 4, {0: one, 1: other})
    assert [mixture.given is want for mixture, want in zip(mixtures(model), (one, other), strict=True)] == [True, True]
    assert [mixture.microbatch for mixture in mixtures(model)] == [4, 4]
    take_routes(model, 0, None)
    assert all(mixture.given is None for mixture in mixtures(model))


def test_what_was_chosen_is_kept_by_microbatch() -> None:
    model = moe_model(mixture_of())
    for microbatch in (0, 1):
        take_routes(model, microbatch, None)
        model(draw_tokens(GPT, BATCH, 0, microbatch)[:, :-1])
    assert [sorted(mixture.chosen) for mixture in mixtures(model)] == [[0, 1]] * 2
    assert not torch.equal(mixtures(model)[0].chosen[0], mixtures(model)[0].chosen[1])


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
    let_experts_wait(model, 8.0, TOKENS, Waiter(CPU))
    for mixture in mixtures(model):
        assert mixture.experts.wait_of is not None
        assert mixture.experts.wait_of.seconds_per_row * TOKENS * 2 == pytest.approx(8.0 / 2)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(linear, TimedLinear) and linear.seconds == 0 for linear in linears)


# ---- chunks


class Recorded:
    """A trip that tells what is asked of it, and brings nothing."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._number, self._log = number, log
        self._say("sent")

    def arrive(self) -> Rows:
        self._say("arrived")
        return Rows(tokens=torch.zeros(0, 32), counts=torch.zeros(8, dtype=torch.int64))

    def give_back(self, made: Tensor) -> None:
        self._say("given back")

    def receive(self) -> Tensor:
        self._say("received")
        return torch.full((TOKENS, 32), float(self._number))

    def _say(self, what: str) -> None:
        self._log.append(f"{self._number} {what}")


@pytest.mark.parametrize(
    ("chunks", "order"),
    [
        (1, ["0 sent", "0 arrived", "0 given back", "0 received"]),
        (
            3,
            [
                *("0 sent", "1 sent", "0 arrived", "0 given back", "2 sent", "1 arrived", "1 given back"),
                *("2 arrived", "2 given back", "0 received", "1 received", "2 received"),
            ],
        ),
    ],
)
def test_a_chunk_is_on_its_way_while_the_one_before_is_computed(
    monkeypatch: pytest.MonkeyPatch, chunks: int, order: list[str]
) -> None:
    log: list[str] = []
    layer = made(MoeLayer, GPT, mixture_of(chunks=chunks))

    def start(variant: str, x: Tensor, weights: Tensor, plan: Plan, group: object) -> Recorded:
        return Recorded(sum(line.endswith("sent") for line in log), log)

    monkeypatch.setattr("workloads.experts.moe.start_trip", start)
    out = layer.route(torch.zeros(TOKENS, 32), torch.ones(TOKENS, 2), torch.zeros(TOKENS, 2, dtype=torch.int64))
    assert log == order
    assert float(out.mean()) == sum(range(chunks))
