"""Wrong gradients of single tensors in real steps."""

from collections.abc import Callable, Iterable
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
"""What each spoiling makes of a gradient."""


def tensors_of(shape: str) -> dict[str, str]:
    """Return a tensor of each group of a dense model."""
    gpt = SHAPES[shape].recipe == "gpt"
    of_layer = {
        "attention norm": "attention_norm",
        **{group: f"attention.{group}" for group in ("q", "k", "v", "out")},
        "FFN norm": "ffn_norm",
        "up or gate": "ffn.up" if gpt else "ffn.gate",
        "down": "ffn.down",
    }
    return {
        "embedding": "tokens.weight",
        "positions or last norm": "positions.weight" if gpt else "norm.weight",
        **{group: f"layers.1.{name}.weight" for group, name in of_layer.items()},
        "head": "head.weight",
    }


def prepared(world: World, name: str, params: Params, seed: int = 0) -> TrainingStep:
    name, params = resolve_preset(name, params)
    definition = DEFINITION_BY_NAME[name]
    step = load_target(definition.target)(replace(world, seed=seed), **definition.whole(params))
    assert isinstance(step, TrainingStep)
    step.reset()
    step.step()
    return step


def unseen(
    world: World,
    name: str,
    params: Params,
    tensors: Iterable[str],
    spoilings: Iterable[str] = tuple(FACTORS),
    only: int | None = None,
    after: bool = False,
) -> list[str]:
    """Return the spoilings of single gradients after which this rank names no such tensor.

    All ranks spoil what they hold of a gradient, or the rank ``only``: before ranks sum it, or ``after`` that.
    """
    step = prepared(world, name, params)
    assert step.check() == 0, step.differences()
    remember_references(step)
    held, right, found = (
        {plain_name(n): p for n, p in step.layout.model.named_parameters()},
        step._forward_backward,
        [],
    )
    for tensor in tensors:
        for spoiling in spoilings:
            factor, parameter = (
                FACTORS[spoiling],
                held.get(tensor) if only in (None, world.rank) else None,
            )

            def scaled(gradient: Tensor, factor: float = factor) -> Tensor:
                return gradient * factor

            def spoilt(parameter: Any = parameter, factor: float = factor) -> Tensor | None:
                loss = right()
                if parameter is not None:
                    local(parameter.grad).mul_(factor)
                return loss

            hook = None
            if after:
                step._forward_backward = spoilt  # type: ignore[method-assign]
            elif parameter is not None:
                hook = parameter.register_hook(scaled)  # type: ignore[no-untyped-call]
            wrong = step.check()
            if not (wrong and all(tensor in words for words in step.differences())):
                found.append(f"{tensor} {spoiling}")
            if hook is not None:
                hook.remove()
    step.close()
    return found


def remember_references(step: TrainingStep) -> None:
    """Let a step's gate compute its references once, for weights and a batch that stay as they are."""
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
    """Return how much is called wrong of the first step of each seed, which is right."""
    found = []
    for seed in seeds:
        step = prepared(world, name, params, seed)
        found.append(step.check())
        step.close()
    return found
