"""The calls of a step are counted by axis and operation, and can be silenced."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from parbench.bench.world.world import World
from parbench.workloads.step.sent_bytes import (
    OTHER,
    SentCall,
    Silenced,
    Tally,
    counted,
    counts_of,
    fake_twins,
)
from tests.support.ranks import Ranks
from tests.support.training_steps import build_trained_step

Call = tuple[str, str, int, int]

LAYER = 50_688
ROOT = 18_688
ACTIVATION = 4_096
CALLS: dict[str, dict[Call, int]] = {
    "ddp": {("dp", "all_reduce", 4 * 30_016, 2): 1},
    "zero3": {
        ("dp", "all_gather", LAYER, 2): 4,
        ("dp", "all_gather", ROOT, 2): 2,
        ("dp", "reduce_scatter", LAYER, 2): 2,
        ("dp", "reduce_scatter", ROOT, 2): 1,
    },
    "tp": {("tp", "all_reduce", ACTIVATION, 2): 8},
}
"""Calls of a step by axis, operation, bytes and ranks."""


def count_calls(world: World, name: str) -> Counter[Call]:
    step = build_trained_step(world, name, kv_heads=4)
    calls = counted(step.step, step.layout.axes)
    step.close()
    return Counter((call.axis, call.op, call.num_bytes, call.ranks) for call in calls)


@pytest.mark.parametrize("name", CALLS)
def test_counted_calls_of_step(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.call(f"{__name__}:count_calls", name=name) == [CALLS[name]] * 2


def step_on_rank_0(world: World, name: str) -> bool:
    """Let only rank 0 take a silenced step."""
    step = build_trained_step(world, name)
    twins = fake_twins(step.layout.axes)
    if world.rank == 0:
        with Silenced(twins):
            step.step()
    world.barrier()
    for twin in twins.values():
        dist.destroy_process_group(twin)
    step.close()
    return True


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "tp_sp"])
def test_silenced_step_needs_no_other_rank(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.call(f"{__name__}:step_on_rank_0", name=name) == [True, True]


def sent_call(axis: str, op: str, sent: float, by_data: bool = False) -> SentCall:
    return SentCall(axis=axis, op=op, num_bytes=int(sent), ranks=2, sent=sent, by_data=by_data)


def values(*tallies: Tally) -> dict[str, float | None]:
    return {name: metric.value for name, metric in counts_of(tallies).items()}


def test_counts_are_means_over_ranks() -> None:
    first = Tally.of(
        [
            sent_call("dp", "all_reduce", 8.0),
            sent_call("dp", "all_reduce", 4.0),
            sent_call("pp", "send", 6.0),
        ],
        ["dp", "tp"],
    )
    second = Tally.of([sent_call("dp", "all_reduce", 12.0), sent_call("pp", "recv", 0.0)], ["dp"])
    assert first.by_axis == {"dp": 12.0, "tp": 0.0, "pp": 6.0}
    assert values(first, second) == {
        "calls.dp": 1.5,
        "calls.tp": 0.0,
        "calls.pp": 1.0,
        "calls.dp.all_reduce": 1.5,
        "sent.dp.all_reduce": 12.0,
        "calls.pp.send": 0.5,
        "sent.pp.send": 3.0,
        "calls.pp.recv": 0.5,
        "sent.pp.recv": 0.0,
    }
    gather = {("dp", "all_gather"): (1, 5.0)}
    second = dataclasses.replace(second, by_op={**second.by_op, **gather})
    assert values(first, second)["calls.dp.all_gather"] == 0.5


def test_counts_leave_out_bytes_that_depend_on_data() -> None:
    even = Tally.of([sent_call("ep", "all_to_all", 8.0)], [])
    uneven = Tally.of([sent_call("ep", "all_to_all", 8.0, by_data=True)], [])
    assert values(even, even)["sent.ep.all_to_all"] == 8.0
    assert values(even, uneven) == {"calls.ep": 1.0, "calls.ep.all_to_all": 1.0}


def exchange_rows(world: World) -> list[tuple[str, float, bool]]:
    """Return the axis, sent bytes and dependence on data of calls with and without sizes."""
    rows, received = torch.ones(4, 2), torch.empty(4, 2)
    sizes = [1, 3] if world.rank == 0 else [3, 1]

    def exchange() -> None:
        dist.all_to_all_single(received, rows, group=world.group)
        dist.all_to_all_single(received, rows, sizes, sizes, group=world.group)

    calls = [*counted(exchange, {"ep": world.group}), *counted(exchange, {})]
    return [(call.axis, call.sent, call.by_data) for call in calls]


def test_exchange_with_sizes_depends_on_data(two_ranks: Ranks) -> None:
    even, uneven = (16.0, False), (24.0, True)
    expected = [("ep", *even), ("ep", *uneven), (OTHER, *even), (OTHER, *uneven)]
    assert two_ranks.call(f"{__name__}:exchange_rows") == [expected, expected]
