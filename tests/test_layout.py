"""A mesh gives back the groups that were made for it, and distributed tensors come whole or in part."""

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Shard, distribute_tensor

from bench.compat import group_named
from bench.world import World
from workloads.layout import Layout, local, make_mesh, whole


def parts(world: World) -> tuple[list[float], list[float]]:
    mesh, made = make_mesh(world, dp=world.size)
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    found = whole(tensor).tolist(), local(tensor).tolist()
    for group in made:
        torch.distributed.destroy_process_group(group)
    return found


def made_groups(world: World) -> tuple[list[int], bool]:
    """Return the sizes of the groups of a mesh of two axes, and whether the whole world is among those made."""
    mesh, made = make_mesh(world, outer=1, inner=world.size)
    sizes = [mesh.get_group(name).size() for name in ("outer", "inner")]
    has_world = distributed_c10d._get_default_group() in made
    for group in made:
        torch.distributed.destroy_process_group(group)
    return sizes, has_world


def groups_around_close(world: World, has_axes: bool) -> tuple[int, int, int, float]:
    """Return how many groups there are before, during and after a layout, one of whose two axes is the world; a sum."""
    before = len(distributed_c10d._world.pg_map)
    mesh, made = make_mesh(world, outer=1, inner=world.size) if has_axes else (None, ())
    model = nn.Linear(2, 2)
    layout = Layout(
        module=model,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        axes={"inner": world.group if mesh is None else mesh.get_group("inner")},
        data_rank=0,
        data_size=1,
        expected_bytes={},
        made_groups=made,
    )
    while_open = len(distributed_c10d._world.pg_map)
    names = [group.group_name for group in made]
    layout.close()
    for name in names:
        with pytest.raises(RuntimeError):
            group_named(name)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=world.group)
    return before, while_open, len(distributed_c10d._world.pg_map), float(total)


def test_a_tensor_comes_whole_and_in_part(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_layout:parts") == [([0, 1, 2, 3], [0, 1]), ([0, 1, 2, 3], [2, 3])]


def test_the_world_is_not_among_the_groups_that_were_made(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_layout:made_groups") == [([1, 2], False)] * 2


def test_a_closed_layout_gives_back_the_groups_that_were_made_for_it_alone(two_ranks: Ranks) -> None:
    for before, while_open, after, total in two_ranks.call("test_layout:groups_around_close", has_axes=True):
        assert (while_open, after, total) == (before + 1, before, 2)


def test_a_layout_on_the_world_gives_nothing_back(two_ranks: Ranks) -> None:
    for before, while_open, after, total in two_ranks.call("test_layout:groups_around_close", has_axes=False):
        assert (while_open, after, total) == (before, before, 2)


def test_a_plain_tensor_is_itself() -> None:
    tensor = torch.ones(2)
    assert whole(tensor) is tensor
    assert local(tensor) is tensor
