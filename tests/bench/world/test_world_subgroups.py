"""A case is measured on the ranks that its group, group_index and concurrent say, with a load that ends with it."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from parbench.bench.operations import local as beside
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.catalogue import BACKGROUND
from parbench.bench.rank.runner import load_target
from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import StandBy, Subgroups, World
from tests.support.ranks import Ranks

BOTH = (0, 1)
KINDS = [str(kind) for kind in BACKGROUND.choices if kind != beside.NOTHING]


def parts_of(world: World, cases: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return for each case who is measured, who is active, and this rank's place in its group and its size."""
    found = [Subgroups(world).of(params) for params in cases]
    return [
        (part.ranks, part.active, part.world and (part.world.rank, part.world.size))
        for part in found
    ]


def sum_within(world: World, group: str) -> float:
    """Return the sum of global ranks, each plus 1, over this rank's group."""
    part = Subgroups(world).of({"group": group, "concurrent": True})
    assert part.world is not None
    one = torch.full((1,), float(world.global_rank + 1))
    dist.all_reduce(one, group=part.world.group)
    return float(one)


def made_once(world: World) -> tuple[bool, bool, bool]:
    """Return whether the same text means the same process group, another another, and the world none of its own."""
    parts = Subgroups(world)
    made = [parts.of({"group": text}).world for text in ("pairs", "pairs", "contiguous:2", "world")]
    first, again, other, whole = (part and part.group for part in made)
    return first is again, first is not other, whole is world.group


def test_a_case_is_measured_by_its_group_while_the_others_stand_by_or_do_the_same(
    two_ranks: Ranks,
) -> None:
    whole = ((BOTH, BOTH, (0, 2)), (BOTH, BOTH, (1, 2)))
    expected: list[tuple[dict[str, Any], tuple[Any, Any]]] = [
        ({}, whole),
        ({"group": "world"}, whole),
        ({"group": "pairs"}, whole),
        ({"group": "contiguous:1"}, (((0,), (0,), (0, 1)), ((0,), (0,), None))),
        ({"group": "contiguous:1", "group_index": 1}, (((1,), (1,), None), ((1,), (1,), (0, 1)))),
        (
            {"group": "contiguous:1", "group_index": 1, "concurrent": True},
            (((1,), BOTH, (0, 1)),) * 2,
        ),
    ]
    by_rank = two_ranks.call(
        "tests.bench.world.test_world_subgroups:parts_of", cases=[params for params, _ in expected]
    )
    for (params, wanted), *found in zip(expected, *by_rank, strict=True):
        assert tuple(found) == wanted, params


def test_traffic_stays_within_a_group_whose_process_group_is_made_once(two_ranks: Ranks) -> None:
    assert two_ranks.call("tests.bench.world.test_world_subgroups:sum_within", group="pairs") == [
        3.0,
        3.0,
    ]
    assert two_ranks.call(
        "tests.bench.world.test_world_subgroups:sum_within", group="contiguous:1"
    ) == [1.0, 2.0]
    assert (
        two_ranks.call("tests.bench.world.test_world_subgroups:made_once")
        == [(True, True, True)] * 2
    )


def wrong_barriers(world: World, concurrent: bool) -> int:
    """Check a barrier of this rank alone, or none; rank 1 comes late to its own."""
    part = Subgroups(world).of({"group": "contiguous:1", "concurrent": concurrent})
    if part.world is None:
        return 0
    barrier = load_target("parbench.bench.operations.collectives:barrier")(part.world)
    time.sleep(0.05 * world.rank)
    barrier.step()
    return barrier.check()


def test_a_barrier_of_a_group_waits_for_its_own_ranks_alone_and_so_does_its_check(
    two_ranks: Ranks,
) -> None:
    for concurrent in (False, True):
        assert two_ranks.call(
            "tests.bench.world.test_world_subgroups:wrong_barriers", concurrent=concurrent
        ) == [
            0,
            0,
        ]


def test_an_idle_rank_is_never_wrong_and_moves_nothing() -> None:
    idle = StandBy()
    for do in (idle.reset, idle.step, idle.close):
        do()
    assert (idle.check(), idle.describe()) == (0, Description())


