"""Context-parallel steps train as one process does, and their check detects wrong ranks."""

from typing import Any

import pytest

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash, Timed
from parbench.workloads.context_parallel.attention_methods import RingAttention
from parbench.workloads.context_parallel.context_case import METHODS
from parbench.workloads.context_parallel.context_step import ContextStep
from tests.support.ranks import Ranks
from tests.support.training_steps import (
    Params,
    build_small_step,
    count_wrong_after_step,
    measure_wrong_and_bytes,
)

MODULE = "tests.workloads.context_parallel.test_context_step"
TIMED: Params = {"compute": "timed:1ms", "attention": "timed:2ms"}


def build_step(world: World, params: Params) -> ContextStep:
    step = build_small_step(world, "cp", params)
    assert isinstance(step, ContextStep)
    return step


def measure_steps(world: World, cases: list[Params]) -> list[Any]:
    return [measure_wrong_and_bytes(world, "cp", params) for params in cases]


def assert_right(ranks: Ranks, cases: list[Params]) -> None:
    for results in ranks.call(f"{MODULE}:measure_steps", cases=cases):
        for params, (wrong, sent, expected) in zip(cases, results, strict=True):
            assert wrong == [0, 0], params
            assert sent == {axis: size for axis, size in expected.items() if size}, params
            assert set(sent) > {"dp"}, params


def test_context_step_matches_one_process(two_ranks: Ranks) -> None:
    cases: list[Params] = [{"method": method, "layers": 1} for method in METHODS]
    cases.append(
        {"method": "zigzag", "mask": "full", "recipe": "llama", "checkpointing": "full"}
    )
    assert_right(two_ranks, cases)


@pytest.mark.full
@pytest.mark.parametrize(
    "params",
    [
        {"precision": "bfloat16", "accumulation": 2},
        {"recipe": "llama", "checkpointing": "selective"},
        {"checkpointing": "full"},
    ],
)
def test_context_step_options_match_one_process(two_ranks: Ranks, params: Params) -> None:
    assert_right(two_ranks, [{"method": method, **params} for method in METHODS])


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
    step = build_step(world, {"method": "zigzag"})
    core = step._core
    assert isinstance(core, RingAttention)
    if world.rank == 1:
        core.kernel = WrongKernel(direction)
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_kernel_of_one_rank_is_detected(two_ranks: Ranks, direction: str) -> None:
    assert min(two_ranks.call(f"{MODULE}:count_wrong_of_kernel", direction=direction)) > 0


def count_wrong_of_positions(world: World, recipe: str) -> int:
    """Return the count of a check where tokens have the positions of a contiguous sequence."""
    step = build_step(world, {"method": "zigzag", "recipe": recipe})
    model: Any = step.layout.model
    model.places = None
    for layer in model.layers:
        if layer.attention.rotate is not None:
            layer.attention.rotate = layer.attention.rotate.func
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_wrong_positions_are_detected(two_ranks: Ranks, recipe: str) -> None:
    assert min(two_ranks.call(f"{MODULE}:count_wrong_of_positions", recipe=recipe)) > 0


def measure_timed_kernel(world: World) -> tuple[float, int]:
    """Return the seconds of a pair, and the count of a check after a step."""
    step = build_step(world, {"method": "ring", **TIMED})
    core = step._core
    assert isinstance(core, RingAttention)
    kernel = core.kernel
    assert isinstance(kernel, Timed)
    wrong = count_wrong_after_step(step)
    step.close()
    return kernel._seconds_per_pair, wrong


def test_timed_attention_takes_its_time_on_the_mean_rank(two_ranks: Ranks) -> None:
    microbatch, heads = 2, 4
    causal_pairs = 16 * 17 / 2
    pairs_per_rank = microbatch * heads * causal_pairs / 2
    for seconds_per_pair, wrong in two_ranks.call(f"{MODULE}:measure_timed_kernel"):
        assert seconds_per_pair * pairs_per_rank == pytest.approx(2e-3)
        assert wrong == 0
