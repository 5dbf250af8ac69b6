"""Checkpointed layers recompute activations, and give the same gradients."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parbench.workloads.model.shapes import Checkpointing, Shape, build_shape
from parbench.workloads.model.transformer import (
    Transformer,
    checkpoint_layers,
    compute_loss,
    draw_tokens,
)
from tests.support.workloads.training_steps import build_model

GPT = build_shape({"shape": "tiny", "hidden": 32, "vocabulary": 32, "sequence": 16})
LLAMA = build_shape({"shape": "tiny-llama", "hidden": 32, "vocabulary": 32, "sequence": 16})
TOKENS = draw_tokens(GPT, 3, seed=7, step=0)
GEMMS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
GELU = "aten.gelu.default"


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def build_checkpointed(checkpointing: Checkpointing, shape: Shape = GPT) -> Transformer:
    model = build_model(shape, 7, torch.device("cpu"))
    checkpoint_layers(model, checkpointing)
    return model


def compute_gradients(model: Transformer) -> list[Tensor]:
    compute_loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]
    gradients = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients.append(parameter.grad)
    return gradients


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointed_gradients_are_identical(
    shape: Shape, checkpointing: Checkpointing
) -> None:
    expected = compute_gradients(build_checkpointed("none", shape))
    gradients = compute_gradients(build_checkpointed(checkpointing, shape))
    assert all(map(torch.equal, gradients, expected))


def count_in_backward(checkpointing: Checkpointing) -> tuple[int, int, int]:
    """Return the numbers of GEMMs, of attentions and of GELUs in a backward pass."""
    loss = compute_loss(build_checkpointed(checkpointing), TOKENS)
    with OperationCounter() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    counts = backward.counts
    return sum(counts[name] for name in GEMMS), counts[ATTENTION], counts[GELU]


def test_checkpointing_repeats_operations() -> None:
    """Selective repeats k and out. A layer that is recomputed fully stops before its last GEMM."""
    gemms, attentions, gelus = count_in_backward("none")
    assert (attentions, gelus) == (0, 0)
    layers = GPT.layers
    assert count_in_backward("selective") == (gemms + 2 * layers, 0, layers)
    assert count_in_backward("full") == (gemms + 5 * layers, layers, layers)
