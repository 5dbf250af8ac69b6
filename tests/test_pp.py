"""A pipeline of any schedule computes what one process does, bit for bit, and sends what the closed form says."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from test_training import SMALL

from bench.world import World
from workloads.communication import counted
from workloads.costs import sent_bytes
from workloads.definitions import DEFINITIONS
from workloads.pipeline import schedules
from workloads.pipeline.pipeline_case import Pipeline
from workloads.pipeline.pp import PipelineStep, _order_of_gradients
from workloads.pipeline.schedules import schedule_from_csv

[DEFINITION] = [one for one in DEFINITIONS if one.name == "workload.pp"]


def small(world: World, params: dict[str, Any]) -> PipelineStep:
    given = {**SMALL, "microbatch": 1, "layers": 2 * world.size, **params}
    return PipelineStep(world, dict(DEFINITION.case(given).params))


def wrong_twice(world: World, params: dict[str, Any]) -> list[int]:
    """Return what is wrong after a step on each of two batches."""
    step = small(world, params)
    found = []
    for _ in range(2):
        step.reset()
        step.step()
        found.append(step.check())
    step.close()
    return found


def of_schedule(name: str, ranks: int) -> dict[str, Any]:
    return {"schedule": name, "microbatches": 8 if name == "dualpipe_v" and ranks > 2 else 4}


@pytest.mark.parametrize("name", schedules.NAMES)
def test_two_ranks_get_the_bits_of_one_process(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.call("test_pp:wrong_twice", params=of_schedule(name, 2)) == [[0, 0]] * 2


@pytest.mark.parametrize(
    "params",
    [
        {"recipe": "llama"},
        {"split": "1+3"},
        {"schedule": "interleaved", "chunks": 4, "layers": 8},
        {"schedule": "interleaved_zb", "chunks": 1},
        {"checkpointing": "full"},
        {"checkpointing": "selective", "schedule": "gpipe"},
        {"precision": "bfloat16"},
        {"order": "0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", "microbatches": 2, "split": "2+2"},
    ],
    ids=str,
)
def test_options_change_no_bit(two_ranks: Ranks, params: dict[str, Any]) -> None:
    given = {"schedule": "1f1b", "microbatches": 4, **params}
    assert two_ranks.call("test_pp:wrong_twice", params=given) == [[0, 0]] * 2


# stage 2 takes its gradients from the last microbatch on, stage 0 from the first; and so does the other rank
OPPOSITE = (
    "0F0,0F1,0F2,2F0,2F1,2F2,2B2,2B1,2B0,0B0,0B1,0B2;"
    "1F0,1F1,1F2,3F0,3F1,3F2,3B2,3B1,3B0,1B0,1B1,1B2"
)  # fmt: skip


@pytest.mark.parametrize(
    ("order", "taken"),
    [
        (OPPOSITE, [(), ()]),
        (OPPOSITE.replace("2B2,2B1,2B0", "2B0,2B1,2B2"), [(0, 1, 2), ()]),
        ("0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", [(1, 0), (0, 1)]),
    ],
    ids=["opposite", "opposite on one rank", "one stage a rank"],
)
def test_one_process_can_follow_a_rank_s_stages_where_their_orders_are_one(
    order: str, taken: list[tuple[int, ...]]
) -> None:
    microbatches = len({action[2:] for action in order.replace(";", ",").split(",")})
    schedule = schedule_from_csv(order.replace(";", "\n"), "order")
    pipeline = Pipeline(schedule=schedule, layers_by_stage=(1,) * schedule.num_stages)
    assert schedule.microbatches == microbatches
    assert [_order_of_gradients(pipeline, rank) for rank in range(2)] == taken


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stages_of_a_rank_may_take_gradients_in_different_orders(two_ranks: Ranks, precision: str) -> None:
    """A valid order of one's own is right, though no one process sums in it bit for bit."""
    params = {"order": OPPOSITE, "microbatches": 3, "precision": precision}
    assert two_ranks.call("test_pp:wrong_twice", params=params) == [[0, 0]] * 2


def bytes_sent(world: World, params: dict[str, Any]) -> tuple[float, float]:
    """Return what is counted in a step, and the closed form."""
    step = small(world, params)
    step.step()
    step.reset()
    calls = counted(step.step, step.layout.axes)
    step.close()
    return sum(sent_bytes(call.op, call.num_bytes, call.ranks) for call in calls), step.layout.expected_bytes["pp"]


def wrong_after_spoiling(world: World, spoil: str) -> list[int]:
    """Return what is wrong on a rank after one of them has been spoilt."""
    step = small(world, {"schedule": "1f1b", "microbatches": 4})
    step.step()
    assert step.check() == 0
    step.reset()
    run = step.layout.forward_backward
    assert run is not None

    def spoilt(microbatches: Any) -> Any:
        if spoil == "microbatches in another order":
            return run([*microbatches[2:], *microbatches[:2]])
        if spoil == "a microbatch twice":
            return run([*microbatches[:3], microbatches[0]])
        loss = run(microbatches)
        if world.rank == 0:
            gradient = step.layout.model.get_parameter("layers.0.ffn.up.weight").grad
            assert gradient is not None
            value = gradient.view(-1)[5]
            value.copy_(torch.nextafter(value, torch.tensor(1.0)))
        return loss

    object.__setattr__(step.layout, "forward_backward", spoilt)
    step.step()
    found = step.check()
    step.close()
    return [found]


def test_a_rank_holds_its_own_layers_alone(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_pp:names_held")
    assert {name.split(".")[1] for name in first if name.startswith("layers")} == {"0", "1"}
    assert {name.split(".")[1] for name in second if name.startswith("layers")} == {"2", "3"}
    assert {"tokens.weight", "positions.weight"} <= set(first)
    assert {"head.weight", "norm.weight"} <= set(second)
    assert not set(first) & set(second)


def names_held(world: World) -> list[str]:
    step = small(world, {"schedule": "1f1b", "microbatches": 4})
    names = [name for name, _ in step.layout.model.named_parameters()]
    step.close()
    return names


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        ("one bit", [[1], [0]]),
        ("a microbatch twice", None),
        ("microbatches in another order", None),
    ],
)
def test_the_gate_sees_one_bit(two_ranks: Ranks, spoil: str, wrong: list[list[int]] | None) -> None:
    """Sums of the same microbatches in another order differ in their last bits."""
    found = two_ranks.call("test_pp:wrong_after_spoiling", spoil=spoil)
    if wrong is not None:
        assert found == wrong
    else:
        assert all(one[0] > 0 for one in found)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb_v"])
def test_bytes_are_those_of_the_closed_form(two_ranks: Ranks, name: str) -> None:
    for sent, expected in two_ranks.call("test_pp:bytes_sent", params=of_schedule(name, 2)):
        assert sent == expected > 0


@pytest.mark.parametrize("name", schedules.NAMES)
def test_four_ranks_get_the_bits_of_one_process(four_ranks: Ranks, name: str) -> None:
    assert four_ranks.call("test_pp:wrong_twice", params=of_schedule(name, 4)) == [[0, 0]] * 4


@pytest.mark.parametrize("name", ["1f1b", "interleaved_zb", "dualpipe_v"])
def test_four_ranks_send_what_the_closed_form_says(four_ranks: Ranks, name: str) -> None:
    for sent, expected in four_ranks.call("test_pp:bytes_sent", params=of_schedule(name, 4)):
        assert sent == expected > 0
