"""Small training steps for tests of every parallelism: what ranks do with them, and what can be wrong with them."""

import importlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.step.sent_bytes import Silenced, counted, fake_twins, group_of
from parbench.workloads.step.training_step import TrainingStep

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


def resolve_preset(name: str, params: Params) -> tuple[str, Params]:
    """Return the name of a step and its parameters. ZeRO-2 and ZeRO-3 are FSDP without and with resharding."""
    if name in ("zero2", "zero3"):
        return "fsdp", {"reshard": name == "zero3", **params}
    return name, params


def build_small_step(world: World, name: str, params: Params) -> TrainingStep:
    name, params = resolve_preset(name, params)
    definition = DEFINITION_BY_NAME[name]
    step = load_target(definition.target)(world, **definition.whole({**SMALL_PARAMS, **params}))
    assert isinstance(step, TrainingStep)
    return step


def build_trained_step(world: World, name: str, **params: Any) -> TrainingStep:
    """Return a step that was taken twice: DDP makes its buckets anew in between."""
    step = build_small_step(world, name, params)
    for _ in range(2):
        step.reset()
        step.step()
    return step


def call_for_each(
    world: World, function: str, cases: dict[str, tuple[str, Params]], **arguments: Any
) -> dict[str, Any]:
    """Return what ``module:function`` finds of each case: one visit to the ranks for all."""
    module, _, name = function.partition(":")
    act = getattr(importlib.import_module(module), name)
    return {label: act(world, *case, **arguments) for label, case in cases.items()}


def count_wrong_after_step(step: Any) -> int:
    """Return how much is wrong after a step on another batch."""
    step.reset()
    step.step()
    return int(step.check())


def count_wrong_after_steps(world: World, name: str, params: Params, steps: int = 3) -> list[int]:
    step = build_small_step(world, name, params)
    wrong = [count_wrong_after_step(step) for _ in range(steps)]
    step.close()
    return wrong


def measure_sent_bytes(step: TrainingStep) -> dict[str, float]:
    sent: defaultdict[str, float] = defaultdict(float)
    for call in counted(step.step, step.layout.axes):
        sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)
    return {axis: value for axis, value in sent.items() if value}


def measure_wrong_and_bytes(
    world: World, name: str, params: Params
) -> tuple[list[int], dict[str, float], dict[str, float]]:
    """Return how much is wrong after each of two steps, what another sends by axis, and the closed form's of it."""
    step = build_small_step(world, name, params)
    wrong = [count_wrong_after_step(step) for _ in range(2)]
    sent = measure_sent_bytes(step)
    step.close()
    return wrong, sent, dict(step.expected_bytes())


class Local(Silenced):  # type: ignore[no-untyped-call]
    """While entered, a reduction gives what it would where every rank had this rank's own: nothing is exchanged."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        group = group_of(args) if "c10d" in name and "reduce" in name else None
        if group is None:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "reduce_scatter" in name:
            functional = name.startswith("_c10d_functional")
            given, mine = (args[0], result) if functional else (args[1], args[0])
            mine.copy_(given.chunk(group.size())[group.rank()] * group.size())
        else:
            for reduced in args[0] if isinstance(args[0], list) else []:
                reduced *= group.size()
        return result


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.001


def _every_gradient_is_a_thousandth_larger(step: TrainingStep, world: World) -> None:
    def scale(module: nn.Module, args: object, output: Tensor) -> Any:
        return _Scale.apply(output)  # type: ignore[no-untyped-call]

    step.layout.model.get_submodule("head").register_forward_hook(scale)


def _one_parameters_gradient_is_a_thousandth_larger(step: TrainingStep, world: World) -> None:
    right = step._forward_backward

    def forward_backward() -> Tensor | None:
        loss = right()
        gradient = step.layout.model.get_parameter("layers.1.ffn.up.weight").grad
        assert gradient is not None
        gradient *= 1.001
        return loss

    step._forward_backward = forward_backward  # type: ignore[method-assign]


def _a_microbatch_is_dropped(step: TrainingStep, world: World) -> None:
    step._mine = step._mine[:-1]


def _a_microbatch_is_taken_twice(step: TrainingStep, world: World) -> None:
    step._mine = (step._mine[0], *step._mine[:-1])


def _one_rank_has_other_tokens(step: TrainingStep, world: World) -> None:
    if world.rank == 1:
        step._mine = tuple((tokens + 1) % step.spec.shape.vocabulary for tokens in step._mine)


def _targets_are_not_moved(step: TrainingStep, world: World) -> None:
    step._mine = tuple(
        tokens[:, :-1].repeat_interleave(2, dim=1)[:, : tokens.shape[1]] for tokens in step._mine
    )


def _a_missing_gradient(step: TrainingStep, world: World) -> None:
    right = step._forward_backward

    def forward_backward() -> Tensor | None:
        loss = right()
        step.layout.model.get_parameter("layers.0.attention.v.weight").grad = None
        return loss

    step._forward_backward = forward_backward  # type: ignore[method-assign]


def _every_loss_is_a_thousandth_larger(step: TrainingStep, world: World) -> None:
    right = step._forward_backward

    def forward_backward() -> Tensor | None:
        loss = right()
        assert loss is not None
        return loss * 1.001

    step._forward_backward = forward_backward  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[TrainingStep, World], None]] = {
    "every gradient is a thousandth larger": _every_gradient_is_a_thousandth_larger,
    "one parameter's gradient is a thousandth larger": _one_parameters_gradient_is_a_thousandth_larger,
    "a microbatch is dropped": _a_microbatch_is_dropped,
    "a microbatch is taken twice": _a_microbatch_is_taken_twice,
    "one rank has other tokens": _one_rank_has_other_tokens,
    "targets are not moved": _targets_are_not_moved,
    "a gradient is missing": _a_missing_gradient,
    "every loss is a thousandth larger": _every_loss_is_a_thousandth_larger,
}


def count_wrong_without_reduction(world: World, name: str, params: Params) -> tuple[int, int]:
    """Return how much is wrong where gradients stay local in the check alone, and in steps too."""
    found = []
    for late in (True, False):
        step = build_small_step(world, name, params)
        step.reset()
        if late:
            step.step()
            assert step.check() == 0
        twins = fake_twins(step.layout.axes)
        with Local(twins):
            step.step()
            found.append(step.check())
        for twin in twins.values():
            dist.destroy_process_group(twin)
        step.close()
    return found[0], found[1]
