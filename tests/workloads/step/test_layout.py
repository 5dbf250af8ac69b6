"""Groups of a step's axes."""

from parbench.bench.world.world import World
from parbench.workloads.step.layout import group_of_mine
from tests.support.ranks import Ranks

THIS_MODULE = "tests.workloads.step.test_layout"


def has_own_group_of_all_ranks(world: World) -> bool:
    return group_of_mine(world, [range(world.size)]) is not world.group


def test_axis_of_all_ranks_has_its_own_group(two_ranks: Ranks) -> None:
    """Bytes are counted by group, and another axis may use the group of the world."""
    assert two_ranks.call(f"{THIS_MODULE}:has_own_group_of_all_ranks") == [True, True]
