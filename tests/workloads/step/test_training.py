"""Every training step computes what one process would, its gate sees where it does not, and bytes are as counted."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from training_steps import MUTANTS, Params, small

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.shapes import Shape
from parbench.workloads.step.layout import local
from parbench.workloads.step.training_step import TrainingStep

Cases = dict[str, tuple[str, Params]]

ON_TWO: Cases = {
    **{name: (name, {}) for name in ("ddp", "zero1", "zero2", "zero3")},
    "hsdp that shards": ("hsdp", {}),
    "hsdp that replicates": ("hsdp", {"shard": 1}),
    **{name: (name, {}) for name in ("tp", "tp_sp")},
    "tp_fsdp that splits": ("tp_fsdp", {}),
    "tp_fsdp that shards": ("tp_fsdp", {"tp": 1}),
}
ON_FOUR: Cases = {
    "hsdp": ("hsdp", {}),
    "tp_fsdp": ("tp_fsdp", {}),
    **{name: (name, {}) for name in ("ddp", "zero1", "zero2", "zero3")},
    **{name: (name, {"kv_heads": 4}) for name in ("tp", "tp_sp")},
    "tp_fsdp that splits over all": ("tp_fsdp", {"tp": 4, "kv_heads": 4}),
}
SPLIT = {"tp", "tp_sp", "tp_fsdp that splits"}
HELD_IN_PARTS = {"zero2", "zero3", "hsdp that shards", "tp_fsdp that shards"}


def some(*labels: str, cases: Cases = ON_TWO, **more: Any) -> Cases:
    return {label: (cases[label][0], {**cases[label][1], **more}) for label in labels or cases}


def each(ranks: Ranks, function: str, cases: Cases, **arguments: Any) -> list[dict[str, Any]]:
    return ranks.call("training_steps:of_each", function=function, cases=cases, **arguments)


def described(world: World, name: str, params: Params) -> Description:
    step = small(world, name, params)
    step.close()
    return step.describe()


def changed_by_check(world: World, name: str, params: Params) -> tuple[bool, bool, list[int]]:
    """Return whether a later check moves weights or the random state, and what three checks in a row find."""
    step = small(world, name, params)
    step.reset()
    step.step()
    wrong = [step.check()]
    before, state = weights_of(step.layout.model), torch.get_rng_state()
    wrong += [step.check() for _ in range(2)]
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights_of(step.layout.model), strict=True))
    step.close()
    return moved, not torch.equal(state, torch.get_rng_state()), wrong


def weights_of(model: torch.nn.Module) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def wrong_of_mutants(world: World, name: str, params: Params, mutants: list[str]) -> dict[str, tuple[int, int]]:
    found = {}
    for mutant in mutants:
        step = small(world, name, {"accumulation": 2, **params})
        step.reset()
        step.step()
        right = step.check()
        step.reset()
        step.step()
        MUTANTS[mutant](step, world)
        found[mutant] = right, step.check()
        step.close()
    return found


def wrong_where_one_bit_is_changed(world: World, name: str, params: Params) -> tuple[int, int]:
    step = small(world, name, params)
    step.reset()
    step.step()
    right = step.check()
    if world.rank == 1:
        weights = local(step.layout.model.get_parameter("tokens.weight").detach()).view(torch.int32)
        weights[3, 5] ^= 1
    wrong = step.check()
    step.close()
    return right, wrong


def _one_rank_does_not_update(step: TrainingStep, world: World) -> None:
    right = step.layout.optimizer.step

    def update(closure: Any = None) -> None:
        before = weights_of(step.layout.model)
        right()
        if world.rank == 1:
            for parameter, weights in zip(step.layout.model.parameters(), before, strict=True):
                local(parameter.detach()).copy_(weights)

    step.layout.optimizer.step = update  # type: ignore[method-assign,assignment]


def _all_agree_on_another_learning_rate(step: TrainingStep, world: World) -> None:
    for group in step.layout.optimizer.param_groups:
        group["lr"] *= 1.1


def _one_rank_starts_elsewhere(step: TrainingStep, world: World) -> None:
    if world.rank == 1:
        local(step.layout.model.get_parameter("layers.0.ffn.down.weight").detach())[0, 0] += 0.01


UPDATES: dict[str, Callable[[TrainingStep, World], None]] = {
    "one rank does not update": _one_rank_does_not_update,
    "all agree on another learning rate": _all_agree_on_another_learning_rate,
    "one rank starts elsewhere": _one_rank_starts_elsewhere,
}


def wrong_update(world: World, name: str, params: Params, spoil: str) -> int:
    step = small(world, name, params)
    UPDATES[spoil](step, world)
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


def assert_right_and_as_told(ranks: Ranks, cases: Cases) -> None:
    """Two steps are right and a third sends the closed form's bytes; zero1's note says what it sends besides."""
    for found in each(ranks, "training_steps:wrong_sent_and_expected", cases):
        for label, (wrong, sent, expected) in found.items():
            assert wrong == [0, 0], label
            if label != "zero1":
                told = {axis: value for axis, value in expected.items() if value}
                assert sent == pytest.approx(told, rel=1e-12), label
                assert sent, label


def test_each_step_computes_what_one_process_would_and_sends_what_the_closed_form_says(two_ranks: Ranks) -> None:
    """Of an odd vocabulary, whose embedding and head FSDP pads."""
    assert_right_and_as_told(two_ranks, some(recipe="llama", accumulation=2, vocabulary=61))
    recomputed = {f"{label}, {how}": ON_TWO[label] for label, how in (("zero3", "full"), ("tp_sp", "selective"))}
    for found in each(
        two_ranks,
        "training_steps:wrong_after",
        {
            label: (name, {**params, "checkpointing": label.partition(", ")[2], "precision": "bfloat16"})
            for label, (name, params) in recomputed.items()
        },
        steps=2,
    ):
        assert found == {key: [0, 0] for key in recomputed}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_so_does_each_in_either_type_of_any_recipe(two_ranks: Ranks, recipe: str) -> None:
    """A split layer's sums are computed again where it is checkpointed, so that its bytes are others."""
    assert_right_and_as_told(two_ranks, some(recipe=recipe, precision="bfloat16", accumulation=2))
    whole = [label for label in ON_TWO if not label.startswith("tp")]
    assert_right_and_as_told(two_ranks, some(*whole, recipe=recipe, vocabulary=61, checkpointing="full"))
    for found in each(two_ranks, "training_steps:wrong_after", some("ddp", "tp_sp", checkpointing="full"), steps=2):
        assert set(chain.from_iterable(found.values())) == {0}, found


