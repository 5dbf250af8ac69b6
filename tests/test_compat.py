"""The renamed calls move the same data under their new names and, where torch has only those, under the old ones."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks

from bench.compat import all_gather_single, reduce_scatter_single
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


# of rank r: gathered is every rank's [1, 2, 3] + 10 r; scattered is 2 * arange + 100, rank r's third
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
