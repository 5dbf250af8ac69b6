"""Activation checkpointing: what a layer's forward forgets and its backward computes again.

"full" keeps a layer's input alone; "selective" also keeps the results of matrix products and attention, so that only
cheap elementwise work is done twice; "none" keeps everything. Gradients are equal bit for bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bench.text import UserError

How = Literal["none", "selective", "full"]
HOWS: tuple[How, ...] = get_args(How)

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


def checkpoint(model: nn.Module, how: str) -> None:
    """Let each of ``model.layers`` forget its activations; parameters keep their names: only ``forward`` is exchanged.

    Call it once, before FSDP or DDP takes the model, so that gathered weights are there when a layer is computed again.
    """
    if how not in HOWS:
        raise UserError(f"checkpointing = {how!r} is not allowed: checkpointing is {', '.join(HOWS)}")
    if how == "none":
        return
    layers = model.get_submodule("layers")
    for layer in layers.children():
        layer.forward = _forgetful(layer.forward, selective=how == "selective")


def _forgetful(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    # nothing here is random, so that the generators' state need not be kept (on CUDA that would wait for the device)
    forgetful = partial(torch_checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return partial(forgetful, context_fn=_selective_contexts) if selective else forgetful


watchers: list[list[Any]] = []
"""Who asks what torch's policy keeps: each is given the caches that are made while it stands here."""


def _selective_contexts() -> Any:
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    for caches in watchers:
        caches.append(contexts[0].storage)
    return contexts


def kept_in(caches: list[Any]) -> list[Tensor]:
    """Return the tensors in caches; the rest of them is to be computed again."""
    return [kept.val for kept in tree_leaves(caches) if hasattr(kept, "val")]


def _policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def plain_name(name: str) -> str:
    """Return a parameter's name without what DDP, torch.compile and torch's checkpoint wrapper put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