def assert_mutants_are_caught(ranks: Ranks, label: str, mutants: list[str]) -> None:
    name, params = ON_TWO[label]
    arguments = {"name": name, "params": params, "mutants": mutants}
    one, other = ranks.call("test_training:wrong_of_mutants", **arguments)
    for mutant in mutants:
        assert one[mutant][0] == other[mutant][0] == 0, (label, mutant)
        assert max(one[mutant][1], other[mutant][1]) > 0, (label, mutant)


def test_every_mutant_is_caught_by_one_layout_and_one_by_every_layout(two_ranks: Ranks) -> None:
    mutants = list(MUTANTS)
    for number, label in enumerate(ON_TWO):
        assert_mutants_are_caught(two_ranks, label, [mutants[number % len(mutants)]])


@pytest.mark.full
@pytest.mark.parametrize("label", ["ddp", "zero1", "zero3", "tp_sp", "tp_fsdp that splits"])
def test_every_mutant_is_caught_by_layouts_of_every_kind(two_ranks: Ranks, label: str) -> None:
    assert_mutants_are_caught(two_ranks, label, list(MUTANTS))


def assert_local_gradients_are_caught(ranks: Ranks, cases: Cases) -> None:
    found = each(ranks, "training_steps:wrong_where_nothing_is_reduced", cases)
    for label in cases:
        assert max(of_rank[label][0] for of_rank in found) > 0, (label, "in the check alone")
        assert max(of_rank[label][1] for of_rank in found) > 0, (label, "in steps too")


@pytest.mark.full
def test_gradients_that_stay_local_are_caught(two_ranks: Ranks) -> None:
    cases = some("ddp", "zero3", "hsdp that replicates", "tp_sp")
    timed = {"zero3, timed": ("zero3", {"compute": "timed:1ms", "precision": "bfloat16", "accumulation": 3})}
    assert_local_gradients_are_caught(two_ranks, {**cases, **timed})


