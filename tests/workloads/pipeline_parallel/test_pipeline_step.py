"""A pipeline of any schedule computes the bits of one process and sends the analytical bytes."""

from typing import Any

import pytest
import torch

from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.pipeline_parallel.pipeline_step import notes_of, order_of_gradients
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    make_schedule,
    schedule_from_csv,
)
from parbench.workloads.step.sent_bytes import counted
from tests.support.mesh_steps import Params, build_small_pipeline
from tests.support.ranks import Ranks
from tests.support.training_steps import SMALL_PARAMS, count_wrong_after_step

# Stage 2 takes its gradients from the last microbatch to the first, stage 0 in the other order.
OPPOSITE = "0F0,0F1,0F2,2F0,2F1,2F2,2B2,2B1,2B0,0B0,0B1,0B2;1F0,1F1,1F2,3F0,3F1,3F2,3B2,3B1,3B0,1B0,1B1,1B2"


def step_results(world: World, cases: list[Params]) -> list[tuple[list[int], float, float, str]]:
    """Return wrong elements of two batches, sent and expected bytes, and the description."""
    results = []
    for params in cases:
        step = build_small_pipeline(world, {"microbatches": 4, **params})
        wrong = [count_wrong_after_step(step) for _ in range(2)]
        step.reset()
        calls = counted(step.step, step.layout.axes)
        sent = sum(sent_bytes(call.op, call.num_bytes, call.ranks) for call in calls)
        results.append((wrong, sent, step.expected_bytes()["pp"], repr(step.describe())))
        step.close()
    return results


def assert_right(ranks: Ranks, cases: list[Params]) -> None:
    by_rank = ranks.call(
        "tests.workloads.pipeline_parallel.test_pipeline_step:step_results", cases=cases
    )
    for params, *results in zip(cases, *by_rank, strict=True):
        for wrong, sent, expected, _ in results:
            assert wrong == [0, 0], params
            assert sent == expected > 0, params
        assert len({description for *_, description in results}) == 1, params


def test_pipeline_step_matches_one_process(two_ranks: Ranks) -> None:
    schedules = ("gpipe", "looped_bfs", "zb_h2", "zb_v", "dualpipe_v")
    assert_right(two_ranks, [{"schedule": name} for name in schedules])


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
    cases = [{"schedule": name, "microbatches": 8 if name == "dualpipe_v" else 4} for name in NAMES]
    assert_right(four_ranks, cases)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (OPPOSITE, [(), ()]),
        (OPPOSITE.replace("2B2,2B1,2B0", "2B0,2B1,2B2"), [(0, 1, 2), ()]),
        ("0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", [(1, 0), (0, 1)]),
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
    if corruption == "a parameter lost" and world.rank == 0:
        held = dict(model.named_parameters())
        del held["tokens.weight"]
        object.__setattr__(model, "named_parameters", lambda: iter(held.items()))
    wrong = step.check()
    step.close()
    return wrong


def test_pipeline_check_sees_one_bit(two_ranks: Ranks) -> None:
    function = "tests.workloads.pipeline_parallel.test_pipeline_step:wrong_after_corruption"
    assert two_ranks.call(function, corruption="one bit") == [1, 0]
    for corruption in ("a microbatch twice", "another order"):
        assert min(two_ranks.call(function, corruption=corruption)) > 0, corruption


def test_pipeline_check_counts_lost_parameter(two_ranks: Ranks) -> None:
    function = "tests.workloads.pipeline_parallel.test_pipeline_step:wrong_after_corruption"
    wrong = two_ranks.call(function, corruption="a parameter lost")
    assert min(wrong) >= SMALL_PARAMS["vocabulary"] * SMALL_PARAMS["hidden"]


@pytest.mark.parametrize(
    ("name", "microbatches", "bubble"),
    [("1f1b", 4, None), ("1f1b", 3, "50%"), ("1f1b", 2, "60%"), ("interleaved", 3, None)],
)
def test_notes_of_unfilled_pipeline(name: str, microbatches: int, bubble: str | None) -> None:
    notes = notes_of(make_schedule(name, ranks=4, microbatches=microbatches))
    assert len(notes) == (bubble is not None)
    assert all(str(bubble) in note for note in notes)
