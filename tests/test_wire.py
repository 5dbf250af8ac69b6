"""What leaves a rank is counted without what it keeps, of uneven and of even all-to-alls."""

import torch
import torch.distributed as dist
from ranks import Ranks

from bench.world import World
from workloads.experts.wire import wired


def sent(world: World) -> list[dict[str, float]]:
    """Return the bytes of an uneven and an even all-to-all, an empty one, and a sum over all ranks."""
    sends = [[1, 3], [0, 2]][world.rank]
    receives = [[1, 0], [3, 2]][world.rank]
    x = torch.zeros(sum(sends), 5)

    def uneven() -> None:
        dist.all_to_all_single(torch.empty(sum(receives), 5), x, receives, sends, group=world.group)

    def even() -> None:
        dist.all_to_all_single(torch.empty(4, 2), torch.zeros(4, 2), group=world.group)

    def empty() -> None:
        dist.all_to_all_single(torch.empty(0, 2), torch.zeros(0, 2), [0, 0], [0, 0], group=world.group)

    def summed() -> None:
        dist.all_reduce(torch.zeros(8), group=world.group)

    axes = {"ep": world.group}
    return [wired(step, axes) for step in (uneven, even, empty, summed)]


def test_rows_for_other_ranks_count_and_own_ones_do_not(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_wire:sent")
    assert [one["ep"] for one in first] == [3 * 5 * 4, 2 * 2 * 4, 0, 8 * 4]
    assert [one["ep"] for one in second] == [0, 2 * 2 * 4, 0, 8 * 4]


def sent_elsewhere(world: World) -> dict[str, float]:
    return wired(lambda: dist.all_reduce(torch.zeros(8), group=world.group), {"ep": world.control})


def test_what_goes_over_no_axis_is_told_apart(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_wire:sent_elsewhere") == [{"ep": 0.0, "other": 32.0}] * 2
