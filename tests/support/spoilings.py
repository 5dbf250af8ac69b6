"""Wrong gradients of single tensors in real steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import plain_name
from parbench.workloads.step.layout import local
from parbench.workloads.step.training_step import TrainingStep
from tests.support.training_steps import DEFINITION_BY_NAME, Params, resolve_preset

FACTORS = {"missing": 0.0, "halved": 0.5, "doubled": 2.0, "negated": -1.0}
"""The factor that each corruption multiplies a gradient by."""


def tensors_of(shape: str) -> dict[str, str]:
    """Return one tensor of each kind in a dense model, by the name of the kind."""
    is_gpt = SHAPES[shape].recipe == "gpt"
    tensors = {
        "embedding": "tokens.weight",
        "positions or last norm": "positions.weight" if is_gpt else "norm.weight",
        "attention norm": "layers.1.attention_norm.weight",
    }
    for matrix in ("q", "k", "v", "out"):
        tensors[matrix] = f"layers.1.attention.{matrix}.weight"
    return {
        **tensors,
        "FFN norm": "layers.1.ffn_norm.weight",
        "up or gate": f"layers.1.ffn.{'up' if is_gpt else 'gate'}.weight",
        "down": "layers.1.ffn.down.weight",
        "head": "head.weight",
    }


def build_stepped(world: World, name: str, params: Params, seed: int = 0) -> TrainingStep:
    """Return a step after its first batch."""
    name, params = resolve_preset(name, params)
    definition = DEFINITION_BY_NAME[name]
    step = load_target(definition.target)(replace(world, seed=seed), **definition.whole(params))
    assert isinstance(step, TrainingStep)
    step.reset()
    step.step()
    return step


@contextmanager
def scaled_gradient(
    step: TrainingStep, parameter: Tensor | None, factor: float, after: bool
) -> Iterator[None]:
    """Scale a gradient on this rank before it is reduced, or after; do nothing without one."""
    if parameter is None:
        yield
        return
    if not after:
        hook = parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        yield
        hook.remove()
        return
    forward_backward = step._forward_backward

    def scaled() -> Tensor | None:
        loss = forward_backward()
        assert parameter.grad is not None
        local(parameter.grad).mul_(factor)
        return loss

    step._forward_backward = scaled  # type: ignore[method-assign]
    yield
    step._forward_backward = forward_backward  # type: ignore[method-assign]


def unseen(
    world: World,
    name: str,
    params: Params,
    tensors: Iterable[str],
    spoilings: Iterable[str] = tuple(FACTORS),
    only: int | None = None,
    after: bool = False,
) -> list[str]:
    """Return the corruptions of single gradients whose tensor this rank's check does not name.

    All ranks corrupt their part of a gradient, or the rank ``only``, before ranks reduce it or ``after`` that.
    """
    step = build_stepped(world, name, params)
    assert step.check() == 0, step.differences()
    cache_references(step)
    parameters = {plain_name(key): value for key, value in step.layout.model.named_parameters()}
    missed = []
    for tensor in tensors:
        parameter = parameters.get(tensor) if only in (None, world.rank) else None
        for spoiling in spoilings:
            with scaled_gradient(step, parameter, FACTORS[spoiling], after):
                wrong = step.check()
            if not wrong or not all(tensor in text for text in step.differences()):
                missed.append(f"{tensor} {spoiling}")
    step.close()
    return missed


def cache_references(step: TrainingStep) -> None:
    """Let a step's check compute its references once for constant weights and batches."""
    compute: Callable[..., Any] = step._parity._reference
    references = dict[Any, Any]()

    def reference(weights: Any, batch: Any, dtype: Any) -> Any:
        key = dtype, batch[0].data_ptr(), len(batch)
        if key not in references:
            references[key] = compute(weights, batch, dtype)
        return references[key]

    step._parity._reference = reference  # type: ignore[method-assign]


def wrong_of_right_steps(
    world: World, name: str, params: Params, seeds: Iterable[int]
) -> list[int]:
    """Return the number of wrong elements in the first step of each seed, which is right."""
    counts = []
    for seed in seeds:
        step = build_stepped(world, name, params, seed)
        counts.append(step.check())
        step.close()
    return counts
