"""A step with experts on other ranks matches one process and sends the analytical bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.moe_layer import find_moe_layers
from parbench.workloads.step.train_step import TrainStep
from tests.support.ranks import Ranks
from tests.support.workloads.ep_steps import BFLOAT16, DROPS
from tests.support.workloads.training_steps import (
    Params,
    assert_right,
    build_small_step,
    count_wrong_after_step,
)

LLAMA: Params = {"recipe": "llama"}
ZIPF: Params = {"routing": "zipf", **DROPS}
HOT: Params = {"microbatches": 2, "routing": "zipf", **DROPS, **BFLOAT16}
REPLICAS: Params = {"ep": 1, "routing": "balanced", **DROPS}
MESH: Params = {"experts": 8, "microbatches": 1}
FSDP: Params = {**MESH, "mesh": "fsdp=2,ep=2"}
UNEVEN: Params = {**FSDP, "vocabulary": 61, "checkpointing": "full", "shared": 0}
SPLIT: Params = {**MESH, "mesh": "tp=2,etp=2", "checkpointing": "full", **DROPS}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ep_step", LLAMA),
        ("ep_step", HOT),
        ("ep_step", REPLICAS),
        ("hybrid", UNEVEN),
        ("hybrid", SPLIT),
    ],
)
def test_expert_step_matches_one_process(two_ranks: Ranks, name: str, params: Params) -> None:
    assert_right(two_ranks, name, params)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ep_step", {"ep": 2, "microbatches": 2, **ZIPF}),
        ("hybrid", {**MESH, "mesh": "dp=2,tp=2,ep=2", **LLAMA, **BFLOAT16}),
        ("hybrid", {**MESH, "mesh": "fsdp=2,tp=2,ep=2,etp=2", **ZIPF}),
    ],
)
def test_options_on_four_ranks(four_ranks: Ranks, name: str, params: Params) -> None:
    assert_right(four_ranks, name, params)


def scale_gradient(step: TrainStep, name: str) -> None:
    parameter = step.model.get_parameter(name)
    parameter.register_hook(lambda gradient: gradient * 1.001)  # type: ignore[no-untyped-call]


def raise_capacity(step: TrainStep) -> None:
    for mixture in find_moe_layers(step.model):
        mixture.moe = replace(mixture.moe, capacity=0.9)


def forget_partial_sums(step: TrainStep) -> None:
    step.parts[0].partial_parameters.clear()


MUTANTS: dict[str, Callable[[TrainStep], object]] = {
    "expert gradient": lambda step: scale_gradient(step, "layers.0.ffn.experts.down"),
    "router gradient": lambda step: scale_gradient(step, "layers.1.ffn.router.weight"),
    "capacity": raise_capacity,
    "sum over tp": forget_partial_sums,
}


def count_wrong_of_mutant(world: World, mutant: str) -> int:
    """Return wrong elements of all ranks for a step that becomes wrong before its check."""
    mesh = "tp=2" if mutant == "sum over tp" else "dp=2,ep=2"
    step = build_small_step(world, "hybrid", {**MESH, "mesh": mesh, **ZIPF})
    assert count_wrong_after_step(step) == 0
    MUTANTS[mutant](step)
    wrong = sum(world.gather(step.check()))
    step.close()
    return wrong


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_detected(two_ranks: Ranks, mutant: str) -> None:
    wrong, _ = two_ranks.call(f"{__name__}:count_wrong_of_mutant", mutant=mutant)
    assert wrong > 0


def explain(world: World, params: Params) -> dict[str, Any]:
    step = build_small_step(world, "hybrid", params)
    step.step()
    metrics = step.explain_step(step.reset, 0.0).metrics
    step.close()
    return {name: metric.value for name, metric in metrics.items()}


def test_explanation_of_expert_step(two_ranks: Ranks) -> None:
    params = {**FSDP, "capacity": 1.0, **BFLOAT16}
    metrics, _ = two_ranks.call(f"{__name__}:explain", params=params)
    for name in ("exposed_comm.ep", "ect", "imbalance.rank", "drop_rate"):
        assert name in metrics
    for part in ("parameters", "gradients", "optimizer"):
        counted = metrics[f"memory_counted.{part}"]
        assert metrics[f"memory_formula.{part}"] == pytest.approx(counted, rel=0.01), part
