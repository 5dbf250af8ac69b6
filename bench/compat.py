"""The names that torch renamed or keeps private, in one place.

torch 2.13 has ``all_gather_single`` and ``reduce_scatter_single`` and deprecates the older names; 2.11 has only those.
"""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def all_gather_single(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Gather every rank's ``shard`` (s elements) into ``output`` (n * s elements), in rank order."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(output, shard, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, redop: str = "sum", *, async_op: bool = False
) -> dist.Work | None:
    """Reduce ``whole`` (n * s elements) over ranks and leave this rank's ``shard`` (s elements) of it."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(shard, whole, op=REDUCE_OPS[redop], group=group, async_op=async_op)
    return work


def all_reduce_apart(tensor: torch.Tensor, group: dist.ProcessGroup, redop: str) -> torch.Tensor:
    """Return the reduction of ``tensor`` in a new tensor: torch's functional collective, its copy included."""
    out = _functional_collectives.all_reduce(tensor, redop, group)
    waited: torch.Tensor = _functional_collectives.wait_tensor(out)  # type: ignore[no-untyped-call]
    return waited


def coalescing(group: dist.ProcessGroup, device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which collectives are gathered and launched as one; torch keeps it private.

    Without a device, as gloo needs it, only calls of one kind are gathered, and only some kinds.
    """
    context: AbstractContextManager[object] = distributed_c10d._coalescing_manager(group=group, device=device)
    return context
