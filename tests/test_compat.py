"""The renamed calls move the same data under either name, and what torch keeps private does what it is used for."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import profile, record_function

from bench.compat import (
    all_gather_single,
    done_work,
    fake_group,
    forget_meshes,
    group_named,
    reduce_scatter_single,
    trace_events,
)
from bench.world import World

RENAMED = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


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


def in_a_part_of_the_world(world: World) -> tuple[list[float], list[float]]:
    """Use a group of one rank: the calls must not fall back to all ranks."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    everything, shard = torch.empty(1), torch.empty(1)
    all_gather_single(everything, torch.tensor([float(world.rank)]), groups[world.rank])
    reduce_scatter_single(shard, torch.tensor([float(world.rank)]), groups[world.rank])
    dist.destroy_process_group(groups[world.rank])
    return everything.tolist(), shard.tolist()


def call_deprecated(world: World, name: str) -> None:
    getattr(dist, name)(torch.empty(2), torch.empty(2))


def alone_on_a_fake_group(world: World) -> tuple[list[float], list[int], bool]:
    """Let rank 0 sum on a fake group of all ranks, in which no other takes part; also return its ranks."""
    group, tensor = fake_group(world.group), torch.full((3,), 5.0)
    if world.rank == 0:
        dist.all_reduce(tensor, group=group)
    world.barrier()
    found = tensor.tolist(), dist.get_process_group_ranks(group), group_named(group.group_name) is group
    dist.destroy_process_group(group)
    return found


def fake_groups_of_a_part(world: World) -> list[int]:
    """Return the ranks of a fake group of this rank alone, made while the other rank makes its own."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    fake = fake_group(groups[world.rank])
    ranks = dist.get_process_group_ranks(fake)
    for group in (fake, groups[world.rank]):
        dist.destroy_process_group(group)
    return ranks


def named(world: World) -> tuple[bool, bool, bool]:
    """Return whether the groups of the world are found by their names, and one that was given back no more."""
    group = dist.new_group([0, 1])
    name = group.group_name
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError):
        group_named(name)
    found = [group_named(group.group_name) is group for group in (world.group, world.control)]
    return world.group is not world.control, found[0], found[1]


def sharded_moments(world: World) -> tuple[list[int], list[float]]:
    """Return the sizes of the moments that this rank holds after a step of the sharding optimizer, and a weight."""
    from bench.compat import sharding_optimizer

    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (6, 4)]
    optimizer: Any = sharding_optimizer()(
        parameters, optimizer_class=torch.optim.Adam, process_group=world.group, lr=0.5
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sizes = [state["exp_avg"].numel() for state in optimizer.optim.state.values()]
    return sizes, [float(parameter[0].detach()) for parameter in parameters]


# of rank r: gathered is every rank's [1, 2, 3] + 10 r; scattered is 2 * arange + 100, rank r's third
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


EXPECTED = [([1, 2, 3, 11, 12, 13], [100, 102, 104]), ([1, 2, 3, 11, 12, 13], [106, 108, 110])]


def test_data_arrive_in_rank_order_without_a_warning(two_ranks: Ranks) -> None:
    """Warnings are errors on ranks, so a deprecated name would raise here."""
    assert two_ranks.call("test_compat:gathered_and_scattered") == EXPECTED


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="this torch has only the old names")
@pytest.mark.parametrize("name", RENAMED.values())
def test_the_old_names_warn_where_there_are_new_ones(two_ranks: Ranks, name: str) -> None:
    with pytest.raises(RankError, match="deprecated"):
        two_ranks.call("test_compat:call_deprecated", name=name)


def test_a_torch_with_only_the_old_names_moves_the_same(two_ranks: Ranks) -> None:
    for (called, results), expected in zip(two_ranks.call("test_compat:under_old_names"), EXPECTED, strict=True):
        assert called == list(RENAMED.values())
        assert results == expected


def test_the_group_is_the_one_given(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_compat:in_a_part_of_the_world") == [([0.0], [0.0]), ([1.0], [1.0])]


def test_a_fake_group_moves_nothing_and_waits_for_nobody(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_compat:alone_on_a_fake_group") == [([5.0] * 3, [0, 1], True)] * 2


def test_a_fake_group_is_of_the_same_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_compat:fake_groups_of_a_part") == [[0], [1]]


def test_a_group_is_found_by_its_name_while_it_lives(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_compat:named") == [(True, True, True)] * 2


def test_a_forgotten_mesh_takes_the_threads_of_its_groups_along(two_ranks: Ranks) -> None:
    """Any of DTensor's caches that still held it would hold them too."""
    for before, during, after in two_ranks.call("test_compat:threads_of_a_mesh"):
        assert during > before
        assert after == before


@pytest.mark.parametrize("many", [False, True])
def test_done_work_is_done_and_holds_its_tensors(many: bool) -> None:
    tensors = [torch.ones(2), torch.ones(3)] if many else [torch.ones(2)]
    boxed = done_work(tensors if many else tensors[0])
    assert isinstance(boxed, torch.ScriptObject)
    work = dist.Work.unbox(boxed)
    assert work.is_completed()
    assert work.wait()
    held = work.get_future().value()
    assert len(held) == len(tensors)
    assert all(one is other for one, other in zip(held, tensors, strict=True))


def test_the_sharding_optimizer_is_imported_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-c", "from bench.compat import sharding_optimizer; sharding_optimizer()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_sharding_optimizer_shares_out_moments_and_tells_all_ranks_the_weights(two_ranks: Ranks) -> None:
    (first, weights), (second, others) = two_ranks.call("test_compat:sharded_moments")
    assert sorted(first + second) == [4, 6]
    assert len(first) == len(second) == 1
    assert weights == others == pytest.approx([0.5, 0.5])


def test_named_ranges_are_told_from_operations() -> None:
    with profile() as profiler, record_function("mine"):
        torch.ones(2)
    annotations = {event.name: event.annotation for event in trace_events(profiler)}
    assert annotations["mine"]
    assert not annotations["aten::ones"]
