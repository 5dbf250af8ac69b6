"""The check of a training step detects corrupted steps, and its description has its work."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.parallel.mesh import get_local_tensor
from parbench.workloads.step.peaks import Peak
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import (
    MUTANTS,
    Params,
    build_small_step,
    count_wrong_after_step,
)

BF16: Params = {"precision": "bfloat16"}


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
        "ep_step",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("zero1", "tp_sp", "cp")),
    ],
)
def test_simulated_gradients_are_averaged(two_ranks: Ranks, name: str) -> None:
    params = {"compute": "simulated:1ms", "microbatches": 2}
    counts = two_ranks.call(f"{__name__}:count_wrong", name=name, params=params)
    assert counts == [[0, 0], [0, 0]]


def count_wrong_of_mutant(world: World, name: str, mutant: str) -> int:
    """Return wrong elements of all ranks for a step that becomes wrong before its check."""
    step = build_small_step(world, name, {"microbatches": 2})
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
        ("cp", "one gradient 0.1 % larger"),
        ("fsdp", "microbatch dropped"),
        ("fsdp", "microbatch repeated"),
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
        ("fsdp", {}),
        ("tp_sp", {}),
        ("fsdp", {"compute": "simulated:1ms", **BF16, "microbatches": 3}),
    ],
)
def test_unreduced_gradients_are_detected(two_ranks: Ranks, name: str, params: Params) -> None:
    function = "tests.support.workloads.training_steps:count_wrong_without_reduction"
    first, second = two_ranks.call(function, name=name, params=params)
    in_check, in_steps = map(max, first, second)
    assert in_check > 0
    assert in_steps > 0


def local_weights(model: torch.nn.Module) -> list[Tensor]:
    return [get_local_tensor(parameter.detach()).clone() for parameter in model.parameters()]


def count_wrong_of_skipped_update(world: World, name: str) -> int:
    """Return the wrong elements of a step whose rank 1 keeps its weights."""
    step = build_small_step(world, name, {})
    model, optimizer = step.model, step.optimizer
    optimizer_step = optimizer.step

    def update(closure: Any = None) -> None:
        before = local_weights(model)
        optimizer_step()
        if world.rank == 1:
            for parameter, weights in zip(model.parameters(), before, strict=True):
                get_local_tensor(parameter.detach()).copy_(weights)

    optimizer.step = update  # type: ignore[method-assign,assignment]
    wrong = count_wrong_after_step(step)
    step.close()
    return wrong


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_skipped_update_is_detected(two_ranks: Ranks, name: str) -> None:
    """The gradients of each rank are right for its own weights."""
    counts = two_ranks.call(f"{__name__}:count_wrong_of_skipped_update", name=name)
    assert max(counts) > 0


def check_thrice(world: World, name: str) -> tuple[list[int], bool, bool]:
    """Return three counts, and whether later checks keep the weights and the random state."""
    step = build_small_step(world, name, {})
    counts = [count_wrong_after_step(step)]
    weights = local_weights(step.model)
    state = torch.get_rng_state()
    counts += [step.check() for _ in range(2)]
    same_weights = all(map(torch.equal, weights, local_weights(step.model)))
    step.close()
    return counts, same_weights, torch.equal(state, torch.get_rng_state())


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp", "tp_sp"])
def test_later_checks_keep_state(two_ranks: Ranks, name: str) -> None:
    results = two_ranks.call(f"{__name__}:check_thrice", name=name)
    assert results == [([0, 0, 0], True, True)] * 2


def describe(world: World, name: str, params: Params) -> tuple[Description, int]:
    """Return the description, and the number of parameters."""
    step = build_small_step(world, name, params)
    step.close()
    return step.describe(), num_parameters(step.spec.shape)


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
    assert details["tokens_per_step"] == tokens
    assert details["parameters"] == parameters
    assert details["flops_per_rank"] == flops
    amounts = {rate.name: rate.amount for rate in description.work}
    mfu = flops / details["peak"]["flops_per_second"]
    assert amounts == {"tokens_per_second": tokens, "mfu": mfu}


def test_description_of_simulated_compute_has_no_mfu(two_ranks: Ranks) -> None:
    params = {"compute": "simulated:1ms"}
    description, _ = two_ranks.call(f"{__name__}:describe", name="ddp", params=params)[0]
    assert [rate.name for rate in description.work] == ["tokens_per_second"]
    assert description.details["peak"] is None
    assert any("simulated compute" in note for note in description.notes)


def explain_with_peak(world: World, measured: bool) -> str:
    """Return the notes of a step that exceeds its peak of 1 FLOP/s."""
    step = build_small_step(world, "ddp", {})
    step.step()
    step._peak = Peak(flops_per_second=1.0, source="datasheet", measured=measured)
    notes = step.explain_step(step.reset, 0.0).notes
    step.close()
    return " ".join(notes)


@pytest.mark.parametrize(("measured", "reason"), [(True, "too low"), (False, "full attention")])
def test_step_above_peak_has_note(two_ranks: Ranks, measured: bool, reason: str) -> None:
    """A measured peak may be too low, and counted FLOPs may exceed those that are executed."""
    for text in two_ranks.call(f"{__name__}:explain_with_peak", measured=measured):
        assert "mfu is above 100 %" in text
        assert reason in text
