"""A step with experts on other ranks computes what one process does, dropped tokens included, and its gate sees it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from test_training import MUTANTS, small
from torch import Tensor, nn

from bench.world import World
from workloads.experts import ep as module
from workloads.experts.ep import EpStep
from workloads.experts.ep_explain import explain_experts
from workloads.experts.expert_rest import Around, wrap_around
from workloads.experts.moe import MoeLayer, balance_loss, mixtures
from workloads.experts.routing import GENERATORS
from workloads.experts.wire import wired
from workloads.layout import local
from workloads.model import Transformer
from workloads.training import Options

Params = dict[str, Any]

VARIANTS: dict[str, Params] = {
    "all_to_all": {},
    "padded": {"variant": "padded", "capacity": 1.0},
    "allgather": {"variant": "allgather"},
    "dedup": {"variant": "dedup"},
}
KINDS: list[Params] = [
    {"recipe": "llama", "aux": 0.1, "scores": "sigmoid"},
    {"precision": "bfloat16", "accumulation": 2},
    {"chunks": 3, "accumulation": 2, "capacity": 0.75},
    {"checkpointing": "full", "shared": 0, "routing": "hot_rank"},
    {"experts": 6, "top_k": 3, "routing": "zipf"},
    {"ep": 1, "routing": "ragged", "capacity": 0.75},
    {"fsdp": True, "accumulation": 2, "vocabulary": 61},
]


def step_of(world: World, params: Params) -> EpStep:
    step = small(world, "ep_step", params)
    assert isinstance(step, EpStep)
    return step


def wrong_in(world: World, cases: list[Params], steps: int = 2) -> list[list[int]]:
    """Return for each case how much is wrong after each step."""
    found = []
    for params in cases:
        step, wrong = step_of(world, params), []
        for _ in range(steps):
            step.reset()
            step.step()
            wrong.append(step.check())
        step.close()
        found.append(wrong)
    return found


def right(cases: list[Params], steps: int = 2) -> list[list[int]]:
    return [[0] * steps] * len(cases)


# ---- one process's results


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_as_one_process_would_under_every_routing(two_ranks: Ranks, variant: str) -> None:
    """Capacity drops where it is given, and in every second case where a variant is free to."""
    names = ["router", *(GENERATORS if variant == "all_to_all" else ("zipf", "idle_rank", "ragged"))]
    drops: list[Params] = [{"capacity": 0.75} if i % 2 else {} for i in range(len(names))]
    cases = [{**drop, **VARIANTS[variant], "routing": name} for drop, name in zip(drops, names, strict=True)]
    assert two_ranks.call("test_ep:wrong_in", cases=cases) == [right(cases)] * 2


def test_every_kind_of_step_trains_as_one_process_would(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ep:wrong_in", cases=KINDS) == [right(KINDS)] * 2


def test_copies_of_the_experts_among_four_ranks_train_as_one_process_would(four_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"ep": 2, "routing": "zipf", "capacity": 0.75, "accumulation": 2},
        {"ep": 2, "variant": "dedup", "routing": "hot_rank"},
        {"ep": 4, "routing": "idle_rank", "chunks": 2},
        {"ep": 4, "variant": "padded", "capacity": 1.0},
        {"ep": 4, "variant": "allgather", "routing": "ragged"},
        {"ep": 1, "aux": 0.1},
        {"etp": 2, "capacity": 0.75, "variant": "padded"},
        {"etp": 2, "ep": 1, "routing": "zipf", "accumulation": 2, "recipe": "llama"},
        {"etp": 4, "checkpointing": "full", "fsdp": True},
    ]
    assert four_ranks.call("test_ep:wrong_in", cases=cases, steps=1) == [right(cases, 1)] * 4


SPLIT_ON_TWO: list[Params] = [
    {"tp": 2},
    {"tp": 2, "recipe": "llama", "routing": "zipf", "capacity": 0.75, "aux": 0.1, "accumulation": 2},
    {"tp": 2, "recipe": "llama", "precision": "bfloat16", "ep": 1, "microbatch": 3},
    {"tp": 2, "precision": "bfloat16", "routing": "hot_rank", "capacity": 0.75, "variant": "padded"},
    {"tp": 2, "etp": 2, "checkpointing": "full", "capacity": 0.75, "aux": 0.5},
]
SPLIT_ON_FOUR: list[Params] = [
    {"tp": 2, "ep": 4, "routing": "ragged", "capacity": 0.75, "accumulation": 2},
    {"tp": 2, "ep": 2, "recipe": "llama", "aux": 0.1},
    {"tp": 2, "ep": 2, "precision": "bfloat16", "routing": "zipf", "capacity": 0.75, "variant": "dedup"},
    {"tp": 4, "kv_heads": 4, "ep": 2, "etp": 2, "routing": "idle_rank", "capacity": 0.75},
]


def test_split_attention_trains_as_one_process_would(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ep:wrong_in", cases=SPLIT_ON_TWO) == [right(SPLIT_ON_TWO)] * 2


def test_split_attention_of_several_copies_trains_as_one_process_would(four_ranks: Ranks) -> None:
    assert four_ranks.call("test_ep:wrong_in", cases=SPLIT_ON_FOUR, steps=1) == [right(SPLIT_ON_FOUR, 1)] * 4


def routes_by_token(world: World, params: Params) -> tuple[dict[tuple[int, int, int], Any], list[float]]:
    """Return the routes of this rank's tokens by step, sequence and position, and its losses."""
    step = step_of(world, {"kv_heads": 4, "accumulation": 2, **params})
    routes: dict[tuple[int, int, int], Any] = {}
    losses = []
    for number in range(2):
        step.reset()
        losses.append(float(step._forward_backward() or 0.0))
        positions = step._attention.positions(16)
        for i, microbatch in enumerate(step._numbers):
            first = (step.layout.data_rank * 2 + i) * params["microbatch"]
            by_layer = [mixture.chosen[microbatch].tolist() for mixture in mixtures(step.layout.model)]
            where = [(number, first + row, position) for row in range(params["microbatch"]) for position in positions]
            routes |= dict(zip(where, zip(*by_layer, strict=True), strict=True))
    step.close()
    return routes, losses


