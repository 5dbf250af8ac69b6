"""Attention of a model whose ranks share sequences: how to build it and how to install it."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parbench.workloads.context_parallel import attention_methods
from parbench.workloads.context_parallel.attention_kernel import BlockAttention, Kernel
from parbench.workloads.context_parallel.attention_methods import UlyssesAttention
from parbench.workloads.context_parallel.sequence_split import SequenceSplit
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import (
    Attention,
    Core,
    Transformer,
    make_meta_model,
    rotate,
)


def build_attention(
    split: SequenceSplit,
    rank: int,
    device: torch.device,
    groups: Mapping[str, dist.ProcessGroup],
    kernel: Kernel,
) -> Core:
    """Return the attention of a rank of cp.

    ``groups`` are those of ``ContextMethod.list_axis_groups``.
    """
    method = split.method
    part_group = groups[method.part_axis] if split.parts > 1 else None
    attention_class: type[BlockAttention] = getattr(attention_methods, method.keys.attention_class)
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


def make_full_mask_model(shape: Shape, dtype: torch.dtype) -> Transformer:
    """Return a meta model of one process in which every query attends to all keys."""
    model = make_meta_model(shape, dtype)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = attend_to_all
    return model


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v of q (b, a, s, d) and k and v (b, a_kv, s, d)."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
