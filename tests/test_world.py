"""The world is joined and left cleanly; what ranks tell each other arrives, and rank 0 is the one that decides."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch._C._distributed_c10d import FileStore

from bench.world import World, _device, open_world

pytestmark = pytest.mark.measures

Alone = Callable[..., AbstractContextManager[World]]


def facts(world: World) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "size": world.size,
        "nodes": world.nodes,
        "device": str(world.device),
        "backends": (world.backend, dist.get_backend(world.group), dist.get_backend(world.control)),
        "own control": world.control is not world.group,
        "offsets": world.clock.offsets_ns,
        "sizes": (world.group.size(), world.control.size()),
    }


def summed(world: World, values: list[int]) -> int:
    return world.sum(values[world.rank])


def decided(world: World, values: list[list[float]]) -> list[float]:
    return world.decide(values[world.rank])


def gathered(world: World) -> list[object]:
    return world.gather({"rank": world.rank, "text": "x" * 1000 * (1 + world.rank), "none": None})


def stamps_at_barrier(world: World, late: int) -> tuple[int, int]:
    """Return when this rank came to the barrier and when it left; one rank comes late."""
    world.barrier()
    if world.rank == late:
        time.sleep(0.05)
    came = time.perf_counter_ns()
    world.barrier()
    return came, time.perf_counter_ns()


def synced(world: World) -> None:
    world.sync()


def test_a_world_knows_its_ranks_device_and_groups(two_ranks: Ranks) -> None:
    expected = {
        "size": 2,
        "nodes": 1,
        "device": "cpu",
        "backends": ("gloo", "gloo", "gloo"),
        "own control": True,
        "offsets": (0, 0),
        "sizes": (2, 2),
    }
    assert two_ranks.call("test_world:facts") == [{**expected, "rank": rank} for rank in (0, 1)]


@pytest.mark.parametrize("values", [[3, 4], [0, 0], [-5, 2], [1 << 60, 1]])
def test_a_sum_is_that_of_all_ranks_on_every_rank_and_exact(two_ranks: Ranks, values: list[int]) -> None:
    assert two_ranks.call("test_world:summed", values=values) == [sum(values)] * 2


@pytest.mark.parametrize("mine", [[7.0, -1.0], [0.1, 1e-300], [float(1 << 53), float("inf")]])
def test_rank_0_decides_whatever_the_others_think(two_ranks: Ranks, mine: list[float]) -> None:
    assert two_ranks.call("test_world:decided", values=[mine, [99.0, 99.0]]) == [mine, mine]


def test_every_rank_hears_every_item_in_rank_order(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_world:gathered")
    assert first == second
    assert [(item["rank"], len(item["text"]), item["none"]) for item in first] == [(0, 1000, None), (1, 2000, None)]


@pytest.mark.parametrize("late", [0, 1])
def test_nobody_leaves_a_barrier_before_the_last_has_come(two_ranks: Ranks, late: int) -> None:
    stamps = two_ranks.call("test_world:stamps_at_barrier", late=late)
    assert min(left for _, left in stamps) >= stamps[late][0]


def test_a_cpu_needs_no_waiting_for(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_world:synced") == [None, None]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Alone]:
    """This process as the only rank, which can join one world after another; what a test leaves open is closed."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)

    def join(seed: int = 0) -> AbstractContextManager[World]:
        store = FileStore(str(tmp_path / f"store{seed}"), 1)
        return open_world("gloo", "cpu", seed, timeout_seconds=30, store=store)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_world_is_left_at_the_end_and_another_can_be_joined(alone: Alone) -> None:
    for seed in (1, 2):
        with alone(seed) as world:
            assert (world.rank, world.size, world.nodes, world.seed) == (0, 1, 1, seed)
            assert dist.is_initialized()
        assert not dist.is_initialized()


def test_a_world_is_left_when_its_body_raises(alone: Alone) -> None:
    with pytest.raises(ZeroDivisionError), alone():
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_a_world_that_cannot_be_made_is_left_too(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_host_name() -> str:
        raise OSError("no name")

    monkeypatch.setattr(socket, "gethostname", no_host_name)
    with pytest.raises(OSError, match="no name"), alone():
        pytest.fail("there is no world")
    assert not dist.is_initialized()


def test_without_a_store_the_address_in_the_environment_is_the_meeting_point(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with open_world("gloo", "cpu", seed=0, timeout_seconds=30) as world:
        assert (world.rank, world.size) == (0, 1)
        assert world.sum(3) == 3


def test_nodes_are_the_host_names_that_ranks_tell_each_once(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(items: list[object], item: object, **_: object) -> None:
        items[:] = [item, "elsewhere", item]

    monkeypatch.setattr(dist, "all_gather_object", hear)
    with alone() as world:
        assert world.nodes == 2


def test_the_timeout_is_that_of_both_groups(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    for name in ("init_process_group", "new_group"):
        call = getattr(dist, name)

        def remember(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            given.append(kwargs["timeout"])
            return call(*args, **kwargs)

        monkeypatch.setattr(dist, name, remember)
    with alone():
        assert given == [timedelta(seconds=30)] * 2


def test_a_rank_takes_the_gpu_of_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than GPUs go round; without LOCAL_RANK the first GPU is taken. No GPU is needed to see it."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local, index in {"0": 0, "3": 3, "5": 1, None: 0}.items():
        if local is None:
            monkeypatch.delitem(os.environ, "LOCAL_RANK", raising=False)
        else:
            monkeypatch.setenv("LOCAL_RANK", local)
        assert _device("cuda") == torch.device("cuda", index)
        assert chosen.pop() == index
    assert _device("cpu") == torch.device("cpu")
    assert not chosen
