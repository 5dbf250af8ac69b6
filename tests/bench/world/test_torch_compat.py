"""Calls that torch renames and functions that torch keeps private work as expected."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import record_function

from parbench.bench.world.torch_compat import (
    all_gather_single,
    done_work,
    fake_group,
    forget_meshes,
    group_named,
    nccl_version,
    profiling,
    reduce_scatter_single,
    trace_events,
)
from parbench.bench.world.world import World
from tests.support.ranks import Ranks

THIS_MODULE = "tests.bench.world.test_torch_compat"
RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def gather_and_scatter(world: World, group: str = "world") -> tuple[list[float], list[float]]:
    """Gather this rank's number, and sum and scatter one number for each rank of the group."""
    groups = {"world": world.group}
    if group == "single":
        singles = [dist.new_group([rank]) for rank in range(world.size)]
        groups["single"] = singles[world.rank]
    size = groups[group].size()
    gathered = torch.empty(size)
    shard = torch.empty(1)
    all_gather_single(gathered, torch.tensor([1.0 + world.rank]), groups[group])
    numbers = torch.arange(float(size)) + 10 * (1 + world.rank)
    reduce_scatter_single(shard, numbers, groups[group])
    return gathered.tolist(), shard.tolist()


def gather_and_scatter_with_old_names(world: World) -> tuple[list[float], list[float]]:
    """Use ``torch.distributed`` of 2.11, which has only the old names and does not warn."""
    with pytest.MonkeyPatch.context() as patch:
        for new, old in RENAMED.items():
            patch.setattr(dist, old, getattr(dist, new, getattr(dist, old)))
            patch.delattr(dist, new, raising=False)
        return gather_and_scatter(world)


@pytest.mark.parametrize("function", ["gather_and_scatter", "gather_and_scatter_with_old_names"])
def test_renamed_collectives_work(two_ranks: Ranks, function: str) -> None:
    """Ranks treat warnings as errors, so a deprecated name would raise."""
    results = two_ranks.call(f"{THIS_MODULE}:{function}")
    assert results == [([1.0, 2.0], [30.0]), ([1.0, 2.0], [32.0])]


def test_renamed_collectives_use_the_group(two_ranks: Ranks) -> None:
    results = two_ranks.call(f"{THIS_MODULE}:gather_and_scatter", group="single")
    assert results == [([1.0], [10.0]), ([2.0], [20.0])]


def use_fake_group(world: World) -> tuple[list[float], list[int], bool]:
    """Return a sum, which only rank 0 computes, over a fake group, its ranks, and its lookup."""
    fake = fake_group(world.group)
    tensor = torch.full((3,), 5.0)
    if world.rank == 0:
        dist.all_reduce(tensor, group=fake)
    world.barrier()
    ranks = dist.get_process_group_ranks(fake)
    is_found = group_named(fake.group_name) is fake
    name = fake.group_name
    dist.destroy_process_group(fake)
    with pytest.raises(RuntimeError):
        group_named(name)
    return tensor.tolist(), ranks, is_found


def test_fake_group_moves_nothing(two_ranks: Ranks) -> None:
    result = ([5.0, 5.0, 5.0], [0, 1], True)
    assert two_ranks.call(f"{THIS_MODULE}:use_fake_group") == [result, result]


def count_threads() -> int:
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


def count_threads_around_mesh(world: World) -> tuple[int, int, int]:
    """Return the threads before a mesh, with it, and after it is forgotten."""
    before = count_threads()
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("outer", "inner"))["inner"]
    rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    total = rows.sum()
    assert isinstance(total, DTensor)
    assert total.redistribute(placements=[Replicate()]).to_local().item() == 8.0
    during = count_threads()
    world.barrier()
    groups = {mesh.get_group(), mesh._get_root_mesh().get_group("outer")} - {world.group}
    while groups:
        dist.destroy_process_group(groups.pop())
    del mesh, rows, total
    forget_meshes()
    return before, during, count_threads()


def test_forgotten_mesh_ends_its_threads(two_ranks: Ranks) -> None:
    for before, during, after in two_ranks.call(f"{THIS_MODULE}:count_threads_around_mesh"):
        assert during > before
        assert after == before


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2), torch.ones(3)]])
def test_done_work_is_complete_and_keeps_tensors(value: Any) -> None:
    boxed = done_work(value)
    assert isinstance(boxed, torch.ScriptObject)
    work = dist.Work.unbox(boxed)
    assert work.is_completed()
    assert work.wait()
    tensors = value if isinstance(value, list) else [value]
    assert list(map(id, work.get_future().value())) == list(map(id, tensors))


def test_annotations_differ_from_operations() -> None:
    with profiling(torch.device("cpu")) as profiler, record_function("mine"):
        torch.ones(2)
    annotations = {event.name: event.annotation for event in trace_events(profiler)}
    assert annotations["mine"]
    assert not annotations["aten::ones"]


class LoadedNccl:
    """A loaded library of NCCL 2.29.7."""

    def __init__(self, name: str) -> None:
        assert name == "libtorch_cuda.so"

    def ncclGetVersion(self, number: Any) -> int:  # noqa: N802 - the name in the library
        number._obj.value = 22907
        return 0


def test_nccl_version_is_that_of_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", LoadedNccl)
    assert nccl_version() == "2.29.7"


def test_nccl_version_without_library_is_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", raise_error)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert nccl_version().startswith("2.28.9 ")