@pytest.mark.parametrize("routing", ["router", "zipf", "ragged", "rotating"])
def test_a_token_takes_the_same_route_whichever_rank_has_it(four_ranks: Ranks, routing: str) -> None:
    """The same global batch of 16 sequences, in four, two, and one data rank's parts."""
    ways: list[Params] = [
        {"microbatch": 2},
        {"microbatch": 4, "tp": 2, "ep": 2},
        {"microbatch": 8, "tp": 4},
    ]
    found = []
    for way in ways:
        told = four_ranks.call("test_ep:routes_by_token", params={"routing": routing, **way})
        routes = {where: route for of, _ in told for where, route in of.items()}
        assert sum(len(of) for of, _ in told) == len(routes) == 2 * 16 * 16
        found.append((routes, [sum(of) / 4 for of in zip(*(losses for _, losses in told), strict=True)]))
    (expected, losses), *others = found
    assert len({repr(route) for route in expected.values()}) > 8
    for routes, near in others:
        assert routes == expected
        assert near == pytest.approx(losses, rel=1e-6)


def routes_and_losses(world: World, params: Params) -> tuple[list[Any], list[float]]:
    """Return the routes of this rank's microbatches in two steps, by step and layer, and the losses."""
    step = step_of(world, {"accumulation": 2, **params})
    routes, losses = [], []
    for _ in range(2):
        step.reset()
        loss = step._forward_backward()
        assert loss is not None
        losses.append(float(loss))
        routes.append([[of.tolist() for of in mixture.chosen.values()] for mixture in mixtures(step.layout.model)])
        assert sorted(mixtures(step.layout.model)[0].chosen) == list(step._numbers)
    step.close()
    return routes, losses


@pytest.mark.parametrize("routing", ["router", "zipf", "hot_rank", "rotating", "ragged"])
def test_routes_are_the_same_under_every_layout(four_ranks: Ranks, routing: str) -> None:
    ways: list[Params] = [{"ep": 1}, {"ep": 2}, {"ep": 4}, {"ep": 4, "variant": "dedup"}, {"ep": 2, "etp": 2}]
    found = [four_ranks.call("test_ep:routes_and_losses", params={"routing": routing, **way}) for way in ways]
    assert len({repr(routes) for routes, _ in found[0]}) == 4  # sources differ
    for other in found[1:]:
        for (routes, losses), (same, near) in zip(found[0], other, strict=True):
            assert routes == same
            assert losses == pytest.approx(near, rel=1e-6)


