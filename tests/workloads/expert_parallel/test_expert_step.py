"""A step with experts on other ranks matches one process and sends the analytical bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.expert_parallel.expert_step import EpStep
from parbench.workloads.expert_parallel.moe_layer import mixtures
from parbench.workloads.step.probe import run_probes
from tests.support.ep_steps import BFLOAT16, DROPS, build_step
from tests.support.ranks import Ranks
from tests.support.training_steps import Params, count_wrong_after_step

LLAMA: Params = {"recipe": "llama"}
ZIPF: Params = {"routing": "zipf", **DROPS}
CHUNKS: Params = {"chunks": 3, "accumulation": 2, "routing": "hot_rank", **DROPS, **BFLOAT16}
FSDP: Params = {"fsdp": True, "vocabulary": 61, "checkpointing": "full", "shared": 0}


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


@pytest.mark.parametrize("params", [{**LLAMA, "aux": 0.1, "scores": "sigmoid"}, CHUNKS, FSDP])
def test_expert_step_matches_one_process(two_ranks: Ranks, params: Params) -> None:
    assert_right(two_ranks, params, "ep dp")


def test_expert_replicas_match_one_process(two_ranks: Ranks) -> None:
    assert_right(two_ranks, {"ep": 1, "routing": "balanced", **DROPS}, "dp edp")


def test_split_experts_match_one_process(two_ranks: Ranks) -> None:
    params = {"tp": 2, "etp": 2, "checkpointing": "full", "aux": 0.5, **DROPS}
    assert_right(two_ranks, params, "etp tp dp")


@pytest.mark.full
@pytest.mark.parametrize(
    ("params", "axes"),
    [
        ({"ep": 2, "accumulation": 2, **ZIPF}, "ep dp edp"),
        ({"tp": 2, "ep": 2, **LLAMA, **BFLOAT16}, "ep dp tp adp edp"),
        ({"etp": 2, "fsdp": True, **ZIPF}, "ep etp dp"),
        ({"etp": 2, "variant": "allgather", "checkpointing": "full"}, "ep etp dp"),
    ],
)
def test_options_on_four_ranks(four_ranks: Ranks, params: Params, axes: str) -> None:
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


MUTANTS: dict[str, Callable[[EpStep], object]] = {
    "expert gradient": lambda step: scale_gradient(step, "layers.0.ffn.experts.down"),
    "router gradient": lambda step: scale_gradient(step, "layers.1.ffn.router.weight"),
    "capacity": raise_capacity,
    "balance loss": forget_balance,
    "attention gradients summed": lambda step: step._copies.update(adp=[]),
    "first tokens on all ranks": take_first_tokens,
}


def count_wrong_of_mutant(world: World, mutant: str, tp: int) -> int:
    """Return wrong elements of all ranks for a step that becomes wrong before its check."""
    step = build_step(world, {"aux": 0.5, "tp": tp, **ZIPF})
    assert count_wrong_after_step(step) == 0
    MUTANTS[mutant](step)
    wrong = sum(world.gather(step.check()))
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
    ],
)
def test_mutant_is_detected(two_ranks: Ranks, mutant: str, tp: int) -> None:
    wrong, _ = two_ranks.call(f"{__name__}:count_wrong_of_mutant", mutant=mutant, tp=tp)
    assert wrong > 0


def explain(world: World, params: Params) -> dict[str, Any]:
    step = build_step(world, params)
    step.step()
    metrics = step.explain_step(step.reset, 0.0).metrics
    step.close()
    return {name: metric.value for name, metric in metrics.items()}


def test_explanation_of_expert_step(two_ranks: Ranks) -> None:
    params = {"fsdp": True, "capacity": 1.0, **BFLOAT16}
    metrics, _ = two_ranks.call(f"{__name__}:explain", params=params)
    for name in ("exposed_comm.ep", "ect", "imbalance.rank", "imbalance_time", "drop_rate"):
        assert name in metrics
    for part in ("parameters", "gradients", "optimizer"):
        counted = metrics[f"memory_counted.{part}"]
        assert metrics[f"memory_formula.{part}"] == pytest.approx(counted, rel=0.01), part


def describe(world: World) -> tuple[Description, float]:
    step = build_step(world, {"capacity": 1.0})
    step.close()
    return step.describe(), flops_per_token(step.spec.shape, step.moe)


def test_description_of_expert_step(two_ranks: Ranks) -> None:
    description, flops = two_ranks.call(f"{__name__}:describe")[0]
    details = description.details
    assert details["slots"] == 8
    assert details["expert_ffn"] == 64
    assert details["flops_per_rank"] == details["tokens_per_step"] * flops / 2
    assert details["routed_parameters"] == 2 * 8 * 2 * 32 * 64
    assert details["parameters"] > details["routed_parameters"]
