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

_MAX_CACHED = 1 << 14  # results of a cached function
_EXPERT_GROUPS = (("ep",), ("etp",), ("efsdp",), ("edp",))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The number of ranks of one group, and of those that share a node or a pod of nodes."""

    ranks: int
    """The number of ranks in the group."""
    on_node: int
    """The ranks of the group per node that it spans: the mean, rounded up."""
    in_pod: int = 0
    """The ranks of the group per pod of nodes, 0 if nodes are not in pods."""
    extents: tuple[int, ...] = ()
    """The ranks of the group along each axis of a torus, empty if GPUs are not on a torus."""

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
        """The number of pods (sets of nodes) that the group spans, 1 if nodes are not in pods."""
        return -(-self.ranks // self.in_pod) if self.in_pod else 1

    @property
    def label(self) -> str:
        """A text such as ``inside a node`` or ``across 4 nodes, 8 a node``."""
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
    """Return the number of ranks of a process group, and of those that share a node or a pod.

    ``group`` has the axes along which the ranks of the group differ, such as ``("dp", "cp")``, or
    one axis of the experts: ep, etp, efsdp or edp. Of all groups along these axes, the result is
    for the one that spans most nodes. ``nodes_per_pod`` 0 means that nodes are not in pods.
    """
    place = _place(dims, group, gpus_per_node)
    if not nodes_per_pod or place.inside:
        return place
    in_pod = _place(dims, group, gpus_per_node * nodes_per_pod).on_node
    return replace(place, in_pod=in_pod)


@lru_cache(maxsize=_MAX_CACHED)
def place_on_torus(dims: ParallelDims, group: tuple[str, ...], torus: tuple[int, ...]) -> Place:
    """Return the number of ranks that a group of a mesh has along each axis of a torus of GPUs.

    The group is that of rank 0 along the axes ``group`` of the mesh. All groups along these axes
    have the same extents if the sizes of torus and mesh divide each other. ``torus`` has the GPUs
    along each axis of the torus, the innermost last.
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
    """Return the number of ranks of a group, and of its ranks per node, without regard to pods.

    Of the groups along the axes ``group``, the result is for the one that spans most nodes.
    """
    import numpy as np  # imported late, because the command line answers without it

    nodes_by_group = np.sort(_arrange_groups(dims, group) // gpus_per_node, axis=1)
    max_nodes = 1 + int((np.diff(nodes_by_group, axis=1) > 0).sum(axis=1).max())
    ranks = nodes_by_group.shape[1]
    return Place(ranks=ranks, on_node=-(-ranks // max_nodes))


def _arrange_groups(dims: ParallelDims, group: tuple[str, ...]) -> "NDArray[np.int64]":
    """Return the ranks of all groups along the axes ``group`` of a mesh, as in ``place_of``.

    The array has the shape (groups, ranks per group).
    """
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
