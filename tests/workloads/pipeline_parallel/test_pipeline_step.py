"""A pipeline of any schedule computes the bits of one process and sends the analytical bytes."""

from typing import Any

import pytest
import torch

from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from tests.support.ranks import Ranks
from tests.support.workloads.mesh_steps import Params, build_small_pipeline
from tests.support.workloads.training_steps import (
    SMALL_PARAMS,
    count_wrong_after_step,
    measure_sent_bytes,
)

MODULE = "tests.workloads.pipeline_parallel.test_pipeline_step"


def measure_steps(world: World, cases: list[Params]) -> list[tuple[int, float, float]]:
    """Return wrong elements of a step, and the sent and expected bytes of another."""
    results = []
    for params in cases:
        step = build_small_pipeline(world, {"microbatches": 4, **params})
        wrong = count_wrong_after_step(step)
        sent = measure_sent_bytes(step)["pp.send"]
        results.append((wrong, sent, step.compute_expected_bytes()["pp"]))
        step.close()
    return results


def assert_right(ranks: Ranks, cases: list[Params]) -> None:
    for results in ranks.call(f"{MODULE}:measure_steps", cases=cases):
        for params, (wrong, sent, expected) in zip(cases, results, strict=True):
            assert wrong == 0, params
            assert sent == expected > 0, params


def test_pipeline_step_matches_one_process(two_ranks: Ranks) -> None:
    sizes = {"sequence": 4, "hidden": 8, "heads": 2, "vocabulary": 8}
    names = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
    assert_right(two_ranks, [{"schedule": name, **sizes} for name in names])


@pytest.mark.full
def test_pipeline_step_options_match_one_process(two_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"recipe": "llama", "layers_per_stage": "1+3"},
        {"checkpointing": "full", "precision": "bfloat16"},
        {"checkpointing": "selective", "schedule": "gpipe"},
        {"schedule": "interleaved", "virtual_stages": 4, "layers": 8},
        {"schedule": "interleaved_zb", "virtual_stages": 1},
    ]
    assert_right(two_ranks, [{"schedule": "1f1b", **params} for params in cases])


@pytest.mark.full
def test_pipeline_step_on_four_ranks(four_ranks: Ranks) -> None:
    cases = [{"schedule": name, "microbatches": 8} for name in SCHEDULES]
    assert_right(four_ranks, cases)


def count_wrong(world: World, corruption: str) -> int:
    """Return the count of a check after a corrupted step."""
    step = build_small_pipeline(world, {"schedule": "1f1b", "microbatches": 4})
    model = step.model
    run = step.forward_backward

    def forward_backward() -> Any:
        loss = run()
        if corruption == "one bit" and world.rank == 0:
            gradient = model.get_parameter("layers.0.ffn.up.weight").grad
            assert gradient is not None
            element = gradient.view(-1)[5]
            element.copy_(torch.nextafter(element, torch.tensor(1.0)))
        return loss

    step.forward_backward = forward_backward  # type: ignore[method-assign]
    first, second, third, fourth = step.microbatches
    if corruption == "another order":
        step.microbatches = [third, fourth, first, second]
    if corruption == "a microbatch twice":
        step.microbatches = [first, second, third, first]
    step.step()
    if corruption == "a lost parameter" and world.rank == 0:
        parameters = dict(model.named_parameters())
        del parameters["token_embedding.weight"]
        object.__setattr__(model, "named_parameters", lambda: iter(parameters.items()))
    wrong = step.check()
    step.close()
    return wrong


EMBEDDING_SIZE = SMALL_PARAMS["vocabulary"] * SMALL_PARAMS["hidden"]


@pytest.mark.parametrize(
    ("corruption", "min_wrong"),
    [("a microbatch twice", 1), ("another order", 1), ("a lost parameter", EMBEDDING_SIZE)],
)
def test_corrupted_pipeline_is_detected(
    two_ranks: Ranks, corruption: str, min_wrong: int
) -> None:
    assert min(two_ranks.call(f"{MODULE}:count_wrong", corruption=corruption)) >= min_wrong


def test_one_wrong_bit_is_detected(two_ranks: Ranks) -> None:
    assert two_ranks.call(f"{MODULE}:count_wrong", corruption="one bit") == [1, 0]
