"""Small training steps of every parallelism, and their checks."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from parbench.bench.plan.cases import load_target
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.communication_pattern import list_calls
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import Transformer, initialize, make_meta_model
from parbench.workloads.probes.sent_bytes import record_calls
from parbench.workloads.step.expert_traffic import compute_expert_bytes
from parbench.workloads.step.train_step import TrainStep
from tests.support.ranks import Ranks

Params = dict[str, Any]

DEFINITION_BY_NAME = {
    definition.name.removeprefix("workload."): definition for definition in DEFINITIONS
}
SMALL_PARAMS = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "sequence": 16,
    "vocabulary": 64,
    "microbatch": 2,
}


def build_model(
    shape: Shape, seed: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return the full model with its first weights."""
    model = make_meta_model(shape, dtype)
    initialize(model, seed, device)
    return model


def build_small_step(world: World, name: str, params: Params) -> TrainStep:
    """Return a small step; parameters that it does not have are left out of the small ones."""
    definition = DEFINITION_BY_NAME[name]
    step = load_target(definition.target)(
        world, **definition.complete({**SMALL_PARAMS, **params})
    )
    assert isinstance(step, TrainStep)
    return step


def build_trained_step(world: World, name: str, **params: Any) -> TrainStep:
    """Return a step after two batches, because DDP rebuilds its buckets after the first."""
    step = build_small_step(world, name, params)
    for _ in range(2):
        step.reset()
        step.step()
    return step


def count_wrong_after_step(step: Any) -> int:
    """Return the number of wrong elements after a step on the next batch."""
    step.reset()
    step.step()
    return int(step.check())


def metric_value(explanation: Explanation, name: str) -> float:
    value = explanation.metrics[name].value
    assert value is not None, name
    return value


def measure_sent_bytes(step: TrainStep) -> dict[str, float]:
    """Return the bytes that this rank sends in a step, by axis and operation."""
    sent: defaultdict[str, float] = defaultdict(float)
    for call in record_calls(step.step, step.mesh.groups):
        sent[f"{call.axis}.{call.op}"] += call.sent
    return {call: num_bytes for call, num_bytes in sent.items() if num_bytes}


def compute_expected_bytes(step: TrainStep, world: World) -> dict[str, float]:
    """Return the analytical bytes of this rank; those of experts follow from the last step."""
    expected: defaultdict[str, float] = defaultdict(float)
    for call in list_calls(step.spec.make_rank_view(world.rank)):
        if call.axis not in ("ep", "etp"):
            expected[f"{call.axis}.{call.op}"] += call.sent
    if step.spec.moe is not None:
        expected |= compute_expert_bytes(world, step.spec, step.moe_layers)
    return {call: num_bytes for call, num_bytes in expected.items() if num_bytes}


def sum_experts(sent: dict[str, float]) -> dict[str, float]:
    """Return bytes with one entry for all operations of each axis of experts."""
    summed: defaultdict[str, float] = defaultdict(float)
    for call, num_bytes in sent.items():
        axis = call.partition(".")[0]
        summed[axis if axis in ("ep", "etp") else call] += num_bytes
    return dict(summed)


def measure_wrong_and_bytes(
    world: World, name: str, params: Params
) -> tuple[list[int], dict[str, float], dict[str, float]]:
    """Return wrong elements of two steps, and the sent and analytical bytes of a third."""
    step = build_small_step(world, name, params)
    wrong = [count_wrong_after_step(step) for _ in range(2)]
    step.reset()
    sent = sum_experts(measure_sent_bytes(step))
    expected = compute_expected_bytes(step, world)
    step.close()
    return wrong, sent, expected


def assert_right(ranks: Ranks, name: str, params: Params) -> None:
    """Two steps are right, and each rank sends the analytical bytes in a third."""
    target = "tests.support.workloads.training_steps:measure_wrong_and_bytes"
    for wrong, sent, expected in ranks.call(target, name=name, params=params):
        assert wrong == [0, 0]
        assert sent == pytest.approx(expected, rel=1e-12), f"{sent} instead of {expected}"
