"""The nodes of a group's ranks: how many ranks there are, and how many of them share a node. Pure.

Ranks are counted with the innermost axis fastest, and rank r is on node r // ``gpus_per_node``. The
group of an axis that reaches most nodes decides, because all groups wait for it. The groups of
experts are those of ``ParallelDims``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from parbench.workloads.mesh.dims import EXPERT_AXES, ParallelDims

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_CACHED = 1 << 14  # results of a cached function
_EXPERT_GROUPS = (("ep",), ("etp",), ("efsdp",), ("edp",))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The number of ranks of one group, and of those that share a node."""

    ranks: int
    """The number of ranks in the group."""
    on_node: int
    """The ranks of the group per node that it spans: the mean, rounded up."""

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return -(-self.ranks // self.on_node)

    @property
    def inside(self) -> bool:
        """True if all ranks of the group share one node."""
        return self.on_node >= self.ranks

    @property
    def label(self) -> str:
        """A text such as ``inside a node`` or ``across 4 nodes, 8 per node``."""
        if self.inside:
            return "inside a node"
        return f"across {self.nodes} nodes, {self.on_node} per node"


@lru_cache(maxsize=_MAX_CACHED)
def place_group(dims: ParallelDims, group: tuple[str, ...], gpus_per_node: int) -> Place:
    """Return the number of ranks of a process group, and of those that share a node.

    ``group`` has the axes along which the ranks of the group differ, such as ``("dp", "cp")``, or
    one axis of the experts: ep, etp, efsdp or edp. Of all groups along these axes, the result is
    for the one that spans most nodes.
    """
    import numpy as np  # imported late, because the command line answers without it

    nodes_by_group = np.sort(_arrange_groups(dims, group) // gpus_per_node, axis=1)
    max_nodes = 1 + int((np.diff(nodes_by_group, axis=1) > 0).sum(axis=1).max())
    ranks = nodes_by_group.shape[1]
    return Place(ranks=ranks, on_node=-(-ranks // max_nodes))


def _arrange_groups(dims: ParallelDims, group: tuple[str, ...]) -> "NDArray[np.int64]":
    """Return the global ranks of all groups along the axes ``group`` of a mesh.

    The array has the shape (groups, ranks per group). The ranks of a row differ only in their
    positions along ``group``, in the order of these positions. Rows are in the order of the
    positions along the other axes. In both orders the innermost axis varies fastest. ``group`` can
    also be one axis of the experts: ep, etp, efsdp or edp.
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
