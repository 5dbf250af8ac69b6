"""Ranks join a world, form groups of it, and agree on decisions and on one clock."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from parbench.bench.operations.collectives import Barrier
from parbench.bench.world import world as world_module
from parbench.bench.world.world import (
    Clock,
    World,
    calibrate_clocks,
    make_group,
    open_world,
    select_subgroup,
)
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error

THIS_MODULE = "tests.bench.world.test_world"
SHIFT_NS = 5_000_000


def describe_world(world: World) -> dict[str, Any]:
    proposal = [7.0, 1e-300, float("inf")] if world.rank == 0 else [9.0, 9.0, 9.0]
    return {
        "ranks": (world.rank, world.global_rank, world.size),
        "hosts": world.hosts,
        "backends": (world.backend, dist.get_backend(world.control)),
        "has control group": world.control is not world.group,
        "decision": world.broadcast_from_rank_0(proposal),
        "gathered": world.gather({"rank": world.rank, "text": "x" * 1000 * world.rank}),
        "clock": calibrate_clocks(world.rank, world.size, world.control),
    }


def test_ranks_exchange_objects_and_decisions(two_ranks: Ranks) -> None:
    descriptions = two_ranks.call(f"{THIS_MODULE}:describe_world")
    host = socket.gethostname()
    clock = Clock(offsets_ns=(0, 0), uncertainty_ns=0, method="one host, one monotonic clock")
    for rank, description in enumerate(descriptions):
        assert description == {
            "ranks": (rank, rank, 2),
            "hosts": (host, host),
            "backends": ("gloo", "gloo"),
            "has control group": True,
            "decision": [7.0, 1e-300, float("inf")],
            "gathered": [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}],
            "clock": clock,
        }


Join = Callable[[], AbstractContextManager[World]]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Join]:
    """A function that joins a new world, of which this process is the only rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    stores = iter(range(10))

    def join_world() -> AbstractContextManager[World]:
        store = FileStore(str(tmp_path / f"store{next(stores)}"), 1)
        return open_world("gloo", "cpu", seed=3, timeout_seconds=30, store=store)

    yield join_world
    if dist.is_initialized():
        dist.destroy_process_group()


def test_world_is_left_after_an_error_and_joined_again(join: Join) -> None:
    with pytest.raises(ZeroDivisionError), join():
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with join() as world:
        assert world.seed == 3
    assert not dist.is_initialized()


def read_timeout(group: dist.ProcessGroup) -> timedelta:
    options: Any = group._get_backend(torch.device("cpu")).options
    timeout: timedelta = options._timeout
    return timeout


def test_timeout_applies_to_every_group(join: Join) -> None:
    """Also to those of a mesh, which takes no timeout."""
    replace_default_timeout = distributed_c10d.default_pg_timeout
    with join() as world:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        for group in (world.group, world.control, dist.new_group(), *mesh.get_all_groups()):
            assert read_timeout(group) == timedelta(seconds=30)
    assert distributed_c10d.default_pg_timeout == replace_default_timeout


@pytest.mark.parametrize(("local_rank", "index"), [(None, 0), ("5", 1)])
def test_rank_uses_gpu_of_its_place(
    join: Join, monkeypatch: pytest.MonkeyPatch, local_rank: str | None, index: int
) -> None:
    """More ranks than the four GPUs share them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert world_module._select_device("cuda") == torch.device("cuda", index)


def test_rank_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "torch finds no GPU" in usage_error(world_module._select_device, "cuda")


Membership = tuple[tuple[int, ...], tuple[int, ...], int | None, float | None]
"""The measured ranks, the active ranks, the rank in its group, and a sum over the group."""


def measure_membership(world: World, params: dict[str, Any]) -> Membership:
    """Return the part of this rank, with the sum over its group of each global rank plus one."""
    subgroup = select_subgroup(world, params)
    if subgroup.world is None:
        return subgroup.ranks, subgroup.active, None, None
    number = torch.tensor([1.0 + world.global_rank])
    dist.all_reduce(number, group=subgroup.world.group)
    return subgroup.ranks, subgroup.active, subgroup.world.rank, float(number)


ONE_RANK = {"group": "dp=2 tp=1:tp", "group_index": 1}


@pytest.mark.parametrize(
    ("params", "first", "second"),
    [
        ({}, ((0, 1), (0, 1), 0, 3.0), ((0, 1), (0, 1), 1, 3.0)),
        ({"group": "pairs"}, ((0, 1), (0, 1), 0, 3.0), ((0, 1), (0, 1), 1, 3.0)),
        (ONE_RANK, ((1,), (1,), None, None), ((1,), (1,), 0, 2.0)),
        ({**ONE_RANK, "concurrent": True}, ((1,), (0, 1), 0, 1.0), ((1,), (0, 1), 0, 2.0)),
    ],
)
def test_subgroup_has_measured_and_active_ranks(
    two_ranks: Ranks, params: dict[str, Any], first: Membership, second: Membership
) -> None:
    target = f"{THIS_MODULE}:measure_membership"
    assert two_ranks.call(target, params=params) == [first, second]


def count_process_groups(world: World, groups: list[str]) -> int:
    """Return the number of calls that make process groups, a partition at once."""
    make_groups = dist.new_subgroups_by_enumeration
    with mock.patch.object(dist, make_groups.__name__, wraps=make_groups) as counted:
        for group in groups:
            select_subgroup(world, {"group": group})
    return counted.call_count


@pytest.mark.parametrize(
    ("groups", "count"), [(["dp=2 tp=1:tp", "tp=1 dp=2:tp"], 1), (["pairs", "node"], 0)]
)
def test_process_group_is_made_once(two_ranks: Ranks, groups: list[str], count: int) -> None:
    """Texts with the same ranks share a group, and a group of all ranks is the world's own."""
    counts = two_ranks.call(f"{THIS_MODULE}:count_process_groups", groups=groups)
    assert counts == [count, count]


