"""Training steps compute what one process does, send the analytical bytes, and fail if corrupted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.shapes import Shape
from parbench.workloads.step.layout import local
from parbench.workloads.step.training_step import TrainingStep
from tests.support.ranks import Ranks
from tests.support.training_steps import MUTANTS, Params, build_small_step

Cases = dict[str, tuple[str, Params]]

TWO_RANKS: Cases = {
    **{name: (name, {}) for name in ("ddp", "zero1", "zero2", "zero3", "tp", "tp_sp")},
    "hsdp, shard=2": ("hsdp", {}),
    "hsdp, shard=1": ("hsdp", {"shard": 1}),
    "tp_fsdp, tp=2": ("tp_fsdp", {}),
    "tp_fsdp, tp=1": ("tp_fsdp", {"tp": 1}),
}
FOUR_RANKS: Cases = {
    **{name: (name, {}) for name in ("ddp", "zero1", "zero2", "zero3", "hsdp", "tp_fsdp")},
    **{name: (name, {"kv_heads": 4}) for name in ("tp", "tp_sp")},
    "tp_fsdp, tp=4": ("tp_fsdp", {"tp": 4, "kv_heads": 4}),
}
UNEVEN: Params = {"hidden": 40, "ffn": 44, "vocabulary": 61}


def select(*labels: str, cases: Cases = TWO_RANKS, **params: Any) -> Cases:
    """Return the named cases, or all, with additional parameters."""
    selected = {label: cases[label] for label in labels or cases}
    return {label: (name, {**own, **params}) for label, (name, own) in selected.items()}


def call_each(ranks: Ranks, function: str, cases: Cases, **arguments: Any) -> list[dict[str, Any]]:
    """Return, by rank, the result of the function for each case."""
    return ranks.call(
        "tests.support.training_steps:call_for_each", function=function, cases=cases, **arguments
    )


def assert_right(ranks: Ranks, cases: Cases) -> None:
    """Two steps are right and a third sends the analytical bytes."""
    for by_case in call_each(ranks, "tests.support.training_steps:measure_wrong_and_bytes", cases):
        for label, (wrong, sent, expected) in by_case.items():
            assert wrong == [0, 0], label
            if label == "zero1":
                continue  # its note states the bytes that it sends in addition
            expected = {axis: num_bytes for axis, num_bytes in expected.items() if num_bytes}
            assert sent == pytest.approx(expected, rel=1e-12), label
            assert sent, label


def test_steps_match_one_process(two_ranks: Ranks) -> None:
    """FSDP pads the embedding and the head of an odd vocabulary."""
    assert_right(two_ranks, select(recipe="llama", accumulation=2, vocabulary=61))


def test_checkpointed_steps_match_one_process(two_ranks: Ranks) -> None:
    cases = select("zero3", checkpointing="full", precision="bfloat16")
    cases |= select("tp_sp", checkpointing="selective", precision="bfloat16")
    for by_case in call_each(
        two_ranks, "tests.support.training_steps:count_wrong_after_steps", cases, steps=2
    ):
        assert by_case == {"zero3": [0, 0], "tp_sp": [0, 0]}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_recipes_match_one_process(two_ranks: Ranks, recipe: str) -> None:
    assert_right(two_ranks, select(recipe=recipe, precision="bfloat16", accumulation=2))
    # Split layers compute a part of their sums again, so that they send other bytes.
    data_parallel = [label for label in TWO_RANKS if not label.startswith("tp")]
    assert_right(two_ranks, select(*data_parallel, recipe=recipe, checkpointing="full"))


def test_two_axes_match_one_process(four_ranks: Ranks) -> None:
    assert_right(four_ranks, select("hsdp", "tp_fsdp", cases=FOUR_RANKS, **UNEVEN))


@pytest.mark.full
def test_four_ranks_match_one_process(four_ranks: Ranks) -> None:
    assert_right(four_ranks, select(cases=FOUR_RANKS, **UNEVEN))
    params: Params = {"recipe": "llama", "precision": "bfloat16", "accumulation": 2}
    assert_right(four_ranks, select(cases=FOUR_RANKS, **UNEVEN, **params))


@pytest.mark.full
def test_timed_compute_averages_fills(two_ranks: Ranks) -> None:
    cases = select(compute="timed:1ms", accumulation=2)
    for by_case in call_each(
        two_ranks, "tests.support.training_steps:count_wrong_after_steps", cases, steps=2
    ):
        assert by_case == {label: [0, 0] for label in cases}


def wrong_of_mutant(world: World, name: str, params: Params, mutant: str) -> tuple[int, int]:
    """Return the counts of a check before and after the mutation."""
    step = build_small_step(world, name, {"accumulation": 2, **params})
    step.reset()
    step.step()
    right = step.check()
    step.reset()
    step.step()
    MUTANTS[mutant](step, world)
    wrong = step.check()
    step.close()
    return right, wrong


def test_gradient_mutants_detected(two_ranks: Ranks) -> None:
    mutants = list(MUTANTS)
    assert len(mutants) <= len(TWO_RANKS)
    for number, (label, (name, params)) in enumerate(TWO_RANKS.items()):
        arguments = {"name": name, "params": params, "mutant": mutants[number % len(mutants)]}
        first, second = two_ranks.call(
            "tests.workloads.step.test_training:wrong_of_mutant", **arguments
        )
        assert first[0] == second[0] == 0, label
        assert max(first[1], second[1]) > 0, (label, arguments["mutant"])


@pytest.mark.full
def test_unreduced_gradients_detected(two_ranks: Ranks) -> None:
    cases = select("ddp", "zero3", "hsdp, shard=1", "tp_sp")
    cases["timed"] = ("fsdp", {"compute": "timed:1ms", "precision": "bfloat16", "accumulation": 3})
    by_rank = call_each(
        two_ranks, "tests.support.training_steps:count_wrong_without_reduction", cases
    )
    for label in cases:
        first, second = (by_case[label] for by_case in by_rank)
        assert max(first[0], second[0]) > 0, (label, "in the check")
        assert max(first[1], second[1]) > 0, (label, "in each step")


def local_weights(model: torch.nn.Module) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def skip_update_of_rank_1(step: TrainingStep, world: World) -> None:
    optimizer_step = step.layout.optimizer.step

    def update(closure: Any = None) -> None:
        before = local_weights(step.layout.model)
        optimizer_step()
        if world.rank == 1:
            for parameter, weights in zip(step.layout.model.parameters(), before, strict=True):
                local(parameter.detach()).copy_(weights)

    step.layout.optimizer.step = update  # type: ignore[method-assign,assignment]


def raise_learning_rate(step: TrainingStep, world: World) -> None:
    for group in step.layout.optimizer.param_groups:
        group["lr"] *= 1.1


def move_weight_of_rank_1(step: TrainingStep, world: World) -> None:
    if world.rank == 1:
        weight = step.layout.model.get_parameter("layers.0.ffn.down.weight")
        local(weight.detach())[0, 0] += 0.01


CORRUPTIONS: dict[str, Callable[[TrainingStep, World], None]] = {
    "zero1": skip_update_of_rank_1,
    "zero2": skip_update_of_rank_1,
    "tp_sp": raise_learning_rate,
    "zero3": move_weight_of_rank_1,
}


def wrong_of_update(world: World, name: str) -> int:
    step = build_small_step(world, name, {})
    CORRUPTIONS[name](step, world)
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_wrong_updates_detected(two_ranks: Ranks, name: str) -> None:
    """The gradients of each rank are right for its own weights."""
    assert max(two_ranks.call("tests.workloads.step.test_training:wrong_of_update", name=name)) > 0


def check_effects(world: World, name: str, params: Params) -> tuple[list[int], bool, bool]:
    """Return three checks' counts, and whether later checks leave weights and random state."""
    step = build_small_step(world, name, params)
    step.reset()
    step.step()
    wrong = [step.check()]
    weights, state = local_weights(step.layout.model), torch.get_rng_state()
    wrong += [step.check() for _ in range(2)]
    same_weights = all(map(torch.equal, weights, local_weights(step.layout.model)))
    step.close()
    return wrong, same_weights, torch.equal(state, torch.get_rng_state())


