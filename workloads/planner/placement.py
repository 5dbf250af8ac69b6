"""Where the ranks of a group sit: how many, and how many of them on one node. Pure.

Ranks are counted with the innermost axis fastest, and rank r is on node r // ``gpus_per_node``. Of an axis' groups the
one that reaches most nodes tells, for all of them wait for it. ``ep`` takes blocks of neighbours in the order of dp,
fsdp and cp, whatever the order of the mesh, as ``workloads.mesh.axes`` deals them out: a rank's number there reads
(dp, fsdp, cp, ep), of dp, fsdp and cp what ``ep`` leaves.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from workloads.mesh.axes import DATA, multiplied

Digit = tuple[int, int, bool]
"""A digit of a rank's number: its stride, its size, and whether the group's ranks differ in it."""
_CACHED = 1 << 14
# along what differ the ranks that deal out a layer's experts, that shard the same ones, that hold the same shards
_OF_EXPERTS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("ep",): ("ep",),
    ("expert_shards",): ("fsdp",),
    ("edp",): ("dp", "cp", "tp"),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks of one group, and those of them that share a node: the mean, counted up, where nodes have not alike."""

    ranks: int
    on_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.on_node)

    @property
    def inside(self) -> bool:
        return self.on_node >= self.ranks

    @property
    def words(self) -> str:
        return "inside a node" if self.inside else f"across {self.nodes} nodes, {self.on_node} a node"


def place_of(mesh: Mapping[str, int], group: tuple[str, ...], gpus_per_node: int) -> Place:
    """Return the place of a group along some axes, or of one of a mixture's own: ``ep``, ``expert_shards``, ``edp``."""
    along = _OF_EXPERTS.get(group)
    ep = 1 if along is None else mesh.get("ep", 1)
    return _place(tuple(multiplied(mesh).items()), ep, along or group, gpus_per_node)


def _left(mesh: Mapping[str, int], ep: int) -> tuple[dict[str, int], bool]:
    """Return what ``ep`` leaves of cp, fsdp and dp in turn, and whether it takes each whole before the next."""
    left, whole = {}, True
    for name in reversed(DATA):
        size = mesh.get(name, 1)
        taken = math.gcd(ep, size)
        whole = whole and taken in (ep, size)
        left[name] = size // taken
        ep //= taken
    return left, whole


@lru_cache(maxsize=_CACHED)
def _place(axes: tuple[tuple[str, int], ...], ep: int, along: tuple[str, ...], gpus_per_node: int) -> Place:
    """Split each axis into the digit that ``ep`` takes, the inner one, and the one it leaves; or write ranks out."""
    left, whole = _left(dict(axes), ep)
    strides = _strided(reversed(axes))
    if not whole:
        return _written_out(strides, _strided([("ep", ep), *left.items()]), along, gpus_per_node)
    digits: list[Digit] = []
    for name, (stride, size) in strides.items():
        taken = size // left.get(name, size)
        digits += [(stride, taken, "ep" in along), (stride * taken, size // taken, name in along)]
    # once a stride is a multiple of a node, ranks that differ there share none, and the rest is the same on each
    near, apart = [], 1
    for stride, size, member in digits:
        again = gpus_per_node // math.gcd(gpus_per_node, stride)  # ranks after which a node begins anew
        together, rounds = (again, size // again) if size % again == 0 else (size, 1)
        near.append((stride, together, member))
        apart *= rounds if member else 1
    ranks = math.prod(size for _, size, member in near if member)
    return Place(ranks=ranks * apart, on_node=-(-ranks // _most_nodes(tuple(near), gpus_per_node)))


@lru_cache(maxsize=_CACHED)
def _most_nodes(digits: tuple[Digit, ...], gpus_per_node: int) -> int:
    """Return the nodes of the group that reaches most: its ranks written out from wherever on a node it may begin."""
    mine = _offsets((stride, size) for stride, size, member in digits if member)
    begins = {0}
    for stride, size, member in digits:
        if not member:
            begins = {(begin + i * stride) % gpus_per_node for begin in begins for i in range(size)}
    return max(len({(begin + offset) // gpus_per_node for offset in mine}) for begin in begins)


def _written_out(
    strides: Mapping[str, tuple[int, int]],
    numbers: Mapping[str, tuple[int, int]],
    along: tuple[str, ...],
    gpus_per_node: int,
) -> Place:
    """Return the place by every rank of one pipeline stage and tensor rank; ``numbers`` count those of dp, fsdp, cp."""
    data = _offsets(strides[name] for name in reversed(DATA) if name in strides)
    within = _offsets(digit for name, digit in strides.items() if name not in DATA and name in along)
    begins = _offsets(digit for name, digit in strides.items() if name not in DATA and name not in along)
    mine = _offsets(digit for name, digit in numbers.items() if name in along)
    firsts = _offsets(digit for name, digit in numbers.items() if name not in along)
    groups = [[data[first + i] + rank for i in mine for rank in within] for first in firsts]
    on = {begin % gpus_per_node for begin in begins}
    nodes = max(len({(begin + rank) // gpus_per_node for rank in ranks}) for ranks in groups for begin in on)
    return Place(ranks=len(groups[0]), on_node=-(-len(groups[0]) // nodes))


def _strided(sizes: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return the stride and the size of each of some digits by name, which come innermost first."""
    found, stride = {}, 1
    for name, size in sizes:
        found[name] = (stride, size)
        stride *= size
    return found


def _offsets(digits: Iterable[tuple[int, int]]) -> list[int]:
    """Return the ranks that strides and sizes count, the first digit fastest."""
    found = [0]
    for stride, size in digits:
        found = [i * stride + rank for i in range(size) for rank in found]
    return found