def list_splits(world: World) -> tuple[list[Any], list[Any]]:
    """Return the partitions that NCCL splits, and this rank's group of each text."""
    splits: list[list[list[int]]] = []

    def split(*, split_ranks: list[list[int]]) -> str:
        splits.append(split_ranks)
        return f"group {len(splits)}"

    groups: list[Any] = []
    all_ranks: Any = "all"
    nccl_world = replace(world, backend="nccl", group=all_ranks, process_groups={})
    with mock.patch.multiple(dist, split_group=split, new_subgroups_by_enumeration=None):
        for text in ("pairs", "dp=2 tp=2:dp", "pairs", "dp=4:dp"):
            own_world = select_subgroup(nccl_world, {"group": text, "concurrent": True}).world
            assert own_world is not None
            groups.append((own_world.group, own_world.rank, own_world.size))
    return splits, groups


def test_nccl_splits_all_groups_in_one_call(four_ranks: Ranks) -> None:
    _, _, (splits, groups), _ = four_ranks.call(f"{THIS_MODULE}:list_splits")
    assert splits == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert groups == [("group 1", 0, 2), ("group 2", 1, 2), ("group 1", 0, 2), ("all", 2, 4)]


def test_groups_end_with_the_world(join: Join) -> None:
    with join() as world:
        make_group(world, ((0,),))
    assert not distributed_c10d._world.pg_map


def check_barrier_of_single_rank(world: World) -> int:
    """Check a barrier of each rank's own group, to which rank 1 comes late."""
    subgroup = select_subgroup(world, {"group": "dp=2 tp=1:tp", "concurrent": True})
    assert subgroup.world is not None
    barrier = Barrier(subgroup.world)
    time.sleep(0.02 * world.rank)
    barrier.step()
    return barrier.check()


def test_barrier_of_group_ignores_other_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.call(f"{THIS_MODULE}:check_barrier_of_single_rank") == [0, 0]


def calibrate_shifted(world: World, kernels: list[str], shifts_ns: list[int]) -> Clock:
    """Calibrate ranks on these kernels, whose clocks are ahead by these times."""

    def read_clock() -> int:
        return time.perf_counter_ns() + shifts_ns[world.rank]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "read_text", lambda path: kernels[world.rank])
        patch.setattr(world_module, "time", SimpleNamespace(perf_counter_ns=read_clock))
        return calibrate_clocks(world.rank, world.size, world.control)


def test_clock_offsets_are_within_uncertainty(four_ranks: Ranks) -> None:
    """Ranks 1 and 2 share a kernel and so a clock. The last host was booted much later."""
    shifts_ns = [SHIFT_NS, 0, 0, -(10**15)]
    arguments = {"kernels": ["a", "b", "b", "c"], "shifts_ns": shifts_ns}
    clock, *others = four_ranks.call(f"{THIS_MODULE}:calibrate_shifted", **arguments)
    assert others == [clock] * 3
    assert clock.uncertainty_ns > 0
    assert clock.offsets_ns[1] == clock.offsets_ns[2]
    for offset_ns, shift_ns in zip(clock.offsets_ns, shifts_ns, strict=True):
        assert abs(offset_ns - (shift_ns - SHIFT_NS)) <= clock.uncertainty_ns


def renew_clock(world: World, age_seconds: float) -> tuple[Clock, Clock]:
    """Return a clock of that age on rank 0, 5 ms off, and the clock after a refresh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "read_text", lambda path: f"kernel {world.rank}")
        clock = calibrate_clocks(world.rank, world.size, world.control)
        taken_ns = clock.taken_ns - int(age_seconds * 1e9) if world.rank == 0 else 0
        offsets_ns = (0, clock.offsets_ns[1] + SHIFT_NS)
        two_hosts = replace(
            world, clock=replace(clock, taken_ns=taken_ns, offsets_ns=offsets_ns)
        )
        aged = two_hosts.clock
        two_hosts.recalibrate_stale_clock()
        return aged, two_hosts.clock


@pytest.mark.parametrize("is_old", [False, True])
def test_old_clock_is_renewed(two_ranks: Ranks, is_old: bool) -> None:
    """Rank 0 decides for all ranks."""
    age_seconds = 6.0 if is_old else 1.0
    target = f"{THIS_MODULE}:renew_clock"
    on_rank_0, on_rank_1 = two_ranks.call(target, age_seconds=age_seconds)
    clock, refreshed = on_rank_0
    assert (refreshed == on_rank_1[1]) is is_old
    assert (refreshed.taken_ns - clock.taken_ns > 6e9) is is_old
    assert (refreshed.uncertainty_ns > 0.9 * SHIFT_NS) is is_old, "the drift adds to it"
