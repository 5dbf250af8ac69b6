"""Training steps match one process, send the analytical bytes, and fail if corrupted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.step.layout import local
from parbench.workloads.step.peaks import Peak
from tests.support.ranks import Ranks
from tests.support.training_steps import (
    MUTANTS,
    Params,
    build_small_step,
    count_wrong_after_step,
)

BF16: Params = {"precision": "bfloat16"}
LLAMA: Params = {"recipe": "llama", "accumulation": 2}
ODD: Params = {"vocabulary": 61}  # FSDP pads the embedding and the head
UNEVEN: Params = {"hidden": 40, "ffn": 44, "vocabulary": 61}
DATA_PARALLEL = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def assert_right(ranks: Ranks, name: str, params: Params) -> None:
    """Two steps are right, and a third sends the analytical bytes."""
    function = "tests.support.training_steps:measure_wrong_and_bytes"
    for wrong, sent, expected in ranks.call(function, name=name, params=params):
        assert wrong == [0, 0]
        if name == "zero1":
            continue  # Its note states the bytes that it sends in addition.
        assert sent
        assert sent == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ddp", {**LLAMA, **BF16}),
        ("zero2", ODD),
        ("zero3", {**LLAMA, **ODD}),
        ("tp", LLAMA),
        ("tp_sp", {}),
    ],
)
def test_step_matches_one_process(two_ranks: Ranks, name: str, params: Params) -> None:
    assert_right(two_ranks, name, params)


@pytest.mark.full
@pytest.mark.parametrize("name", ["hsdp", "tp_fsdp"])
def test_step_on_two_axes_matches_one_process(four_ranks: Ranks, name: str) -> None:
    assert_right(four_ranks, name, ODD)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["gpt", "llama"])
@pytest.mark.parametrize("name", [*DATA_PARALLEL, "tp", "tp_sp", "tp_fsdp"])
def test_recipe_matches_one_process(two_ranks: Ranks, name: str, recipe: str) -> None:
    assert_right(two_ranks, name, {"recipe": recipe, **BF16, "accumulation": 2})
    if name in DATA_PARALLEL:
        assert_right(two_ranks, name, {"recipe": recipe, "checkpointing": "full"})


@pytest.mark.full
@pytest.mark.parametrize("params", [{}, {**LLAMA, **BF16}])
def test_uneven_step_on_four_ranks_matches_one_process(
    four_ranks: Ranks, params: Params
) -> None:
    params = {**UNEVEN, **params}
    assert_right(four_ranks, "zero3", params)
    params = {"kv_heads": 4, **params}
    assert_right(four_ranks, "tp_sp", params)
    assert_right(four_ranks, "tp_fsdp", {**params, "tp": 4})


def count_wrong(world: World, name: str, params: Params) -> list[int]:
    step = build_small_step(world, name, params)
    counts = [count_wrong_after_step(step) for _ in range(2)]
    step.close()
    return counts


@pytest.mark.parametrize(("name", "level"), [("zero3", "full"), ("tp_sp", "selective")])
def test_checkpointed_step_matches_one_process(two_ranks: Ranks, name: str, level: str) -> None:
    params = {"checkpointing": level}
    counts = two_ranks.call(f"{__name__}:count_wrong", name=name, params=params)
    assert counts == [[0, 0], [0, 0]]


@pytest.mark.full
@pytest.mark.parametrize("name", [*DATA_PARALLEL, "tp", "tp_sp", "tp_fsdp"])
def test_timed_gradients_are_averaged(two_ranks: Ranks, name: str) -> None:
    params = {"compute": "timed:1ms", "accumulation": 2}
    counts = two_ranks.call(f"{__name__}:count_wrong", name=name, params=params)
    assert counts == [[0, 0], [0, 0]]


def count_wrong_of_mutant(world: World, name: str, mutant: str) -> int:
    """Return wrong elements of all ranks for a step that becomes wrong before its check."""
    step = build_small_step(world, name, {"accumulation": 2})
    assert count_wrong_after_step(step) == 0
    step.reset()
    step.step()
    MUTANTS[mutant](step, world)
    wrong = sum(world.gather(step.check()))
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("ddp", "every gradient 0.1 % larger"),
        ("zero1", "one gradient 0.1 % larger"),
        ("zero2", "microbatch dropped"),
        ("zero3", "microbatch repeated"),
        ("tp", "other tokens on rank 1"),
        ("tp_sp", "targets not shifted"),
        ("hsdp", "one gradient missing"),
    ],
)
def test_mutant_is_detected(two_ranks: Ranks, name: str, mutant: str) -> None:
    wrong, _ = two_ranks.call(f"{__name__}:count_wrong_of_mutant", name=name, mutant=mutant)
    assert wrong > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ddp", {}),
        ("zero3", {}),
        ("hsdp", {"shard": 1}),
        ("tp_sp", {}),
        ("fsdp", {"compute": "timed:1ms", **BF16, "accumulation": 3}),
    ],
)
def test_unreduced_gradients_are_detected(two_ranks: Ranks, name: str, params: Params) -> None:
    function = "tests.support.training_steps:count_wrong_without_reduction"
    first, second = two_ranks.call(function, name=name, params=params)
    in_check, in_steps = map(max, first, second)
    assert in_check > 0
    assert in_steps > 0


def local_weights(model: torch.nn.Module) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def count_wrong_of_skipped_update(world: World, name: str) -> int:
    """Return the wrong elements of a step whose rank 1 keeps its weights."""
    step = build_small_step(world, name, {})
    model, optimizer = step.layout.model, step.layout.optimizer
    optimizer_step = optimizer.step

    def update(closure: Any = None) -> None:
        before = local_weights(model)
        optimizer_step()
        if world.rank == 1:
            for parameter, weights in zip(model.parameters(), before, strict=True):
                local(parameter.detach()).copy_(weights)

    optimizer.step = update  # type: ignore[method-assign,assignment]
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_skipped_update_is_detected(two_ranks: Ranks, name: str) -> None:
    """The gradients of each rank are right for its own weights."""
    counts = two_ranks.call(f"{__name__}:count_wrong_of_skipped_update", name=name)
    assert max(counts) > 0


def check_thrice(world: World, name: str) -> tuple[list[int], bool, bool]:
    """Return three counts, and whether later checks keep the weights and the random state."""
    step = build_small_step(world, name, {})
    counts = [count_wrong_after_step(step)]
    weights = local_weights(step.layout.model)
    state = torch.get_rng_state()
    counts += [step.check() for _ in range(2)]
    same_weights = all(map(torch.equal, weights, local_weights(step.layout.model)))
    step.close()
    return counts, same_weights, torch.equal(state, torch.get_rng_state())


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "tp_sp"])
def test_later_checks_keep_state(two_ranks: Ranks, name: str) -> None:
    results = two_ranks.call(f"{__name__}:check_thrice", name=name)
    assert results == [([0, 0, 0], True, True)] * 2


def describe(world: World, name: str, params: Params) -> tuple[Description, int]:
    """Return the description, and the number of parameters."""
    step = build_small_step(world, name, params)
    step.close()
    return step.describe(), num_parameters(step.spec.shape)


@pytest.mark.parametrize(("name", "data_ranks"), [("zero3", 2), ("tp", 1)])
def test_description_reports_work(two_ranks: Ranks, name: str, data_ranks: int) -> None:
    params = {"accumulation": 3, "sequence": 4}
    description, parameters = two_ranks.call(f"{__name__}:describe", name=name, params=params)[
        0
    ]
    attention = 2 * 32 * 32 + 2 * 32 * 16
    weights = 2 * (attention + 2 * 32 * 128) + 32 * 64
    tokens = data_ranks * 2 * 3 * 4  # ranks, microbatch size, microbatches, sequence
    flops = tokens * (6 * weights + 12 * 2 * 32 * 4) / 2
    details = description.details
    assert details["tokens_per_step"] == tokens
    assert details["parameters"] == parameters
    assert details["flops_per_rank"] == flops
    amounts = {rate.name: rate.amount for rate in description.work}
    mfu = flops / details["peak"]["flops_per_second"]
    assert amounts == {"tokens_per_second": tokens, "mfu": mfu}


def test_description_of_timed_compute_has_no_mfu(two_ranks: Ranks) -> None:
    params = {"compute": "timed:1ms"}
    description, _ = two_ranks.call(f"{__name__}:describe", name="ddp", params=params)[0]
    assert [rate.name for rate in description.work] == ["tokens_per_second"]
    assert description.details["peak"] is None
    assert any("timed compute" in note for note in description.notes)


def explain_with_peak(world: World, measured: bool) -> str:
    """Return the notes of a step that exceeds its peak of 1 FLOP/s."""
    step = build_small_step(world, "ddp", {})
    step.step()
    step._peak = Peak(flops_per_second=1.0, source="datasheet", measured=measured)
    notes = step.explain_step(step.reset, 0.0).notes
    step.close()
    return " ".join(notes)


@pytest.mark.parametrize(
    ("measured", "reason"), [(True, "measured too low"), (False, "counts attention in full")]
)
def test_step_above_peak_has_note(two_ranks: Ranks, measured: bool, reason: str) -> None:
    """A measured peak may be too low, and counted FLOPs may exceed those that are executed."""
    for text in two_ranks.call(f"{__name__}:explain_with_peak", measured=measured):
        assert "mfu above 100 %" in text
        assert reason in text