def measured_beside(world: World, kind: str) -> tuple[bool, int, int]:
    """Return whether the load ran again and again, how much was wrong beside it, and how many threads it left."""
    prepare = load_target("parbench.bench.operations.collectives:all_reduce")
    operation = cast(Operation, prepare(world, size_bytes=1 << 16, dtype="float32"))
    threads, done, wrong = threading.active_count(), [0], 0
    made = beside._load

    def counted(*arguments: Any) -> Callable[[], object]:
        load = made(*arguments)

        def once() -> None:
            load()
            done[0] += 1

        return once

    with mock.patch.object(beside, "_load", counted), beside.background_load(kind, world):
        while any(world.gather(done[0] < 3)):  # on any rank
            wrong += checked_step(operation)
        wrong += checked_step(operation)
        time.sleep(0.05 * world.rank)  # ranks do not come to the end at once
    ran = done[0]
    time.sleep(0.02)
    return (
        ran >= 3 and done[0] == ran,
        wrong + checked_step(operation),
        threading.active_count() - threads,
    )


def checked_step(operation: Operation) -> int:
    operation.reset()
    operation.step()
    return operation.check()


def nothing_beside(world: World) -> tuple[int, int]:
    """Return how many process groups and threads nothing makes."""
    threads = threading.active_count()
    with (
        mock.patch("torch.distributed.new_group") as new_group,
        beside.background_load("nothing", world),
    ):
        started = threading.active_count() - threads
    return new_group.call_count, started


def broken_beside(world: World) -> tuple[bool, int]:
    """Return whether a thread runs while the block does, and how many are left after it broke."""
    threads, running = threading.active_count(), 0
    with suppress(ZeroDivisionError), beside.background_load("gemm", world):
        running = threading.active_count() - threads
        raise ZeroDivisionError
    return running > 0, threading.active_count() - threads


class OnDevice(World):
    """A world that says its device is CUDA's, with none."""

    def sync(self) -> None:
        return


def loaded_on_device(world: World, lasts_ms: list[float]) -> tuple[list[float], int]:
    """Return how long rounds were of a load that lasts so long on each rank's device, and how often it ran before."""
    calls = list[int]()
    place = OnDevice(**{**vars(world), "device": SimpleNamespace(type="cuda")})

    def load() -> None:
        calls.append(1)

    def on_own_stream(load: Callable[[], object], device: object) -> Callable[[int], float]:
        def take(times: int) -> float:
            time.sleep(0.001)
            return times * lasts_ms[world.rank]

        return take

    with (
        mock.patch.object(beside, "_load", return_value=load),
        mock.patch.object(beside, "_on_own_stream", on_own_stream),
        beside.background_load("all_reduce", place) as rounds,
    ):
        while any(world.gather(len(rounds) < 8)):
            time.sleep(0.001)
    return rounds[:8], len(calls)


def test_a_load_on_a_device_is_made_before_its_thread_and_grows_alike_on_all_ranks_to_five_ms(
    two_ranks: Ranks,
) -> None:
    found = two_ranks.call(
        "tests.bench.world.test_world_subgroups:loaded_on_device", lasts_ms=[1.0, 3.0]
    )
    assert found == [
        ([1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0], 1),
        ([3.0, 6.0, 12.0, 24.0, 24.0, 24.0, 24.0, 24.0], 1),
    ]


def test_a_load_has_the_threads_device_a_stream_and_events_of_its_own_and_waits_for_its_end_alone() -> (
    None
):
    with mock.patch.object(torch, "cuda") as cuda:
        cuda.Event.return_value.elapsed_time.return_value = 7.5
        take = beside._on_own_stream(lambda: cuda.load(), torch.device("cuda", 1))
        assert take(2) == 7.5
    asked = [name for name, *_ in cuda.mock_calls if "enter" not in name and "exit" not in name]
    made = ["set_device", "Stream", "Event", "Event"]
    done = [
        "stream",
        "Event().record",
        "load",
        "load",
        "Event().record",
        "Event().synchronize",
        "Event().elapsed_time",
    ]
    assert asked == made + done
    cuda.set_device.assert_called_once_with(torch.device("cuda", 1))
    cuda.Event.assert_called_with(enable_timing=True, blocking=True)


def test_a_load_runs_and_ends_on_every_rank_and_what_is_measured_stays_right(
    two_ranks: Ranks,
) -> None:
    for kind in KINDS:
        assert (
            two_ranks.call("tests.bench.world.test_world_subgroups:measured_beside", kind=kind)
            == [(True, 0, 0)] * 2
        ), kind


def test_nothing_beside_is_free_and_a_load_ends_where_what_is_measured_breaks(
    two_ranks: Ranks,
) -> None:
    assert two_ranks.call("tests.bench.world.test_world_subgroups:nothing_beside") == [
        (0, 0),
        (0, 0),
    ]
    assert two_ranks.call("tests.bench.world.test_world_subgroups:broken_beside") == [(True, 0)] * 2
