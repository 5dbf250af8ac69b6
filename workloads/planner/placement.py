"""Where the ranks of an axis sit: how many, and how many of them on one node. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workloads.hybrid.constraints import INSIDE


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks of one group, and those of them that share a node."""

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
    """Return the place of a group along some axes; ranks are counted with the innermost axis fastest.

    Where a node is no multiple of what lies inside, some groups straddle two nodes: then only half are on one.
    """
    stride, ranks, on_node = 1, 1, 1
    for name, size in reversed([(name, size) for name, size in mesh.items() if name not in INSIDE]):
        if name in axes:
            ranks *= size
            on_node *= _sharing(stride, size, gpus_per_node)
        stride *= size
    return Place(ranks=ranks, on_node=on_node)


def place_of_experts(mesh: Mapping[str, int], gpus_per_node: int) -> Place:
    """Return the place of ``ep``: it takes the innermost ranks of the axes that see other tokens, whole axes first."""
    left, ranks, on_node, stride = mesh.get("ep", 1), 1, 1, 1
    for name, size in reversed([(name, size) for name, size in mesh.items() if name not in INSIDE]):
        if name in ("dp", "fsdp", "cp") and left > 1:
            taken = math.gcd(left, size)
            left //= taken
            ranks *= taken
            on_node *= _sharing(stride, taken, gpus_per_node)
        stride *= size
    return Place(ranks=ranks, on_node=on_node)


def _sharing(stride: int, size: int, gpus_per_node: int) -> int:
    """Return how many of ``size`` ranks, each ``stride`` from the next, share a node."""
    if size == 1 or stride >= gpus_per_node:
        return 1
    together = min(size, gpus_per_node // stride)
    return together if gpus_per_node % (stride * together) == 0 else max(1, together // 2)
