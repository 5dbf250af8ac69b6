"""Collectives that torch renames."""

import pytest
import torch
import torch.distributed as dist

from parbench.bench.world.torch_compat import (
    all_gather_single,
    reduce_scatter_single,
)
from parbench.bench.world.world import World
from tests.support.ranks import Ranks

THIS_MODULE = "tests.bench.world.test_torch_compat"
RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def gather_and_scatter(world: World) -> tuple[list[float], list[float]]:
    """Gather this rank's number, and sum and scatter one number for each rank."""
    gathered = torch.empty(world.size)
    shard = torch.empty(1)
    all_gather_single(gathered, torch.tensor([1.0 + world.rank]), world.group)
    numbers = torch.arange(float(world.size)) + 10 * (1 + world.rank)
    reduce_scatter_single(shard, numbers, world.group)
    return gathered.tolist(), shard.tolist()


def gather_and_scatter_with_old_names(world: World) -> tuple[list[float], list[float]]:
    """Use ``torch.distributed`` of 2.11, which has only the old names and does not warn."""
    with pytest.MonkeyPatch.context() as patch:
        for new, old in RENAMED.items():
            function = getattr(dist, new, None) or getattr(dist, old)
            patch.setattr(dist, old, function)
            patch.delattr(dist, new, raising=False)
        return gather_and_scatter(world)


@pytest.mark.parametrize(
    "function", ["gather_and_scatter", "gather_and_scatter_with_old_names"]
)
def test_renamed_collectives_work(two_ranks: Ranks, function: str) -> None:
    """Ranks treat warnings as errors, so a deprecated name would raise."""
    results = two_ranks.call(f"{THIS_MODULE}:{function}")
    assert results == [([1.0, 2.0], [30.0]), ([1.0, 2.0], [32.0])]
