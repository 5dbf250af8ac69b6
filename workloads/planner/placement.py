"""The nodes of a group's ranks: how many ranks there are, and how many of them share a node. Pure.

Ranks are counted with the innermost axis fastest, and rank r is on node r // ``gpus_per_node``. The
group of an axis that reaches most nodes decides, because all groups wait for it. Nodes may be in
pods, above which there are fewer links. The groups of experts are those of ``ParallelDims``.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from parbench.workloads.parallel.dims import EXPERT_AXES, ParallelDims

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_CACHED = 1 << 14
_EXPERT_GROUPS = (("ep",), ("etp",), ("efsdp",), ("edp",))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks of one group, and where they are."""

    ranks: int
    on_node: int  # the ranks that share a node: the mean over nodes, rounded up
    in_pod: int = 0  # the ranks that share a pod of nodes, 0 without pods
    extents: tuple[int, ...] = ()  # the ranks along each axis of a torus, empty without a torus

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return -(-self.ranks // self.on_node)

    @property
    def inside(self) -> bool:
        """True if all ranks of the group share one node."""
        return self.on_node >= self.ranks

    @property
    def pods(self) -> int:
        """The number of pods that the group spans, 1 without pods."""
        return -(-self.ranks // self.in_pod) if self.in_pod else 1

    @property
    def label(self) -> str:
        if self.extents:
            return f"{' x '.join(map(str, self.extents))} of the torus"
        pods = f" in {self.pods} pods" if self.pods > 1 else ""
        return (
            "inside a node"
            if self.inside
            else f"across {self.nodes} nodes{pods}, {self.on_node} a node"
        )


def place_of(
    dims: ParallelDims, group: tuple[str, ...], gpus_per_node: int, nodes_per_pod: int = 0
) -> Place:
    """Return the place of a group along some axes, or of the experts' ep, etp, efsdp or edp.

    ``nodes_per_pod`` 0 means that there are no pods.
    """
    place = _place(dims, group, gpus_per_node)
    if not nodes_per_pod or place.inside:
        return place
    in_pod = _place(dims, group, gpus_per_node * nodes_per_pod).on_node
    return replace(place, in_pod=in_pod)


@lru_cache(maxsize=_MAX_CACHED)
def place_on_torus(dims: ParallelDims, group: tuple[str, ...], torus: tuple[int, ...]) -> Place:
    """Return the place of rank 0's group on a torus, whose last axis is the innermost.

    All groups of an axis have the same extents if the sizes of the torus and of the mesh divide
    each other.
    """
    ranks = _arrange_groups(dims, group)[0]
    extents = []
    stride = math.prod(torus)
    for size in torus:
        stride //= size
        extents.append(len(set(ranks // stride % size)))
    return Place(ranks=len(ranks), on_node=len(ranks), extents=tuple(extents))


@lru_cache(maxsize=_MAX_CACHED)
def _place(dims: ParallelDims, group: tuple[str, ...], gpus_per_node: int) -> Place:
    """Return the place of the group that spans most nodes."""
    import numpy as np  # imported late, because the command line answers without it

    nodes_by_group = np.sort(_arrange_groups(dims, group) // gpus_per_node, axis=1)
    max_nodes = 1 + int((np.diff(nodes_by_group, axis=1) > 0).sum(axis=1).max())
    ranks = nodes_by_group.shape[1]
    return Place(ranks=ranks, on_node=-(-ranks // max_nodes))


def _arrange_groups(dims: ParallelDims, group: tuple[str, ...]) -> "NDArray[np.int64]":
    """Return an array with the ranks of each group along some axes, one group per row."""
    import numpy as np

    order = dims.order
    sizes = {name: dims.size(name) for name in order}
    ranks = np.arange(dims.ranks).reshape(tuple(sizes.values()))
    if group in _EXPERT_GROUPS:
        sizes = {
            "pp": dims.pp,
            "edp": dims.expert_replicas // dims.expert_shards,
            "efsdp": dims.expert_shards,
            "ep": dims.ep,
            "etp": dims.etp,
        }
        axes = [order.index(name) for name in ("pp", *EXPERT_AXES)]
        ranks = ranks.transpose(axes).reshape(tuple(sizes.values()))
    members = [i for i, name in enumerate(sizes) if name in group]
    num_ranks = math.prod(ranks.shape[i] for i in members)
    return np.moveaxis(ranks, members, range(-len(members), 0)).reshape(-1, num_ranks)
