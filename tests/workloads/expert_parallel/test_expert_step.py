"""A step with experts on other ranks matches one process, sends analytical bytes, and fails if wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.expert_parallel.expert_step import EpStep
from parbench.workloads.expert_parallel.moe_layer import MoeLayer, mixtures
from parbench.workloads.step.probe import run_probes
from tests.support.ep_steps import DROPS, NARROW, build_step
from tests.support.ranks import Ranks
from tests.support.training_steps import MUTANTS, Params, count_wrong_after_step


def measure(world: World, params: Params) -> tuple[list[int], dict[str, float | None]]:
    """Return wrong elements after each of two steps, and sent over analytical bytes by axis."""
    step = build_step(world, params)
    wrong = [count_wrong_after_step(step) for _ in range(2)]
    probe = step.expert_probe()
    metrics = run_probes(world, [probe], step.step, step.reset, 0.0).metrics
    ratios = {axis: metrics[f"bytes_ratio.{axis}"].value for axis in step.layout.axes}
    step.close()
    return wrong, ratios


def assert_right(ranks: Ranks, params: Params, axes: str) -> None:
    for wrong, ratios in ranks.call(f"{__name__}:measure", params=params):
        assert wrong == [0, 0]
        assert ratios == dict.fromkeys(axes.split(), 1.0)


@pytest.mark.parametrize(
    ("params", "axes"),
    [
        ({"recipe": "llama", "aux": 0.1, "scores": "sigmoid"}, "ep dp"),
        ({"variant": "allgather", "routing": "zipf", **DROPS}, "ep dp"),
        ({"chunks": 3, "accumulation": 2, "routing": "hot_rank", **DROPS, **NARROW}, "ep dp"),
        ({"ep": 1, "routing": "balanced", **DROPS}, "dp edp"),
        ({"fsdp": True, "vocabulary": 61, "checkpointing": "full", "shared": 0}, "ep dp"),
        ({"tp": 2, "recipe": "llama", "routing": "zipf", "aux": 0.1, **DROPS}, "ep tp dp"),
        ({"tp": 2, "etp": 2, "checkpointing": "full", "aux": 0.5, **DROPS}, "etp tp dp"),
    ],
)
def test_expert_step_matches_one_process(two_ranks: Ranks, params: Params, axes: str) -> None:
    assert_right(two_ranks, params, axes)


@pytest.mark.parametrize(
    ("params", "axes"),
    [
        ({"tp": 2, "ep": 2, "recipe": "llama", "aux": 0.1}, "ep dp tp adp edp"),
        ({"etp": 2, "variant": "allgather", **DROPS}, "ep etp dp"),
    ],
)
def test_expert_step_on_four_ranks(four_ranks: Ranks, params: Params, axes: str) -> None:
    assert_right(four_ranks, params, axes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("params", "axes"),
    [
        ({"ep": 2, "routing": "zipf", "accumulation": 2, **DROPS}, "ep dp edp"),
        ({"tp": 2, "ep": 2, "recipe": "llama", **NARROW}, "ep dp tp adp edp"),
        ({"etp": 2, "routing": "zipf", "fsdp": True, **DROPS}, "ep etp dp"),
        ({"etp": 2, "variant": "allgather", "checkpointing": "full"}, "ep etp dp"),
    ],
)
def test_expert_step_options_on_four_ranks(four_ranks: Ranks, params: Params, axes: str) -> None:
    assert_right(four_ranks, params, axes)


def count_wrong(world: World, params: Params) -> int:
    step = build_step(world, params)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_timed_gradients_are_averaged(two_ranks: Ranks, tp: int) -> None:
    params = {"compute": "timed:4ms", "routing": "hot_rank", "tp": tp}
    assert two_ranks.call(f"{__name__}:count_wrong", params=params) == [0, 0]


def scale_gradient(step: EpStep, name: str) -> None:
    parameter = step.layout.model.get_parameter(name)
    parameter.register_hook(lambda gradient: gradient * 1.001)  # type: ignore[no-untyped-call]


def raise_capacity(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        mixture.moe = replace(mixture.moe, capacity=0.9)


def forget_balance(step: EpStep) -> None:
    for mixture in mixtures(step.layout.model):
        mixture.register_forward_hook(lambda module, args, out: setattr(module, "aux", None))


def take_first_tokens(step: EpStep) -> None:
    step._positions = range(len(step._positions))


EXPERT_MUTANTS: dict[str, Callable[[EpStep], object]] = {
    "nothing": lambda step: None,
    "expert gradient": lambda step: scale_gradient(step, "layers.0.ffn.experts.down"),
    "router gradient": lambda step: scale_gradient(step, "layers.1.ffn.router.weight"),
    "capacity": raise_capacity,
    "balance loss": forget_balance,
    "attention gradients summed": lambda step: step._copies.update(adp=[]),
    "first tokens on all ranks": take_first_tokens,
}


def count_wrong_of_mutant(world: World, mutant: str, tp: int) -> int:
    """Return wrong elements of a step that becomes wrong before its check."""
    step = build_step(world, {"aux": 0.5, "routing": "zipf", "tp": tp, **DROPS})
    step.reset()
    step.step()
    if mutant in MUTANTS:
        MUTANTS[mutant](step, world)
    else:
        EXPERT_MUTANTS[mutant](step)
    wrong = step.check()
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("mutant", "tp"),
    [
        ("expert gradient", 1),
        ("router gradient", 1),
        ("capacity", 1),
        ("balance loss", 1),
        ("attention gradients summed", 2),
        ("first tokens on all ranks", 2),
        ("other tokens on rank 1", 1),
        ("loss 0.1 % larger", 1),
    ],
)
def test_mutant_is_detected(two_ranks: Ranks, mutant: str, tp: int) -> None:
    arguments = {"mutant": mutant, "tp": tp}
    assert max(two_ranks.call(f"{__name__}:count_wrong_of_mutant", **arguments)) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_step_without_mutation_is_right(two_ranks: Ranks, tp: int) -> None:
    arguments = {"mutant": "nothing", "tp": tp}
    assert two_ranks.call(f"{__name__}:count_wrong_of_mutant", **arguments) == [0, 0]


def count_wrong_averages(world: World) -> tuple[int, int, int]:
    """Return counts of a right step, without averages of replicas, and without their division."""
    step = build_step(world, {"ep": 1})
    right = count_wrong_after_step(step)
    axes = step._axes
    step._axes = replace(axes, groups={})
    not_averaged = step.check()
    step._axes = axes
    step._copies["edp"] = []
    not_divided = step.check()
    step.close()
    return right, not_averaged, not_divided


def test_expert_replicas_that_are_not_averaged_are_detected(two_ranks: Ranks) -> None:
    first, second = two_ranks.call(f"{__name__}:count_wrong_averages")
    assert first[0] == second[0] == 0
    assert max(first[1], second[1]) > 0
    assert max(first[2], second[2]) > 0


def route_one_token_elsewhere(layer: MoeLayer, x: Tensor) -> Tensor:
    """Run a layer whose token 3 takes the experts with the lowest scores."""
    if layer.given is None:
        scores = layer.router(x.flatten(0, 1))
        routes = scores.topk(2).indices
        routes[3] = (-scores[3]).topk(2).indices
        layer.given = routes
    return MoeLayer.forward(layer, x)


def count_misrouted(world: World, tp: int) -> int:
    step: Any = build_step(world, {"tp": tp})
    if world.rank == 1:
        for mixture in mixtures(step.layout.model):
            mixture.forward = route_one_token_elsewhere.__get__(mixture)  # type: ignore[method-assign]
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_misrouted_token_is_detected(two_ranks: Ranks, tp: int) -> None:
    """Results are computed with the wrong routes of two layers, and are right for them."""
    assert two_ranks.call(f"{__name__}:count_misrouted", tp=tp) == [2, 2]


def explain(world: World, params: Params) -> dict[str, Any]:
    step = build_step(world, params)
    step.step()
    metrics = step.explain(step.reset, 0.0).metrics
    step.close()
    return {name: metric.value for name, metric in metrics.items()}


def test_explanation_of_expert_step(two_ranks: Ranks) -> None:
    params = {"fsdp": True, "capacity": 1.0, **NARROW}
    metrics, _ = two_ranks.call(f"{__name__}:explain", params=params)
    expected = {"exposed_comm.ep", "ect", "imbalance.rank", "imbalance_time", "drop_rate"}
    assert expected <= metrics.keys()
    assert "memory_formula.activations" not in metrics
    for part in ("parameters", "gradients", "optimizer"):
        counted = metrics[f"memory_counted.{part}"]
        assert metrics[f"memory_formula.{part}"] == pytest.approx(counted, rel=0.01), part


def describe(world: World, tp: int) -> tuple[Description, float]:
    step = build_step(world, {"capacity": 1.0, "tp": tp})
    step.close()
    return step.describe(), flops_per_token(step.spec.shape, step.moe)


def test_description_of_expert_step(two_ranks: Ranks) -> None:
    (full, flops), _ = two_ranks.call(f"{__name__}:describe", tp=1)
    details = full.details
    assert details["slots"] == 8
    assert details["expert_ffn"] == 64
    assert details["flops_per_rank"] == details["tokens_per_step"] * flops / 2
    assert details["parameters"] > details["routed_parameters"] == 2 * 8 * 2 * 32 * 64
    (split, _), _ = two_ranks.call(f"{__name__}:describe", tp=2)
    assert split.details["slots"] == 4
    assert split.details["tokens_per_step"] * 2 == details["tokens_per_step"]
    assert split.details["axes"] == {axis: {"ranks": 2} for axis in ("dp", "tp", "ep")}