@pytest.mark.full
def test_later_checks_leave_state(two_ranks: Ranks) -> None:
    cases = select("ddp", "zero1", "zero3", "tp_sp")
    for by_case in call_each(two_ranks, "tests.workloads.step.test_training:check_effects", cases):
        assert by_case == dict.fromkeys(cases, ([0, 0, 0], True, True))


def describe(world: World, name: str, params: Params) -> Description:
    step = build_small_step(world, name, params)
    step.close()
    return step.describe()


def test_description_states_work(two_ranks: Ranks) -> None:
    shape = Shape(
        recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=128, sequence=4, vocabulary=64
    )
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 128) + 32 * 64
    cases = select("ddp", "zero3", "tp", "tp_fsdp, tp=1", accumulation=3, sequence=4)
    first, second = call_each(two_ranks, "tests.workloads.step.test_training:describe", cases)
    assert repr(first) == repr(second)
    for label, description in first.items():
        tokens = (1 if label == "tp" else 2) * 2 * 3 * 4
        flops = tokens * (6 * weights + 12 * 2 * 32 * 4) / 2
        details = description.details
        assert details["tokens_per_step"] == tokens, label
        assert details["parameters"] == num_parameters(shape), label
        assert details["flops_per_rank"] == flops, label
        work = {rate.name: rate.amount for rate in description.work}
        mfu = flops / details["peak"]["flops_per_second"]
        assert work == {"tokens_per_second": tokens, "mfu": mfu}, label


def test_description_of_timed_compute(two_ranks: Ranks) -> None:
    cases = select("ddp", "tp", compute="timed:1ms")
    first, second = call_each(two_ranks, "tests.workloads.step.test_training:describe", cases)
    assert repr(first) == repr(second)
    for label, description in first.items():
        assert [rate.name for rate in description.work] == ["tokens_per_second"], label
        assert description.details["peak"] is None, label
        assert any(note.startswith("timed compute") for note in description.notes), label
