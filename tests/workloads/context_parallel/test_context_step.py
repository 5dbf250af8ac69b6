"""Steps of every method train as one process would, send what the closed form says, and refuse what they cannot do."""

from typing import Any

import pytest
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash, Grads, Timed
from parbench.workloads.context_parallel.attention_methods import RingAttention
from parbench.workloads.context_parallel.context_step import ContextStep
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error
from tests.support.training_steps import (
    Params,
    build_small_step,
    count_wrong_without_reduction,
    measure_wrong_and_bytes,
)

METHODS = ["ring", "striped", "zigzag", "allgather_kv", "ulysses", "usp"]
NARROW: Params = {"precision": "bfloat16", "accumulation": 2}
WAITS: Params = {"compute": "timed:1ms", "attention": "timed:2ms"}


def step_of(world: World, params: Params) -> ContextStep:
    step = build_small_step(world, "cp", params)
    assert isinstance(step, ContextStep)
    return step


def wrong_after_a_step(step: ContextStep) -> int:
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


def wrong_in(world: World, variants: list[Params]) -> list[Any]:
    """Return the variants whose steps are wrong, or send other bytes by axis than the closed form says."""
    found = []
    for variant in variants:
        wrong, sent, expected = measure_wrong_and_bytes(world, "cp", variant)
        if (
            wrong != [0, 0]
            or sent != {axis: n for axis, n in expected.items() if n}
            or not set(sent) > {"dp"}
        ):
            found.append((variant, wrong, sent, expected))
    return found


def test_two_ranks_train_as_one_process_would(two_ranks: Ranks) -> None:
    variants: list[Params] = [{"method": method, "recipe": "llama"} for method in METHODS]
    variants += [{"method": method, **NARROW} for method in ("ring", "allgather_kv", "usp")]
    variants += [{"method": "ring", "checkpointing": "full"}, {"method": "zigzag", "mask": "full"}]
    variants.append({"method": "ulysses", "checkpointing": "selective", "recipe": "llama"})
    assert two_ranks.call(
        "tests.workloads.context_parallel.test_context_step:wrong_in", variants=variants
    ) == [[], []]


class Wrong(CpuFlash):
    def __init__(self, direction: str) -> None:
        self._direction = direction

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, causal)
        return (out * 1.001, lse) if self._direction == "forward" else (out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        dq, dk, dv = super().backward(dout, q, k, v, out, lse, causal)
        return (dq, dk * 1.01, dv) if self._direction == "backward" else (dq, dk, dv)


def seen_by_the_gate(world: World) -> dict[str, int]:
    """Return what the gate finds where rank 1's kernel is wrong, and where tokens do not know where they stand."""
    found = {}
    for direction in ("forward", "backward"):
        step = step_of(world, {"method": "zigzag"})
        core = step._core
        assert isinstance(core, RingAttention)
        if world.rank == 1:
            core.kernel = Wrong(direction)
        found[direction] = wrong_after_a_step(step)
    for recipe in ("gpt", "llama"):
        step = step_of(world, {"method": "zigzag", "recipe": recipe})
        model: Any = step.layout.model
        model.places = None
        for layer in model.layers:
            if layer.attention.rotate is not None:
                layer.attention.rotate = layer.attention.rotate.func
        found[recipe] = wrong_after_a_step(step)
    return found


def test_the_gate_sees_one_ranks_wrong_kernel_and_tokens_at_wrong_places(two_ranks: Ranks) -> None:
    for found in two_ranks.call(
        "tests.workloads.context_parallel.test_context_step:seen_by_the_gate"
    ):
        assert min(found.values()) > 0, found


def timed_kernel(world: World) -> tuple[float, int, bool]:
    """Return the seconds of a pair, what the gate finds after a step, and whether blocks owe other waits nothing."""
    step = step_of(world, {"method": "ring", **WAITS})
    assert isinstance(step._core, RingAttention)
    kernel = step._core.kernel
    assert isinstance(kernel, Timed)
    return kernel._seconds_per_pair, wrong_after_a_step(step), kernel._waiter is not step._waiter


def test_timed_attention_takes_its_time_on_the_mean_rank(two_ranks: Ranks) -> None:
    for seconds, *right in two_ranks.call(
        "tests.workloads.context_parallel.test_context_step:timed_kernel"
    ):
        pairs = 2 * 4 * 16 * 17 / 2
        assert seconds * pairs / 2 == pytest.approx(2e-3)
        assert right == [0, True]


def wrong_where_all_stays_local(world: World, method: str) -> tuple[int, int]:
    return count_wrong_without_reduction(world, "cp", {"method": method, **WAITS})


def test_timed_gradients_that_are_never_averaged_are_seen(two_ranks: Ranks) -> None:
    for method in ("zigzag", "ulysses"):
        late, early = zip(
            *two_ranks.call(
                "tests.workloads.context_parallel.test_context_step:wrong_where_all_stays_local",
                method=method,
            ),
            strict=True,
        )
        assert min(max(late), max(early)) > 0, method


def error_of(world: World, params: Params) -> str:
    return usage_error(step_of, world, params)


def test_the_target_refuses_in_the_words_of_the_case(two_ranks: Ranks) -> None:
    refused: dict[str, Params] = {
        "sequence(18) % (2 * cp(2)) != 0: zigzag gives each rank two chunks": {
            "method": "zigzag",
            "sequence": 18,
        },
        "heads(1) % ulysses(2) != 0": {"method": "ulysses", "heads": 1, "kv_heads": 1},
        "attention = timed:5ms is not allowed with compute = real": {"attention": "timed:5ms"},
    }
    for told, params in refused.items():
        for found in two_ranks.call(
            "tests.workloads.context_parallel.test_context_step:error_of", params=params
        ):
            assert found.startswith(told)


def described(
    world: World, cases: list[Params]
) -> list[tuple[list[str], dict[str, Any], tuple[str, ...]]]:
    found = []
    for params in cases:
        step = step_of(world, params)
        found.append((list(step.layout.axes), step.describe().details, step.describe().notes))
        step.close()
    return found


def test_the_row_says_how_sequences_lie_and_what_is_sent(
    two_ranks: Ranks, four_ranks: Ranks
) -> None:
    cases: list[Params] = [{"method": "ring"}, {"method": "usp"}]
    found = four_ranks.call(
        "tests.workloads.context_parallel.test_context_step:described", cases=cases
    )[0]
    for (there, details, notes), axes in zip(
        found, (["cp", "dp"], ["ulysses", "ring", "dp"]), strict=True
    ):
        assert there == axes
        assert details["tokens_per_rank"] == 4
        assert set(details["attention_bytes"]["forward"]) == set(axes[:-1])
        assert details["crossover_ranks"] == 3  # twice as many heads as keys have
        assert details["balance_limit"] == (1 if "ring" in axes else 4 / 7)
        assert (details["kernel"], notes) == ("flash_cpu", ())
    full: Params = {"method": "zigzag", "mask": "full", **WAITS}
    [[(_, details, notes)], _] = two_ranks.call(
        "tests.workloads.context_parallel.test_context_step:described", cases=[full]
    )
    assert (details["balance_limit"], details["kernel"]) == (None, "timed")
    assert any(note.startswith("attention timed:2ms: ") for note in notes)
