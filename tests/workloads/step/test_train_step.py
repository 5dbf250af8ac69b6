"""The check of a training step detects corrupted steps, and its description has its work."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.mesh.mesh import get_local_tensor
from parbench.workloads.model.optimizer import LEARNING_RATE
from parbench.workloads.probes.peaks import Peak
from parbench.workloads.step import train_step
from parbench.workloads.step.train_step import Microbatch, TrainStep
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import (
    Params,
    build_small_step,
    count_wrong_after_step,
)

BF16: Params = {"precision": "bfloat16"}
SIMULATED: Params = {"compute": "simulated:1ms"}
UP = "layers.1.ffn.up.weight"
Mutant = Callable[[TrainStep, World], None]


def count_wrong(world: World, name: str, params: Params) -> list[int]:
    step = build_small_step(world, name, params)
    counts = [count_wrong_after_step(step) for _ in range(2)]
    step.close()
    return counts


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "fsdp",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("zero1", "tp_sp")),
    ],
)
def test_simulated_gradients_are_averaged(two_ranks: Ranks, name: str) -> None:
    params = {**SIMULATED, "microbatches": 2}
    counts = two_ranks.call(f"{__name__}:count_wrong", name=name, params=params)
    assert counts == [[0, 0], [0, 0]]


def _after_backward(change: Callable[[Tensor], object], name: str = UP) -> Mutant:
    """Return the mutant that changes a gradient after each backward pass."""

    def mutate(step: TrainStep, world: World) -> None:
        run = step.forward_backward

        def forward_backward() -> Tensor | None:
            loss = run()
            gradient = step.model.get_parameter(name).grad
            assert gradient is not None
            change(gradient)
            return loss

        step.forward_backward = forward_backward  # type: ignore[method-assign]

    return mutate


def _drop_gradient(step: TrainStep, world: World) -> None:
    run = step.forward_backward

    def forward_backward() -> Tensor | None:
        loss = run()
        step.model.get_parameter("layers.0.attention.v.weight").grad = None
        return loss

    step.forward_backward = forward_backward  # type: ignore[method-assign]


def _raise_loss_of_rank_1(step: TrainStep, world: World) -> None:
    run = step.forward_backward

    def forward_backward() -> Tensor | None:
        loss = run()
        assert loss is not None
        return loss * (1.001 if world.rank == 1 else 1)

    step.forward_backward = forward_backward  # type: ignore[method-assign]


def _keep_gradients_local(step: TrainStep, world: World) -> None:
    [part] = step.parts.values()
    sync = part.sync_gradients
    setattr(part, "sync_gradients", lambda *, is_synced: sync(is_synced=False))  # noqa: B010


def _forget_partial_gradients(step: TrainStep, world: World) -> None:
    for part in step.parts.values():
        part.partial_parameters.clear()


def _drop_microbatch(step: TrainStep, world: World) -> None:
    del step.microbatches[-1]


def _change_tokens_of_rank_1(step: TrainStep, world: World) -> None:
    if world.rank == 1:
        step.microbatches = [
            Microbatch((tokens + 1) % step.spec.shape.vocabulary, targets)
            for tokens, targets in step.microbatches
        ]


def _predict_same_token(step: TrainStep, world: World) -> None:
    step.microbatches = [Microbatch(tokens, tokens) for tokens, _ in step.microbatches]


MUTANTS: dict[str, Mutant] = {
    "one gradient 0.1 % larger": _after_backward(lambda gradient: gradient.mul_(1.001)),
    "one gradient negated": _after_backward(Tensor.neg_),
    "one gradient in float8": _after_backward(
        lambda gradient: gradient.copy_(gradient.to(torch.float8_e4m3fn).to(gradient.dtype))
    ),
    "one gradient not finite": _after_backward(
        lambda gradient: gradient.fill_(math.nan), "norm.bias"
    ),
    "one gradient missing": _drop_gradient,
    "gradients not reduced": _keep_gradients_local,
    "partial gradients not summed": _forget_partial_gradients,
    "loss of rank 1 0.1 % larger": _raise_loss_of_rank_1,
    "microbatch dropped": _drop_microbatch,
    "other tokens on rank 1": _change_tokens_of_rank_1,
    "targets not shifted": _predict_same_token,
}


def count_wrong_of_mutant(world: World, name: str, params: Params, mutant: str) -> int:
    """Return wrong elements of all ranks for a step that becomes wrong before its check."""
    step = build_small_step(world, name, {"microbatches": 2, **params})
    assert count_wrong_after_step(step) == 0
    step.reset()
    step.step()
    MUTANTS[mutant](step, world)
    if step.spec.is_simulated:
        step.step()  # Its check reads the gradients of the last step.
    wrong = sum(world.gather(step.check()))
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("name", "params", "mutant"),
    [
        ("cp", {}, "one gradient 0.1 % larger"),
        ("ddp", BF16, "one gradient negated"),
        ("ddp", {"reduce_dtype": "bfloat16"}, "one gradient in float8"),
        ("ddp", BF16, "one gradient not finite"),
        ("hsdp", {}, "one gradient missing"),
        ("ddp", {}, "gradients not reduced"),
        ("fsdp", {**SIMULATED, **BF16}, "gradients not reduced"),
        ("tp_sp", {}, "partial gradients not summed"),
        ("ddp", {}, "loss of rank 1 0.1 % larger"),
        ("fsdp", {}, "microbatch dropped"),
        ("tp", {}, "other tokens on rank 1"),
        ("tp_sp", {}, "targets not shifted"),
    ],
)
def test_mutant_is_detected(two_ranks: Ranks, name: str, params: Params, mutant: str) -> None:
    arguments = {"name": name, "params": params, "mutant": mutant}
    wrong, _ = two_ranks.call(f"{__name__}:count_wrong_of_mutant", **arguments)
    assert wrong > 0


def local_weights(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [get_local_tensor(parameter.detach()).clone() for parameter in parameters]


def _update_except(parameters: Sequence[Tensor], update: Callable[[], object]) -> None:
    """Update all parameters except some, which keep their values."""
    before = local_weights(parameters)
    update()
    for parameter, weights in zip(parameters, before, strict=True):
        get_local_tensor(parameter.detach()).copy_(weights)


def _forget_moments(step: TrainStep, world: World, update: Callable[[], object]) -> None:
    update()
    step.optimizer.state.clear()


def _raise_learning_rate(step: TrainStep, world: World, update: Callable[[], object]) -> None:
    for group in step.optimizer.param_groups:
        group["lr"] = 1.1 * LEARNING_RATE
    update()


def _skip_bias(step: TrainStep, world: World, update: Callable[[], object]) -> None:
    _update_except([step.model.get_parameter("layers.1.ffn.up.bias")], update)


def _skip_rank_1(step: TrainStep, world: World, update: Callable[[], object]) -> None:
    _update_except([*step.model.parameters()] if world.rank == 1 else [], update)


UPDATES: dict[str, Callable[[TrainStep, World, Callable[[], object]], None]] = {
    "none": lambda step, world, update: None,
    "moments forgotten": _forget_moments,
    "learning rate 10 % higher": _raise_learning_rate,
    "one bias not updated": _skip_bias,
    "rank 1 not updated": _skip_rank_1,
}


def count_wrong_of_update(world: World, name: str, mutant: str) -> int:
    """Return the wrong elements of a step whose updates are wrong."""
    step = build_small_step(world, name, {})
    update = partial(UPDATES[mutant], step, world, step.optimizer.step)
    step.optimizer.step = update  # type: ignore[method-assign,assignment]
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        *(("ddp", mutant) for mutant in UPDATES),
        ("zero1", "rank 1 not updated"),
        ("fsdp", "rank 1 not updated"),
    ],
)
def test_wrong_update_is_detected(two_ranks: Ranks, name: str, mutant: str) -> None:
    """The gradients of each rank are right for its own weights."""
    counts = two_ranks.call(f"{__name__}:count_wrong_of_update", name=name, mutant=mutant)
    assert max(counts) > 0


def count_wrong_with_noise(world: World) -> int:
    step = build_small_step(world, "ddp", {})

    def add_noise(gradient: Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(gradient.shape, generator=generator)
        gradient += 1e-5 * gradient.abs().max() * noise

    _after_backward(add_noise)(step, world)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


def test_check_ignores_updates_decided_by_noise(two_ranks: Ranks) -> None:
    """AdamW moves a weight by the whole learning rate if its gradient is only noise."""
    assert two_ranks.call(f"{__name__}:count_wrong_with_noise") == [0, 0]


def describe(world: World, name: str, params: Params) -> tuple[Description, int]:
    """Return the description on a device of 1 TFLOP/s, and the number of parameters."""
    step = build_small_step(world, name, params)
    step.close()
    with pytest.MonkeyPatch.context() as patch:
        peak = Peak(flops_per_second=1e12, source="a test")
        patch.setattr(train_step, "find_peak", lambda device, dtype: peak)
        return step.describe(), count_parameters(step.spec.shape)


@pytest.mark.parametrize(("name", "data_ranks"), [("fsdp", 2), ("tp", 1)])
def test_description_reports_work(two_ranks: Ranks, name: str, data_ranks: int) -> None:
    params = {"microbatches": 3, "sequence": 4}
    description, parameters = two_ranks.call(f"{__name__}:describe", name=name, params=params)[
        0
    ]
    attention = 2 * 32 * 32 + 2 * 32 * 16
    weights = 2 * (attention + 2 * 32 * 128) + 32 * 64
    tokens = data_ranks * 2 * 3 * 4  # ranks, microbatch size, microbatches, sequence
    flops = tokens * (6 * weights + 12 * 2 * 32 * 4) / 2
    details = description.details
    assert details["parameters"] == parameters
    assert details["flops_per_rank"] == flops
    amounts = {rate.name: rate.amount for rate in description.work}
    assert details["peak"] == {"flops_per_second": 1e12, "source": "a test"}
    assert amounts == {"tokens_per_second": tokens, "mfu": flops / 1e12}


def test_description_of_simulated_compute_has_no_mfu(two_ranks: Ranks) -> None:
    description, _ = two_ranks.call(f"{__name__}:describe", name="ddp", params=SIMULATED)[0]
    assert [rate.name for rate in description.work] == ["tokens_per_second"]
    assert description.details["peak"] is None
    assert any("simulated compute" in note for note in description.notes)
