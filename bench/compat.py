"""The names that torch renamed, in one place.

torch 2.13 has ``all_gather_single`` and ``reduce_scatter_single`` and deprecates the older names; 2.11 has only those.
"""

import torch
import torch.distributed as dist


def all_gather_single(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's ``shard`` (s elements) into ``output`` (n * s elements), in rank order."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, shard, group=group)


def reduce_scatter_single(shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``whole`` (n * s elements) over ranks and leave this rank's ``shard`` (s elements) of it."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(shard, whole, group=group)
