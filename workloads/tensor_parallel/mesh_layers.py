"""Layers split over ``tp`` by torch's styles, each rank with its own run of positions between them.

Attention and FFN gather the positions of their group and scatter sums over heads and columns. Embeddings, norms,
mixtures, head and loss see a rank's own positions alone, so that their gradients are of those: they are summed over
``tp`` once a step, as those of other tokens are over the data axes.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

_SEQUENCE = Shard(1)


def split_layers(layers: Iterable[nn.Module], mesh: DeviceMesh, *, mixtures: bool) -> None:
    """Split attention, and FFNs where they are no mixtures; blocks take and give plain tensors (b, s / tp, h)."""
    for layer in layers:
        plan = _attention() if mixtures else {**_attention(), **_ffn(llama=layer.ffn.gate is not None)}  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)


def _attention() -> dict[str, ParallelStyle]:
    return {
        "attention": _gathered(),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=_SEQUENCE),
    }


def _ffn(*, llama: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "ffn": _gathered(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=_SEQUENCE),
    }
    return {**plan, "ffn.gate": ColwiseParallel()} if llama else plan


def _gathered() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(_SEQUENCE,), desired_input_layouts=(Replicate(),))
