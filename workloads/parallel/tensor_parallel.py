"""Tensor parallelism by torch's styles: matrices split by columns and rows, and the vocabulary.

Blocks take and give plain tensors. With sequence parallelism a rank has its part of the sequence
between blocks: they gather it before their columns and scatter the sums of their rows. Parameters
outside of blocks then see only these positions, so that their gradients are summed over ``tp``
once per step (Korthikanti et al., arXiv 2205.05198, section 4.2).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from parbench.workloads.model.transformer import (
    NO_TARGET,
    Ffn,
    Layer,
    Transformer,
    cross_entropy,
)
from parbench.workloads.parallel.mesh import get_local_tensor

_SEQUENCE = Shard(1)
_VOCABULARY = Shard(-1)


def split_model(part: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split layers by heads and columns, and the token embedding and the head by vocabulary."""
    outside: Placement = _SEQUENCE if sequence_parallel else Replicate()
    for layer in part.layers.values():
        assert isinstance(layer, Layer)
        _split_layer(layer, mesh, outside)
    styles: dict[str, ParallelStyle] = {}
    if part.token_embedding is not None:
        styles["token_embedding"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=outside
        )
    if part.head is not None:
        styles["head"] = ColwiseParallel(input_layouts=outside, output_layouts=_VOCABULARY)
    parallelize_module(part, mesh, styles)


def _split_layer(layer: Layer, mesh: DeviceMesh, outside: Placement) -> None:
    """Split attention by heads and the FFN by columns; a mixture of experts is not split."""
    styles = _split_block("attention", ["q", "k", "v"], "out", outside)
    if isinstance(layer.ffn, Ffn):
        columns = ["up"] if layer.ffn.gate is None else ["gate", "up"]
        styles |= _split_block("ffn", columns, "down", outside)
    parallelize_module(layer, mesh, styles)


def split_embedding_gradient(embedding: nn.Embedding) -> None:
    """Let each rank keep only the gradient of its part of the vocabulary.

    Without this hook every rank has the gradient of the full vocabulary. FSDP needs no hook,
    because it takes its part itself.
    """
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    placements = weight.placements
    weight.register_hook(lambda gradient: gradient.redistribute(placements=placements))  # type: ignore[no-untyped-call]


def _split_block(
    block: str, columns: Iterable[str], rows: str, outside: Placement
) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        block: PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
        f"{block}.{rows}": RowwiseParallel(output_layouts=outside),
    }
    for name in columns:
        styles[f"{block}.{name}"] = ColwiseParallel()
    return styles


def make_loss(
    mesh: DeviceMesh | None, vocabulary: int, *, is_sum: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from logits (b, s, vocabulary) and targets (b, s) to the cross-entropy.

    The cross-entropy is the mean, or with ``is_sum`` the sum, over tokens that are not padding.

    On a mesh, logits are this rank's part of the vocabulary (b, s, part), and no rank gathers
    them. The loss and its backward pass belong within ``use_loss``.
    """
    if mesh is None:
        return partial(cross_entropy, is_sum=is_sum)

    def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
        tokens = logits.flatten(0, 1).float()
        size = torch.Size((len(tokens), vocabulary))
        distributed = DTensor.from_local(
            tokens, mesh, [Shard(1)], run_check=False, shape=size, stride=(vocabulary, 1)
        )
        reduction = "sum" if is_sum else "mean"
        loss = F.cross_entropy(
            distributed, targets.flatten(), ignore_index=NO_TARGET, reduction=reduction
        )
        return get_local_tensor(loss)

    return compute_loss


def use_loss(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Return the context in which forward and backward passes with a loss must run.

    On a mesh it is torch's ``loss_parallel``, for logits that are split by vocabulary. Without a
    mesh it does nothing.
    """
    return nullcontext() if mesh is None else loss_parallel()
