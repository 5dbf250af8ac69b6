"""Where the ranks of a group sit: how many, and how many of them on one node. Pure.

Ranks are counted with the innermost axis fastest, and rank r is on node r // ``gpus_per_node``. Of an axis' groups the
one that reaches most nodes tells, for all of them wait for it. Nodes may stand in pods, above which links are fewer.
``ep`` takes blocks of neighbours in the order of dp, fsdp and cp, whatever the order of the mesh, as
``workloads.mesh.axes`` deals them out: a rank's number there reads (dp, fsdp, cp, ep), of dp, fsdp and cp what ``ep``
leaves.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from parbench.workloads.mesh.axes import DATA, multiplied

_CACHED = 1 << 14
# along what differ the ranks that deal out a layer's experts, that shard the same ones, that hold the same shards
_OF_EXPERTS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("ep",): ("ep",),
    ("expert_shards",): ("fsdp",),
    ("edp",): ("dp", "cp", "tp"),
    ("etp",): ("etp",),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks of one group, and those of them that share a node: the mean, counted up, where nodes have not alike.

    ``in_pod`` are those that share a pod of nodes, 0 where there are no pods.
    """

    ranks: int
    on_node: int
    in_pod: int = 0

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.on_node)

    @property
    def inside(self) -> bool:
        return self.on_node >= self.ranks

    @property
    def pods(self) -> int:
        return -(-self.ranks // self.in_pod) if self.in_pod else 1

    @property
    def words(self) -> str:
        pods = f" in {self.pods} pods" if self.pods > 1 else ""
        return (
            "inside a node"
            if self.inside
            else f"across {self.nodes} nodes{pods}, {self.on_node} a node"
        )


def place_of(
    mesh: Mapping[str, int], group: tuple[str, ...], gpus_per_node: int, nodes_per_pod: int = 0
) -> Place:
    """Return the place of a group along some axes, or of a mixture's own: ``ep``, ``etp``, ``expert_shards``, ``edp``.

    Pods are of so many nodes, 0 is no pods.
    """
    along = _OF_EXPERTS.get(group)
    inside = (1, 1) if along is None else (mesh.get("ep", 1), mesh.get("etp", 1))
    axes = tuple(multiplied(mesh).items())
    place = _place(axes, *inside, along or group, gpus_per_node)
    if not nodes_per_pod or place.inside:
        return place
    in_pod = _place(axes, *inside, along or group, gpus_per_node * nodes_per_pod).on_node
    return Place(ranks=place.ranks, on_node=place.on_node, in_pod=in_pod)


@lru_cache(maxsize=_CACHED)
def _place(
    axes: tuple[tuple[str, int], ...], ep: int, etp: int, along: tuple[str, ...], gpus_per_node: int
) -> Place:
    """Write the ranks out, by axis and by what ``ep`` and ``etp`` take and leave, and count nodes by group."""
    import numpy as np  # which is not there before a step is placed: the command line answers without it

    names, sizes = [name for name, _ in axes], dict(axes)
    left, rest = {}, ep
    for name in reversed(DATA):  # of cp, fsdp and dp in turn
        taken = math.gcd(rest, sizes.get(name, 1))
        left[name], rest = sizes.get(name, 1) // taken, rest // taken
    others = [name for name in names if name not in DATA]
    order = [names.index(name) for name in (*others, *DATA) if name in sizes]
    digits: dict[str, int] = {}
    for name in others:
        digits |= {"tp": sizes["tp"] // etp, "etp": etp} if name == "tp" else {name: sizes[name]}
    digits |= {**{name: left[name] for name in DATA}, "ep": ep}
    ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    ranks = ranks.transpose(order).reshape(tuple(digits.values()))
    apart = 1
    for i, (name, size) in enumerate(digits.items()):
        steps = np.diff(ranks, axis=i)
        # ranks that stand whole nodes apart share none, and the others are the same on each
        if size > 1 and not (steps % gpus_per_node).any() and (steps == steps.flat[0]).all():
            ranks = ranks.take([0], axis=i)
            apart *= size if name in along else 1
    members = [i for i, name in enumerate(digits) if name in along]
    groups = np.moveaxis(ranks, members, range(-len(members), 0)) // gpus_per_node
    groups = np.sort(groups.reshape(-1, math.prod(ranks.shape[i] for i in members)), axis=1)
    nodes = 1 + int((np.diff(groups, axis=1) > 0).sum(axis=1).max())
    return Place(ranks=groups.shape[1] * apart, on_node=-(-groups.shape[1] // nodes))
