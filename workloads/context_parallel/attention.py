"""Attention of a model whose ranks share sequences: how to build it and how to install it."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.workloads.context_parallel.attention_kernel import Kernel
from parbench.workloads.context_parallel.attention_methods import (
    AllGatherAttention,
    RingAttention,
    UlyssesAttention,
)
from parbench.workloads.context_parallel.sequence_split import SequenceSplit
from parbench.workloads.model.transformer import Attention, Core, rotate


def build_attention(
    split: SequenceSplit,
    rank: int,
    device: torch.device,
    groups: Mapping[str, dist.ProcessGroup],
    kernel: Kernel,
) -> Core:
    """Return the attention of a rank of cp.

    ``groups`` has this rank's group of each axis of ``ContextMethod.list_axis_groups``.
    """
    method = split.method
    part_group = groups[method.part_axis] if split.parts > 1 else None
    gathers_keys = method.keys == "gather"
    attention_class = AllGatherAttention if gathers_keys else RingAttention
    attention = attention_class(part_group, kernel, split, rank, device)
    if split.ulysses == 1:
        return attention
    return UlyssesAttention(groups[method.head_axis], attention)


def install_attention(model: nn.Module, attention: Core | None, positions: Tensor) -> None:
    """Let every layer use an attention, and rotate its tokens by their positions (s) in a sequence.

    None leaves each layer's own attention.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            if attention is not None:
                module.core = attention
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=positions)
