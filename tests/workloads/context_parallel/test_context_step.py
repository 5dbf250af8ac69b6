"""Context-parallel steps train as one process does, and their check detects wrong ranks."""

from typing import Any

import pytest

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash
from parbench.workloads.context_parallel.attention_methods import RingAttention
from parbench.workloads.context_parallel.context_methods import CONTEXT_METHODS
from parbench.workloads.model.transformer import Attention
from parbench.workloads.step.train_step import TrainStep
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import (
    Params,
    assert_right,
    build_small_step,
    count_wrong_after_step,
)

MODULE = "tests.workloads.context_parallel.test_context_step"


def test_context_step_matches_one_process(two_ranks: Ranks) -> None:
    for method in CONTEXT_METHODS:
        assert_right(two_ranks, "cp", {"cp_method": method, "layers": 1})
    params = {"cp_method": "zigzag", "recipe": "llama", "checkpointing": "full"}
    assert_right(two_ranks, "cp", params)


@pytest.mark.full
@pytest.mark.parametrize(
    "params",
    [
        {"precision": "bfloat16", "microbatches": 2},
        {"recipe": "llama", "checkpointing": "selective"},
        {"checkpointing": "full"},
    ],
)
def test_context_step_options_match_one_process(two_ranks: Ranks, params: Params) -> None:
    for method in CONTEXT_METHODS:
        assert_right(two_ranks, "cp", {"cp_method": method, **params})


def find_ring(step: TrainStep) -> RingAttention:
    """Return the attention that all layers share."""
    attention = step.model.get_submodule("layers.0.attention")
    assert isinstance(attention, Attention)
    assert isinstance(attention.core, RingAttention)
    return attention.core


class WrongKernel(CpuFlash):
    """Returns results that are slightly too large in one direction."""

    def __init__(self, direction: str) -> None:
        self._direction = direction

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, lse = super().forward(*args)
        if self._direction == "forward":
            out = out * 1.001
        return out, lse

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        dq, dk, dv = super().backward(*args)
        if self._direction == "backward":
            dk = dk * 1.01
        return dq, dk, dv


def count_wrong_of_kernel(world: World, direction: str) -> int:
    """Return the count of a check where the kernel of rank 1 is wrong."""
    step = build_small_step(world, "cp", {"cp_method": "zigzag"})
    attention = find_ring(step)
    if world.rank == 1:
        attention.kernel = WrongKernel(direction)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_kernel_of_one_rank_is_detected(two_ranks: Ranks, direction: str) -> None:
    assert min(two_ranks.call(f"{MODULE}:count_wrong_of_kernel", direction=direction)) > 0


def count_wrong_of_positions(world: World, recipe: str) -> int:
    """Return the count of a check where tokens have the positions of a contiguous sequence."""
    step = build_small_step(world, "cp", {"cp_method": "zigzag", "recipe": recipe})
    model: Any = step.model
    model.positions = None
    for layer in model.layers.values():
        if layer.attention.rotate is not None:
            layer.attention.rotate = layer.attention.rotate.func
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_wrong_positions_are_detected(two_ranks: Ranks, recipe: str) -> None:
    assert min(two_ranks.call(f"{MODULE}:count_wrong_of_positions", recipe=recipe)) > 0
