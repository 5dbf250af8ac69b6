"""The renamed calls move the same data under either name, and what torch keeps private does what it is used for."""

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

RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def gathered_and_scattered(world: World) -> tuple[list[float], list[float]]:
    """Return what all_gather and reduce_scatter leave on this rank, of data that no other rank has."""
    mine = torch.tensor([1.0, 2.0, 3.0]) + 10 * world.rank
    everything, shard = torch.empty(3 * world.size), torch.empty(3)
    all_gather_single(everything, mine, world.group)
    reduce_scatter_single(shard, torch.arange(3.0 * world.size) + 100 * world.rank, world.group)
    return everything.tolist(), shard.tolist()


def under_old_names(world: World) -> tuple[list[str], tuple[list[float], list[float]]]:
    """Make ``torch.distributed`` look as in 2.11, where the old names do not warn; also return the names called."""
    called = []

    def remember(name: str, call: Any) -> Any:
        def remembering(*args: Any, **kwargs: Any) -> None:
            called.append(name)
            call(*args, **kwargs)

        return remembering

    with pytest.MonkeyPatch.context() as patch:
        for new, old in RENAMED.items():
            patch.setattr(dist, old, remember(old, getattr(dist, new, getattr(dist, old))))
            patch.delattr(dist, new, raising=False)
        results = gathered_and_scattered(world)
    return called, results


def in_parts_and_fakes(world: World) -> dict[str, Any]:
    """Use groups of one rank, from which calls must not fall back to all ranks, and fake ones, on which nothing moves.

    On the fake group of all, rank 0 sums alone.
    """
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    everything, shard, mine = torch.empty(1), torch.empty(1), torch.tensor([float(world.rank)])
    all_gather_single(everything, mine, alone)
    reduce_scatter_single(shard, mine, alone)
    fake, fake_alone, tensor = fake_group(world.group), fake_group(alone), torch.full((3,), 5.0)
    if world.rank == 0:
        dist.all_reduce(tensor, group=fake)
    world.barrier()
    found = {
        "alone": (everything.tolist(), shard.tolist(), dist.get_process_group_ranks(fake_alone)),
        "fake": (tensor.tolist(), dist.get_process_group_ranks(fake)),
        "named": [
            group_named(group.group_name) is group for group in (fake, world.group, world.control)
        ],
    }
    name = fake.group_name
    for group in (fake, fake_alone, alone):
        dist.destroy_process_group(group)
    with pytest.raises(RuntimeError):
        group_named(name)  # it was given back
    return found


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def threads_of_a_mesh(world: World) -> tuple[int, int, int]:
    """Return the threads before a mesh of its own groups, with it, and after DTensor used and then forgot it."""
    gc.collect()
    before = threads()
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("outer", "inner"))["inner"]
    rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    sums = (rows * 2).sum()
    assert isinstance(sums, DTensor)
    assert sums.redistribute(placements=[Replicate()]).to_local().item() == 16.0
    during = threads()
    world.barrier()
    for group in {mesh.get_group(), mesh._get_root_mesh().get_group("outer")} - {world.group}:
        dist.destroy_process_group(group)
    del mesh, rows, sums, group
    forget_meshes()
    gc.collect()
    return before, during, threads()


# of rank r: gathered is every rank's [1, 2, 3] + 10 r; scattered is 2 * arange + 100, rank r's third
EXPECTED = [([1, 2, 3, 11, 12, 13], [100, 102, 104]), ([1, 2, 3, 11, 12, 13], [106, 108, 110])]


def test_data_arrive_in_rank_order_under_either_name_without_a_warning(two_ranks: Ranks) -> None:
    """Warnings are errors on ranks, so a deprecated name would raise here."""
    assert two_ranks.call("tests.bench.world.test_torch_compat:gathered_and_scattered") == EXPECTED
    for (called, results), expected in zip(
        two_ranks.call("tests.bench.world.test_torch_compat:under_old_names"), EXPECTED, strict=True
    ):
        assert called == list(RENAMED.values())
        assert results == expected


def test_the_group_is_the_one_given_and_a_fake_one_moves_nothing_and_waits_for_nobody(
    two_ranks: Ranks,
) -> None:
    both = {"fake": ([5.0] * 3, [0, 1]), "named": [True, True, True]}
    seen = two_ranks.call("tests.bench.world.test_torch_compat:in_parts_and_fakes")
    assert seen == [{"alone": ([float(rank)], [float(rank)], [rank]), **both} for rank in range(2)]


def test_a_forgotten_mesh_takes_the_threads_of_its_groups_along(two_ranks: Ranks) -> None:
    """Any of DTensor's caches that still held it would hold them too."""
    for before, during, after in two_ranks.call(
        "tests.bench.world.test_torch_compat:threads_of_a_mesh"
    ):
        assert during > before
        assert after == before


def test_done_work_is_done_and_holds_its_tensors() -> None:
    one, more = torch.ones(2), [torch.ones(2), torch.ones(3)]
    for given, tensors in ((one, [one]), (more, more)):
        boxed = done_work(given)
        assert isinstance(boxed, torch.ScriptObject)
        work = dist.Work.unbox(boxed)
        assert work.is_completed()
        assert work.wait()
        held = work.get_future().value()
        assert [id(tensor) for tensor in held] == [id(tensor) for tensor in tensors]


def test_named_ranges_are_told_from_operations() -> None:
    with profiling(torch.device("cpu")) as profiler, record_function("mine"):
        torch.ones(2)
    annotations = {event.name: event.annotation for event in trace_events(profiler)}
    assert annotations["mine"]
    assert not annotations["aten::ones"]


def test_the_version_of_nccl_is_asked_of_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libtorch_cuda.so"

        def ncclGetVersion(self, number: Any) -> int:  # noqa: N802
            number._obj.value = 22907
            return 0

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    for library, told in ((Library, "2.29.7"), (absent, "2.28.9 when torch was compiled")):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert nccl_version() == told
