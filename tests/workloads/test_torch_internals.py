"""Functions that torch keeps private work as training steps need them."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parbench.bench.world.world import World
from parbench.workloads.torch_internals import (
    find_group,
    forget_meshes,
    make_fake_group,
)
from tests.support.ranks import Ranks

THIS_MODULE = "tests.workloads.test_torch_internals"


def use_fake_group(world: World) -> tuple[list[float], list[int]]:
    """Return a sum over a fake group, which only rank 0 computes, and the group's ranks."""
    group = make_fake_group(world.group)
    name = group.group_name
    tensor = torch.full((3,), 5.0)
    if world.rank == 0:
        dist.all_reduce(tensor, group=group)
    world.barrier()
    ranks = dist.get_process_group_ranks(group)
    assert find_group(name) is group
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError):
        find_group(name)
    return tensor.tolist(), ranks


def test_fake_group_moves_nothing(two_ranks: Ranks) -> None:
    result = ([5.0, 5.0, 5.0], [0, 1])
    assert two_ranks.call(f"{THIS_MODULE}:use_fake_group") == [result, result]


def count_threads() -> int:
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


def count_threads_around_mesh(world: World) -> tuple[int, int]:
    """Return the threads that a mesh starts, and those that remain after it is forgotten."""
    initial = count_threads()
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("outer", "inner"))["inner"]
    rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    total = rows.sum()
    assert isinstance(total, DTensor)
    assert total.redistribute(placements=[Replicate()]).to_local().item() == 8.0
    started = count_threads() - initial
    world.barrier()
    groups = {mesh.get_group(), mesh._get_root_mesh().get_group("outer")} - {world.group}
    while groups:
        dist.destroy_process_group(groups.pop())
    del mesh, rows, total
    forget_meshes()
    return started, count_threads() - initial


def test_forgotten_mesh_ends_its_threads(two_ranks: Ranks) -> None:
    for started, remaining in two_ranks.call(f"{THIS_MODULE}:count_threads_around_mesh"):
        assert started > 0
        assert remaining == 0