# ---- a gate that cannot fail would say nothing


def _scale_gradient(name: str) -> Callable[[EpStep], None]:
    def mutate(step: EpStep) -> None:
        parameter = step.layout.model.get_parameter(name)
        parameter.register_hook(lambda gradient: gradient * 1.001)  # type: ignore[no-untyped-call]

    return mutate


def _an_expert_is_another(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        given = mixture.route

        def route(tokens: Tensor, weights: Tensor, routes: Tensor, given: Any = given) -> Any:
            return given(tokens, weights, (routes + 1) % 8)

        mixture.route = route  # type: ignore[method-assign]


def _capacity_is_one_more(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        mixture.moe = replace(mixture.moe, capacity=0.9)


def _the_first_weight_counts_for_both(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        given = mixture.route

        def route(tokens: Tensor, weights: Tensor, routes: Tensor, given: Any = given) -> Any:
            return given(tokens, weights[:, :1].expand_as(weights), routes)

        mixture.route = route  # type: ignore[method-assign]


def _balance_is_not_asked_for(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        mixture.register_forward_hook(lambda module, args, out: setattr(module, "aux", None))


def _attention_stays_a_sum(step: EpStep) -> None:
    step._copies["adp"] = ([], None)


def _all_stand_at_the_first_positions(step: EpStep) -> None:
    assert step.layout.model.places is not None
    step.layout.model.places = step.layout.model.places - step.layout.model.places[0]  # type: ignore[operator,index]


def _all_take_the_first_tokens(step: EpStep) -> None:
    step._attention = replace(step._attention, place=0)


def _all_take_the_first_routes(step: EpStep) -> None:
    given = step._loss
    step._loss = lambda module, number, tokens: given(module, number // 2 * 2, tokens)  # type: ignore[method-assign]


def _balance_is_of_all_positions(step: EpStep) -> None:
    alone = step._alone

    def together(dtype: torch.dtype) -> nn.Module:
        model = alone(dtype)
        for mixture in mixtures(model):
            mixture.balance = balance_loss  # type: ignore[method-assign]
        return model

    object.__setattr__(step.layout, "alone", together)


WRONGS_OF_SPLIT: dict[str, Callable[[EpStep], None]] = {
    "attention's gradients stay sums": _attention_stays_a_sum,
    "all stand at the first positions": _all_stand_at_the_first_positions,
    "all take the first tokens": _all_take_the_first_tokens,
    "all take the first routes": _all_take_the_first_routes,
    "balance is of all positions": _balance_is_of_all_positions,
    "capacity is larger": _capacity_is_one_more,
    "a value's gradient is a thousandth larger": _scale_gradient("layers.1.attention.v.weight"),
    "a norm's gradient is a thousandth larger": _scale_gradient("layers.0.attention_norm.weight"),
}
WRONGS: dict[str, Callable[[EpStep], None]] = {
    "an expert's gradient is a thousandth larger": _scale_gradient("layers.0.ffn.experts.down"),
    "a router's gradient is a thousandth larger": _scale_gradient("layers.1.ffn.router.weight"),
    "a shared expert's gradient is a thousandth larger": _scale_gradient("layers.1.ffn.shared.up.weight"),
    "an expert is another": _an_expert_is_another,
    "capacity is larger": _capacity_is_one_more,
    "the first weight counts for both": _the_first_weight_counts_for_both,
    "balance is not asked for": _balance_is_not_asked_for,
}


def wrong_of(world: World, wrongs: list[str], common: bool = False, tp: int = 1) -> list[tuple[int, int]]:
    """Return for each wrong how much a right check finds, and one where it is."""
    found = []
    for wrong in wrongs:
        step = step_of(world, {"capacity": 0.75, "aux": 0.5, "routing": "zipf", "tp": tp})
        step.reset()
        step.step()
        before = step.check()
        step.reset()
        step.step()
        if common:
            MUTANTS[wrong](step, world)
        else:
            (WRONGS if tp == 1 else WRONGS_OF_SPLIT)[wrong](step)
        found.append((before, step.check()))
        step.close()
    return found


def test_what_is_wrong_of_a_mixture_is_caught(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_ep:wrong_of", wrongs=list(WRONGS))
    for wrong, (before, after), (too, other) in zip(WRONGS, first, second, strict=True):
        assert before == too == 0, wrong
        assert max(after, other) > 0, wrong


def test_what_is_wrong_of_split_attention_is_caught(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_ep:wrong_of", wrongs=list(WRONGS_OF_SPLIT), tp=2)
    for wrong, (before, after), (too, other) in zip(WRONGS_OF_SPLIT, first, second, strict=True):
        assert before == too == 0, wrong
        assert max(after, other) > 0, wrong


def wrong_without_sums(world: World, names: list[str]) -> list[int]:
    """Return how much is wrong where the gradients of parameters of a name are not summed over ranks, by name."""
    found = []
    for name in names:

        def around(model: Transformer, world: World, options: Options, apart: Any, name: str = name) -> Around:
            left_out = [parameter for key, parameter in model.named_parameters() if name in key]
            assert left_out
            return wrap_around(model, world, options, [*apart, *left_out])

        with mock.patch.object(module, "wrap_around", around):
            step = step_of(world, {"tp": 2})
        step.reset()
        step.step()
        found.append(step.check())
        step.close()
    return found


def test_a_rank_that_keeps_the_gradients_of_its_own_positions_is_caught(two_ranks: Ranks) -> None:
    names = ["attention_norm", "ffn_norm", "router", "shared", "positions", "head"]
    for found in two_ranks.call("test_ep:wrong_without_sums", names=names):
        assert min(found) > 0


def test_what_is_wrong_of_any_step_is_caught(two_ranks: Ranks) -> None:
    wrongs = [
        "every gradient is a thousandth larger",
        "one rank has other tokens",
        "targets are not moved",
        "every loss is a thousandth larger",
    ]
    first, second = two_ranks.call("test_ep:wrong_of", wrongs=wrongs, common=True)
    for wrong, (before, after), (too, other) in zip(wrongs, first, second, strict=True):
        assert before == too == 0, wrong
        assert max(after, other) > 0, wrong


def wrong_without_averages(world: World) -> list[int]:
    """Return how much is wrong where copies of experts are not averaged, and where their sum is not divided.

    The same of copies of split attention, where there are any.
    """
    found = []
    split: list[tuple[str, Params]] = [("adp", {"tp": 2}), ("edp", {"tp": 2, "ep": 2})]
    ways: list[tuple[str, Params]] = split if world.size == 4 else [("edp", {"ep": 1})]
    for axis, params in ways:
        for divided in (True, False):
            step = step_of(world, params)
            step.reset()
            step.step()
            assert step.check() == 0
            parameters, replicas = step._copies[axis]
            assert replicas is not None
            step._copies[axis] = (parameters if divided else [], None)
            found.append(step.check())
            step.close()
    return found


def test_copies_that_are_not_averaged_are_caught(two_ranks: Ranks) -> None:
    for found in zip(*two_ranks.call("test_ep:wrong_without_averages"), strict=True):
        assert max(found) > 0


def test_copies_of_split_attention_that_are_not_averaged_are_caught(four_ranks: Ranks) -> None:
    each = list(zip(*four_ranks.call("test_ep:wrong_without_averages"), strict=True))
    assert len(each) == 4
    assert all(max(found) > 0 for found in each)


def wrong_of_a_router(world: World, tp: int = 1) -> list[int]:
    """Return how much the first check finds where a rank's router is followed, and where a token goes elsewhere."""
    found = []
    for elsewhere in (False, True):
        step = step_of(world, {"tp": tp})
        step.reset()
        if elsewhere and world.rank == 1:
            given = MoeLayer.forward

            def forward(layer: MoeLayer, x: Tensor, given: Any = given) -> Any:
                if layer.given is None:
                    scores = layer.router(x.flatten(0, 1))
                    routes = scores.topk(2).indices
                    routes[3] = (-scores[3]).topk(2).indices
                    layer.given = routes
                return given(layer, x)

            for mixture in mixtures(step.layout.model):
                mixture.forward = forward.__get__(mixture)  # type: ignore[method-assign]
        step.step()
        found.append(step.check())
        step.close()
    return found


def test_a_token_that_its_router_would_send_elsewhere_is_caught(two_ranks: Ranks) -> None:
    """Two layers each have one; results are computed with the routes taken, and are right."""
    assert two_ranks.call("test_ep:wrong_of_a_router") == [[0, 2]] * 2
    assert two_ranks.call("test_ep:wrong_of_a_router", tp=2) == [[0, 2]] * 2


# ---- what is held, sent and told


def held(world: World, params: Params) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Return of each parameter the elements in all and those on this rank, and the axes."""
    step = step_of(world, params)
    found = {name: (p.numel(), local(p).numel()) for name, p in step.layout.model.named_parameters()}
    axes = list(step.layout.axes)
    step.close()
    return found, axes


def test_experts_are_divided_and_the_rest_is_not(four_ranks: Ranks) -> None:
    for ep, axes in ((4, ["dp", "ep"]), (2, ["dp", "ep", "edp"]), (1, ["dp", "edp"])):
        for found, there in four_ranks.call("test_ep:held", params={"ep": ep}):
            assert there == axes
            for name, (whole, mine) in found.items():
                assert mine * (ep if ".experts." in name else 1) == whole, name


def test_split_attention_is_divided_too(four_ranks: Ranks) -> None:
    for tp, axes in ((2, ["dp", "tp", "adp", "ep", "edp"]), (4, ["dp", "tp", "ep", "edp"])):
        for found, there in four_ranks.call("test_ep:held", params={"ep": 2, "tp": tp, "kv_heads": 4}):
            assert there == axes
            for name, (whole, mine) in found.items():
                split = ".attention." in name and not name.endswith("out.bias")
                assert mine * (2 if ".experts." in name else tp if split else 1) == whole, name


def ratios(world: World, cases: list[Params]) -> list[dict[str, float | None]]:
    """Return for each case what a step sends over its closed form, by axis."""
    found = []
    for params in cases:
        step = step_of(world, params)
        for _ in range(2):
            step.reset()
            step.step()
        told = explain_experts(step.seen(), step.step, step.reset, 0.0, step._balanced).metrics
        there = [axis for axis in ("ep", "etp") if axis in step.layout.axes]
        one: dict[str, float | None] = {axis: told[f"bytes_ratio.{axis}"].value for axis in there}
        sent = wired(step.step, step.layout.axes)
        one |= {axis: sent[axis] / expected for axis, expected in step.layout.expected_bytes.items()}
        found.append(one)
        step.close()
    return found


def explained(world: World, cases: list[Params]) -> list[dict[str, float | None]]:
    """Return the metrics of each case's explanation."""
    found = []
    for params in cases:
        step = step_of(world, params)
        for _ in range(2):
            step.reset()
            step.step()
        told = step.explain(step.reset, 0.0)
        found.append({name: metric.value for name, metric in told.metrics.items()})
        step.close()
    return found


def test_bytes_of_every_axis_are_those_of_the_closed_form(two_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"routing": "hot_rank", "capacity": 1.0},
        {"variant": "padded", "capacity": 0.5, "precision": "bfloat16"},
        {"variant": "allgather", "routing": "zipf", "accumulation": 2},
        {"variant": "allgather", "checkpointing": "full", "shared": 0},
        {"variant": "dedup", "checkpointing": "full", "routing": "lognormal"},
        {"chunks": 4, "routing": "ragged"},
    ]
    for told in two_ranks.call("test_ep:ratios", cases=cases):
        for params, found in zip(cases, told, strict=True):
            assert found == {"ep": 1.0, "dp": 1.0}, params


@pytest.mark.parametrize(
    "params",
    [
        {"capacity": 1.0},
        {"fsdp": True, "precision": "bfloat16"},
        {"tp": 2, "capacity": 1.0},
        {"tp": 2, "recipe": "llama"},
    ],
    ids=str,
)
def test_an_explanation_has_state_and_time_and_what_routes_cost(two_ranks: Ranks, params: Params) -> None:
    for [found] in two_ranks.call("test_ep:explained", cases=[params]):
        for part in ("parameters", "gradients", "optimizer"):
            assert found[f"memory_formula.{part}"] == pytest.approx(found[f"memory_counted.{part}"], rel=0.01)
        assert "memory_formula.activations" not in found
        assert found["bytes_ratio.ep"] == found["bytes_ratio.dp"] == found.get("bytes_ratio.tp", 1.0) == 1.0
        assert ("bytes_ratio.tp" in found) == ("tp" in params)
        assert {
            "exposed_comm.ep",
            "ect",
            "imbalance.rank",
            "imbalance_lost",
            "drop_rate",
            "dedup_ratio",
        } <= found.keys()


def test_bytes_between_copies_are_those_of_the_closed_form(four_ranks: Ranks) -> None:
    for [found] in four_ranks.call("test_ep:ratios", cases=[{"ep": 2, "variant": "dedup"}]):
        assert found == {"ep": 1.0, "dp": 1.0, "edp": 1.0}


def test_bytes_of_split_attention_are_those_of_the_closed_form(four_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"tp": 2, "ep": 4, "routing": "zipf", "capacity": 0.75, "accumulation": 2},
        {"tp": 2, "ep": 2, "recipe": "llama", "precision": "bfloat16", "variant": "dedup"},
        {"tp": 4, "kv_heads": 4, "ep": 4, "checkpointing": "full", "variant": "allgather"},
    ]
    axes = [["ep", "dp", "tp", "adp"], ["ep", "dp", "tp", "adp", "edp"], ["ep", "dp", "tp"]]
    for told in four_ranks.call("test_ep:ratios", cases=cases):
        for params, there, found in zip(cases, axes, told, strict=True):
            assert found == dict.fromkeys(there, 1.0), params


def test_bytes_of_split_experts_are_those_of_the_closed_form(four_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"etp": 2, "routing": "zipf", "capacity": 0.75, "fsdp": True},
        {"etp": 2, "variant": "padded", "capacity": 0.5, "checkpointing": "full"},
        {"etp": 2, "variant": "allgather", "checkpointing": "full", "shared": 0, "accumulation": 2},
    ]
    for told in four_ranks.call("test_ep:ratios", cases=cases):
        for params, found in zip(cases, told, strict=True):
            assert found == {"ep": 1.0, "etp": 1.0, "dp": 1.0}, params


def described(world: World, params: Params) -> tuple[dict[str, Any], tuple[str, ...], float]:
    step = step_of(world, params)
    found = step.describe()
    step.close()
    return found.details, found.notes, step._flops_per_rank()


def test_a_row_says_what_it_is_and_may_claim(two_ranks: Ranks) -> None:
    for details, notes, flops in two_ranks.call("test_ep:described", params={"capacity": 1.0}):
        assert details["slots"] == 8
        assert details["expert_ffn"] == 64
        assert details["parameters"] > details["routed_parameters"] == 2 * 8 * 2 * 32 * 64
        assert details["flops_per_rank"] == flops
        assert notes[0].startswith("ep_step: the whole training step")


def test_a_row_of_split_attention_counts_the_positions_of_one_rank(two_ranks: Ranks) -> None:
    [whole, _] = two_ranks.call("test_ep:described", params={"capacity": 1.0})
    for details, notes, flops in two_ranks.call("test_ep:described", params={"capacity": 1.0, "tp": 2}):
        assert details["slots"] == 4
        assert details["tokens_per_step"] * 2 == whole[0]["tokens_per_step"]
        assert flops * 2 == whole[2]
        assert details["axes"] == {axis: {"ranks": 2} for axis in ("dp", "tp", "ep")}
        assert details["bytes_formula"].startswith("tp: 4 b s h e (t-1)/t")
        assert any(note.startswith("attention over tp: ") for note in notes)
        assert not any(note.startswith("attention over tp: ") for note in whole[1])


def timed(world: World, tp: int = 1) -> tuple[int, tuple[str, ...], int]:
    step = step_of(world, {"compute": "timed:4ms", "routing": "hot_rank", "tp": tp, "accumulation": tp})
    step.reset()
    step.step()
    wrong, notes = step.check(), step.describe().notes
    axes = len(step.layout.axes)
    step.close()
    return wrong, notes, axes


def test_timed_experts_leave_the_right_fills_and_a_note(two_ranks: Ranks) -> None:
    for wrong, notes, axes in two_ranks.call("test_ep:timed"):
        assert wrong == 0
        assert any(note.startswith("timed experts: T is their forward at the mean load") for note in notes)
        assert axes == 2


def test_timed_experts_beside_split_attention_leave_the_right_fills(four_ranks: Ranks) -> None:
    for wrong, _, axes in four_ranks.call("test_ep:timed", tp=2):
        assert wrong == 0
        assert axes == 4
