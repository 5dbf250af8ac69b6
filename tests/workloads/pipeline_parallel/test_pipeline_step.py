"""A pipeline of any schedule computes the bits of one process and sends the analytical bytes."""

from typing import Any

import pytest
import torch

from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel.pipeline_step import notes_of, order_of_gradients
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    make_schedule,
    schedule_from_csv,
)
from tests.support.mesh_steps import Params, build_small_pipeline
from tests.support.ranks import Ranks
from tests.support.training_steps import SMALL_PARAMS, count_wrong_after_step, measure_sent_bytes

MODULE = "tests.workloads.pipeline_parallel.test_pipeline_step"
# Stage 2 takes its gradients from the last microbatch to the first, stage 0 in the other order.
OPPOSITE = (
    "0F0,0F1,0F2,2F0,2F1,2F2,2B2,2B1,2B0,0B0,0B1,0B2;"
    "1F0,1F1,1F2,3F0,3F1,3F2,3B2,3B1,3B0,1B0,1B1,1B2"
)


def step_results(world: World, cases: list[Params]) -> list[tuple[list[int], float, float]]:
    """Return wrong elements of two batches, and sent and expected bytes."""
    results = []
    for params in cases:
        step = build_small_pipeline(world, {"microbatches": 4, **params})
        wrong = [count_wrong_after_step(step) for _ in range(2)]
        step.reset()
        sent = measure_sent_bytes(step)["pp"]
        results.append((wrong, sent, step.expected_bytes()["pp"]))
        step.close()
    return results


def assert_right(ranks: Ranks, cases: list[Params]) -> None:
    for results in ranks.call(f"{MODULE}:step_results", cases=cases):
        for params, (wrong, sent, expected) in zip(cases, results, strict=True):
            assert wrong == [0, 0], params
            assert sent == expected > 0, params


def test_pipeline_step_matches_one_process(two_ranks: Ranks) -> None:
    sizes = {"sequence": 8, "hidden": 16, "vocabulary": 16}
    assert_right(two_ranks, [{"schedule": name, **sizes} for name in NAMES])


@pytest.mark.full
def test_pipeline_step_options_match_one_process(two_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"recipe": "llama", "split": "1+3"},
        {"checkpointing": "full", "precision": "bfloat16"},
        {"checkpointing": "selective", "schedule": "gpipe"},
        {"order": "0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", "microbatches": 2, "split": "2+2"},
        {"order": OPPOSITE, "microbatches": 3, "precision": "bfloat16"},
        {"schedule": "interleaved", "chunks": 4, "layers": 8},
        {"schedule": "interleaved_zb", "chunks": 1},
    ]
    assert_right(two_ranks, [{"schedule": "1f1b", **params} for params in cases])


@pytest.mark.full
def test_pipeline_step_on_four_ranks(four_ranks: Ranks) -> None:
    cases = [{"schedule": name, "microbatches": 8} for name in NAMES]
    assert_right(four_ranks, cases)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (OPPOSITE, [(), ()]),
        (OPPOSITE.replace("2B2,2B1,2B0", "2B0,2B1,2B2"), [(0, 1, 2), ()]),
        ("0F0,0I0,0F1,0I1,0W1,0W0;1F0,1I0,1W0,1F1,1I1,1W1", [(1, 0), (0, 1)]),
    ],
)
def test_order_of_gradients(order: str, expected: list[tuple[int, ...]]) -> None:
    schedule = schedule_from_csv(order.replace(";", "\n"), "order")
    assert [order_of_gradients(schedule, rank) for rank in range(2)] == expected


def wrong_after_corruption(world: World, corruption: str) -> int:
    step = build_small_pipeline(world, {"schedule": "1f1b", "microbatches": 4})
    model = step.layout.model
    run = step.layout.forward_backward
    assert run is not None

    def forward_backward(microbatches: Any) -> Any:
        first, second, third, fourth = microbatches
        if corruption == "another order":
            return run([third, fourth, first, second])
        if corruption == "a microbatch twice":
            return run([first, second, third, first])
        loss = run(microbatches)
        if corruption == "one bit" and world.rank == 0:
            gradient = model.get_parameter("layers.0.ffn.up.weight").grad
            assert gradient is not None
            element = gradient.view(-1)[5]
            element.copy_(torch.nextafter(element, torch.tensor(1.0)))
        return loss

    object.__setattr__(step.layout, "forward_backward", forward_backward)
    step.step()
    if corruption == "a lost parameter" and world.rank == 0:
        parameters = dict(model.named_parameters())
        del parameters["tokens.weight"]
        object.__setattr__(model, "named_parameters", lambda: iter(parameters.items()))
    wrong = step.check()
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("corruption", "least_wrong"),
    [
        ("a microbatch twice", 1),
        ("another order", 1),
        ("a lost parameter", SMALL_PARAMS["vocabulary"] * SMALL_PARAMS["hidden"]),
    ],
)
def test_corrupted_pipeline_is_detected(
    two_ranks: Ranks, corruption: str, least_wrong: int
) -> None:
    wrong = two_ranks.call(f"{MODULE}:wrong_after_corruption", corruption=corruption)
    assert min(wrong) >= least_wrong


def test_one_wrong_bit_is_detected(two_ranks: Ranks) -> None:
    wrong = two_ranks.call(f"{MODULE}:wrong_after_corruption", corruption="one bit")
    assert wrong == [1, 0]


@pytest.mark.parametrize(
    ("name", "microbatches", "bubble"),
    [("1f1b", 4, None), ("1f1b", 3, "50%"), ("interleaved", 3, None)],
)
def test_unfilled_pipeline_is_noted(name: str, microbatches: int, bubble: str | None) -> None:
    notes = notes_of(make_schedule(name, ranks=4, microbatches=microbatches))
    if bubble is None:
        assert notes == ()
    else:
        [note] = notes
        assert bubble in note
