"""Tensor parallelism by torch's styles: matrices split by columns and rows, and the vocabulary.

Blocks are attention and FFN. They take and return plain tensors. With sequence parallelism, a rank
has its part of the sequence between blocks. Blocks gather the sequence before their columns, and
scatter the sums of their rows. Parameters outside of blocks then see only the rank's positions, so
that their gradients are summed over ``tp`` once per step (Korthikanti et al., arXiv 2205.05198,
section 4.2).
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

from parbench.workloads.mesh.mesh import get_local_tensor
from parbench.workloads.model.transformer import (
    NO_TARGET,
    Ffn,
    Layer,
    Transformer,
    cross_entropy,
)

_SEQUENCE = Shard(1)
"""The placement of activations (batch, positions, hidden) that are split by positions."""
_VOCABULARY = Shard(-1)
"""The placement of logits (batch, positions, vocabulary) that are split by vocabulary."""


def split_model(part: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split the layers of a part of the model, and its embedding and head, over a ``tp`` mesh.

    Attention is split by heads, FFNs by columns and then rows, and the token embedding and the head
    by vocabulary. With ``sequence_parallel``, activations between blocks are split by positions.
    Otherwise every rank has all of them. The parameters become DTensors.
    """
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
    """Split the attention of a layer by heads, and its FFN by columns and then rows.

    A mixture of experts in place of the FFN is not split. ``outside`` is the placement of
    activations between the attention and FFN blocks.
    """
    styles = _split_block("attention", ["q", "k", "v"], "out", outside)
    if isinstance(layer.ffn, Ffn):
        columns = ["up"] if layer.ffn.gate is None else ["gate", "up"]
        styles |= _split_block("ffn", columns, "down", outside)
    parallelize_module(layer, mesh, styles)


def split_embedding_gradient(embedding: nn.Embedding) -> None:
    """Let each rank keep only the gradient of its part of the embedding's vocabulary.

    ``embedding`` is already split over ``tp``. Without this hook every rank has the gradient of the
    full vocabulary. Do not call this function with FSDP, which takes its part of the gradient
    itself.
    """
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    placements = weight.placements
    weight.register_hook(lambda gradient: gradient.redistribute(placements=placements))  # type: ignore[no-untyped-call]


def _split_block(
    block: str, columns: Iterable[str], rows: str, outside: Placement
) -> dict[str, ParallelStyle]:
    """Return the parallel styles of a block (attention or FFN), keyed by module name.

    ``block`` is the name of the block in its layer. ``columns`` are the names of the Linears
    that are split by columns: q, k and v, or up and gate. ``rows`` is the name of the Linear that
    is split by rows: out, or down. ``outside`` is the placement of activations between blocks.
    """
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
    """Return ``compute_loss(logits, targets)``, which returns the cross-entropy as a scalar.

    Logits are (sequences, positions, vocabulary), and targets (sequences, positions). The result is
    the mean, or with ``is_sum`` the sum, over tokens that are not padding. ``vocabulary`` is the
    full size. With a ``mesh`` of ``tp`` ranks, logits have this rank's part of the vocabulary, and
    no rank gathers them. The loss and its backward pass must then run within ``use_loss``.
    """
    if mesh is None:
        return partial(cross_entropy, is_sum=is_sum)

    def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of logits that are split by vocabulary over the mesh."""
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
    """Return the context manager in which the loss of ``make_loss`` and its backward must run.

    With a mesh of ``tp`` ranks it is torch's ``loss_parallel``, for logits that are split by
    vocabulary. Without a mesh it does nothing.
    """
    return nullcontext() if mesh is None else loss_parallel()
