"""Every call to a process group is counted, whoever makes it, and none moves anything where it is silenced."""

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench.world import World
from workloads.communication import OTHER, Silenced, counted, fake_twins
from workloads.training import TrainingStep

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64, "microbatch": 2}
PSI_BYTES = 4 * 30_016
LAYER, ROOT, ACTIVATION = 50_688, 18_688, 4_096
EXPECTED = {
    "ddp:prepare": {("dp", "all_reduce", PSI_BYTES, 2): 1},
    "fsdp:zero3": {
        ("dp", "all_gather", LAYER, 2): 4,
        ("dp", "all_gather", ROOT, 2): 2,
        ("dp", "reduce_scatter", LAYER, 2): 2,
        ("dp", "reduce_scatter", ROOT, 2): 1,
    },
    "tp:tp": {("tp", "all_reduce", ACTIVATION, 2): 8},
}
ALONE = [*EXPECTED, "fsdp:zero2", "tp:tp_sp", "zero1:prepare"]


def trained(world: World, name: str, **params: Any) -> TrainingStep:
    """Return a step that was taken twice: DDP makes its buckets anew in between."""
    module, _, function = name.partition(":")
    more = {"bucket_mb": 25.0, **params} if function == "prepare" else params
    step: TrainingStep = getattr(importlib.import_module(f"workloads.{module}"), function)(world, **SMALL, **more)
    for _ in range(2):
        step.reset()
        step.step()
    return step


def calls_of(world: World, name: str) -> Counter[tuple[str, str, int, int]]:
    step = trained(world, name)
    calls = counted(step.step, step.layout.axes)
    step.close()
    return Counter((call.axis, call.op, call.num_bytes, call.ranks) for call in calls)


def alone_in_silence(world: World, name: str) -> bool:
    """Let rank 0 take a step that no other takes."""
    step = trained(world, name)
    twins = fake_twins(step.layout.axes)
    if world.rank == 0:
        with Silenced(twins):
            step.step()
    world.barrier()
    for twin in twins.values():
        dist.destroy_process_group(twin)
    step.close()
    return True


def on_a_group_of_no_axis(world: World) -> list[Any]:
    calls = counted(lambda: dist.all_reduce(torch.ones(6), group=world.group), {})
    return [(call.axis, call.op, call.num_bytes, call.ranks) for call in calls]


@pytest.fixture(scope="module")
def expendable_ranks() -> Iterator[Ranks]:
    """Two ranks of this file's own: one that waits for another in vain leaves them useless."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_have_axis_operation_bytes_and_ranks(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.call("test_communication:calls_of", name=name) == [EXPECTED[name]] * 2


def test_a_call_on_a_group_of_no_axis_is_other(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_communication:on_a_group_of_no_axis") == [[(OTHER, "all_reduce", 24, 2)]] * 2


@pytest.mark.parametrize("name", ALONE)
def test_a_silenced_rank_finishes_a_step_alone(expendable_ranks: Ranks, name: str) -> None:
    assert expendable_ranks.call("test_communication:alone_in_silence", name=name) == [True, True]
