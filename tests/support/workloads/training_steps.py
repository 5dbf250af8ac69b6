"""Small training steps of every parallelism, their checks, and mutants of them."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.rank.runner import load_target
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.communication_pattern import list_calls
from parbench.workloads.expert_parallel.expert_traffic import compute_expert_bytes
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import Transformer, initialize, make_meta_model
from parbench.workloads.step.sent_bytes import NoCommMode, make_fake_groups, record_calls
from parbench.workloads.step.train_step import Microbatch, TrainStep
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
    for call in list_calls(step.spec.rank_view(world.rank)):
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
        assert sent == pytest.approx(expected, rel=1e-12)


class LocalReductions(NoCommMode):  # type: ignore[no-untyped-call]
    """While entered, a reduction behaves as if every rank had the values of this rank."""

    def handle(self, func: Any, group: dist.ProcessGroup, args: Any, kwargs: Any) -> Any:
        name = func.name()
        if "reduce" not in name:
            return func(*args, **kwargs)
        result = super().handle(func, group, args, kwargs)
        if "reduce_scatter" in name:
            is_functional = name.startswith("_c10d_functional")
            output = result if is_functional else args[0]
            source = args[0] if is_functional else args[1]
            output.copy_(source.chunk(group.size())[group.rank()] * group.size())
        elif isinstance(args[0], list):
            for tensor in args[0]:
                tensor *= group.size()
        return result


def count_wrong_without_reduction(world: World, name: str, params: Params) -> tuple[int, int]:
    """Return wrong elements if gradients stay local in the check only, and in every step."""
    counts = []
    for only_check in (True, False):
        step = build_small_step(world, name, params)
        step.reset()
        if only_check:
            step.step()
            assert step.check() == 0
        fake_groups = make_fake_groups(step.mesh.groups)
        with LocalReductions(fake_groups):
            step.step()
            counts.append(step.check())
        for group in fake_groups.values():
            dist.destroy_process_group(group)
        step.close()
    return counts[0], counts[1]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.001


def _scale_all_gradients(step: TrainStep, world: World) -> None:
    def scale(module: nn.Module, args: object, output: Tensor) -> Any:
        return _ScaleGradient.apply(output)  # type: ignore[no-untyped-call]

    step.model.get_submodule("head").register_forward_hook(scale)


def _change_after_backward(step: TrainStep, change: Callable[[nn.Module], object]) -> None:
    """Let `change` see the model with its gradients after each backward pass."""
    run = step.forward_backward

    def forward_backward() -> Tensor | None:
        loss = run()
        change(step.model)
        return loss

    step.forward_backward = forward_backward  # type: ignore[method-assign]


def _scale_one_gradient(step: TrainStep, world: World) -> None:
    def scale(model: nn.Module) -> None:
        gradient = model.get_parameter("layers.1.ffn.up.weight").grad
        assert gradient is not None
        gradient *= 1.001

    _change_after_backward(step, scale)


def _drop_one_gradient(step: TrainStep, world: World) -> None:
    def drop(model: nn.Module) -> None:
        model.get_parameter("layers.0.attention.v.weight").grad = None

    _change_after_backward(step, drop)


def _drop_microbatch(step: TrainStep, world: World) -> None:
    del step.microbatches[-1]


def _repeat_microbatch(step: TrainStep, world: World) -> None:
    step.microbatches[1] = step.microbatches[0]


def _change_tokens_of_rank_1(step: TrainStep, world: World) -> None:
    if world.rank == 1:
        vocabulary = step.spec.shape.vocabulary
        step.microbatches = [
            Microbatch((tokens + 1) % vocabulary, targets)
            for tokens, targets in step.microbatches
        ]


def _predict_same_token(step: TrainStep, world: World) -> None:
    step.microbatches = [Microbatch(tokens, tokens) for tokens, _ in step.microbatches]


MUTANTS: dict[str, Callable[[TrainStep, World], None]] = {
    "every gradient 0.1 % larger": _scale_all_gradients,
    "one gradient 0.1 % larger": _scale_one_gradient,
    "microbatch dropped": _drop_microbatch,
    "microbatch repeated": _repeat_microbatch,
    "other tokens on rank 1": _change_tokens_of_rank_1,
    "targets not shifted": _predict_same_token,
    "one gradient missing": _drop_one_gradient,
}
"""Wrong training steps with at least two microbatches."""
