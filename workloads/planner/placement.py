"""Where the ranks of a group sit: how many, and how many of them on one node. Pure.

Ranks are counted with the innermost axis fastest, and rank r is on node r // ``gpus_per_node``. Of an axis' groups the
one that reaches most nodes tells, for all of them wait for it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from workloads.mesh.axes import multiplied

Digit = tuple[int, int, bool]
"""A digit of a rank's number: its stride, its size, and whether the group's ranks differ in it."""
_CACHED = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks of one group, and those of them that share a node: the mean, counted up, where nodes have not alike."""

    ranks: int
    on_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group reaches."""
        return -(-self.ranks // self.on_node)

    @property
    def inside(self) -> bool:
        """Whether it stays inside one node."""
        return self.on_node >= self.ranks

    @property
    def words(self) -> str:
        """Where, for people."""
        return "inside a node" if self.inside else f"across {self.nodes} nodes, {self.on_node} a node"


def place_of(mesh: Mapping[str, int], axes: tuple[str, ...], gpus_per_node: int) -> Place:
    """Return the place of a group along some axes."""
    return _place_along(tuple(multiplied(mesh).items()), axes, gpus_per_node)


@lru_cache(maxsize=_CACHED)
def _place_along(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], gpus_per_node: int) -> Place:
    digits = strided(reversed(mesh))
    return place_of_digits([(stride, size, name in axes) for name, (stride, size) in digits.items()], gpus_per_node)


def place_of_digits(digits: Iterable[Digit], gpus_per_node: int) -> Place:
    """Return the place of a group from all digits of a rank's number, the innermost first.

    Once a stride is a multiple of a node, ranks that differ there share none, and the rest is the same on each.
    """
    near, apart = [], 1
    for stride, size, member in digits:
        again = gpus_per_node // math.gcd(gpus_per_node, stride)  # ranks after which a node begins anew
        together, rounds = (again, size // again) if size % again == 0 else (size, 1)
        near.append((stride, together, member))
        apart *= rounds if member else 1
    ranks = math.prod(size for _, size, member in near if member)
    return _spread(ranks, _most_nodes(tuple(near), gpus_per_node), apart)


@lru_cache(maxsize=_CACHED)
def _most_nodes(digits: tuple[Digit, ...], gpus_per_node: int) -> int:
    """Return the nodes of the group that reaches most: its ranks written out from wherever on a node it may begin."""
    mine = offsets((stride, size) for stride, size, member in digits if member)
    begins = {0}
    for stride, size, member in digits:
        if not member:
            begins = {(begin + i * stride) % gpus_per_node for begin in begins for i in range(size)}
    return max(len({(begin + offset) // gpus_per_node for offset in mine}) for begin in begins)


def place_of_groups(groups: Iterable[list[int]], begins: Iterable[int], gpus_per_node: int) -> Place:
    """Return the place of groups that are written out, each of which is there again from every one of ``begins``."""
    found = list(groups)
    on = {begin % gpus_per_node for begin in begins}
    nodes = max(len({(begin + rank) // gpus_per_node for rank in ranks}) for ranks in found for begin in on)
    return _spread(len(found[0]), nodes, 1)


def strided(sizes: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return the stride and the size of each of some digits by name, which come innermost first."""
    found, stride = {}, 1
    for name, size in sizes:
        found[name] = (stride, size)
        stride *= size
    return found


def offsets(digits: Iterable[tuple[int, int]]) -> list[int]:
    """Return the ranks that strides and sizes count, the first digit fastest."""
    found = [0]
    for stride, size in digits:
        found = [i * stride + rank for i in range(size) for rank in found]
    return found


def _spread(ranks: int, nodes: int, apart: int) -> Place:
    return Place(ranks=ranks * apart, on_node=-(-ranks // nodes))