@pytest.mark.full
def test_one_bit_is_one_wrong_element_on_the_rank_that_is_off(two_ranks: Ranks) -> None:
    held_by_both = [label for label in ON_TWO if label not in HELD_IN_PARTS]
    one, other = each(two_ranks, "test_training:wrong_where_one_bit_is_changed", some(*held_by_both))
    assert one == dict.fromkeys(held_by_both, (0, 0))
    assert other == dict.fromkeys(held_by_both, (0, 1))


def assert_updates_are_compared(ranks: Ranks, spoil: str, cases: Cases) -> None:
    found = each(ranks, "test_training:wrong_update", cases, spoil=spoil)
    for label in cases:
        assert max(of_rank[label] for of_rank in found) > 0, (label, spoil)


def test_updates_are_compared_too(two_ranks: Ranks) -> None:
    """Where gradients, losses and the ranks' agreement say nothing: each rank's weights are what it computes with."""
    for spoil, labels in zip(UPDATES, (("zero1", "zero2"), ("tp_sp",), ("zero3",)), strict=True):
        assert_updates_are_compared(two_ranks, spoil, some(*labels))


@pytest.mark.full
def test_a_later_check_disturbs_nothing(two_ranks: Ranks) -> None:
    labels = ("ddp", "zero1", "zero3", "hsdp that shards", "tp_sp")
    expected = dict.fromkeys(labels, (False, False, [0, 0, 0]))
    assert each(two_ranks, "test_training:changed_by_check", some(*labels)) == [expected] * 2


def test_ranks_describe_a_step_alike_and_timed_compute_says_so(two_ranks: Ranks) -> None:
    labels = ("ddp", "zero3", "hsdp that shards", "tp", "tp_fsdp that shards")
    shape = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=128, sequence=4, vocabulary=64)
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 128) + 32 * 64
    found, others = each(two_ranks, "test_training:described", some(*labels, accumulation=3, sequence=4))
    for label, one in found.items():
        assert repr(one) == repr(others[label]), label
        tokens = (1 if label in SPLIT else 2) * 2 * 3 * 4
        rate, mfu = one.work
        assert (rate.name, rate.amount) == ("tokens_per_second", tokens), label
        assert (one.headline, one.details["tokens_per_step"]) == ("step_time", tokens), label
        assert one.details["parameters"] == num_parameters(shape), label
        flops = tokens * (6 * weights + 12 * 2 * 32 * 4) / 2
        assert one.details["flops_per_rank"] == flops, label
        assert (mfu.name, mfu.amount) == ("mfu", flops / one.details["peak"]["flops_per_second"]), label
        assert one.details["peak"]["flops_per_second"] > 1e6, label
        assert not any("timed compute" in note for note in one.notes), label
    found, others = each(two_ranks, "test_training:described", some("ddp", "tp", compute="timed:1ms"))
    for label, one in found.items():
        assert repr(one) == repr(others[label]), label
        assert [work.name for work in one.work] == ["tokens_per_second"], label
        assert one.details["peak"] is None, label
        assert any(note.startswith("timed compute: ") for note in one.notes), label


@pytest.mark.full
def test_timed_compute_averages_its_fills(two_ranks: Ranks) -> None:
    narrow = {f"{label}, bfloat16": case for label, case in some("ddp", "zero3", precision="bfloat16").items()}
    cases = {label: (name, {"accumulation": 2, **params}) for label, (name, params) in (ON_TWO | narrow).items()}
    for found in each(two_ranks, "training_steps:wrong_after", some(cases=cases, compute="timed:1ms"), steps=2):
        assert found == {key: [0, 0] for key in cases}


def test_four_ranks_train_as_one_process_would_on_two_axes(four_ranks: Ranks) -> None:
    assert_right_and_as_told(four_ranks, some("hsdp", "tp_fsdp", cases=ON_FOUR, hidden=40, ffn=44, vocabulary=61))


@pytest.mark.full
def test_four_ranks_train_as_one_process_would_in_every_layout(four_ranks: Ranks) -> None:
    odd = {"hidden": 40, "ffn": 44, "vocabulary": 61}
    assert_right_and_as_told(four_ranks, some(cases=ON_FOUR, **odd))
    more = {"recipe": "llama", "precision": "bfloat16", "accumulation": 2}
    assert_right_and_as_told(four_ranks, some(cases=ON_FOUR, **odd, **more))
