"""Checkpointed layers drop activations, recompute them, and give the same gradients."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parbench.workloads.model.shapes import Checkpointing, Shape, shape_of
from parbench.workloads.model.transformer import (
    Transformer,
    checkpoint_layers,
    compute_loss,
    draw_tokens,
)
from tests.support.workloads.training_steps import build_model

GPT = shape_of({"shape": "tiny", "hidden": 32, "vocabulary": 32, "sequence": 16})
LLAMA = shape_of({"shape": "tiny-llama", "hidden": 32, "vocabulary": 32, "sequence": 16})
TOKENS = draw_tokens(GPT, 3, seed=7, step=0)
GEMMS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
GELU = "aten.gelu.default"


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and holds weak references to their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(func)] += 1
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self._storages.append(weakref.ref(result.untyped_storage()))
        return results

    def count_alive_bytes(self) -> int:
        """Return the bytes of results that still exist, each storage once."""
        alive = {}
        for reference in self._storages:
            storage = reference()
            if storage is not None:
                alive[storage.data_ptr()] = storage.nbytes()
        return sum(alive.values())

    def count_gemms(self) -> int:
        return sum(self.counts[name] for name in GEMMS)


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


def run_pass(checkpointing: Checkpointing) -> tuple[int, OperationCounter]:
    """Return the bytes after a forward pass, and the operations of the backward pass."""
    model = build_checkpointed(checkpointing)
    with OperationCounter() as forward:
        loss = compute_loss(model, TOKENS)
    num_bytes = forward.count_alive_bytes()
    with OperationCounter() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return num_bytes, backward


def test_checkpointing_trades_memory_for_compute() -> None:
    """Selective repeats k and out. A layer that is recomputed fully stops before its last GEMM."""
    none_bytes, none = run_pass("none")
    selective_bytes, selective = run_pass("selective")
    full_bytes, full = run_pass("full")
    assert full_bytes < selective_bytes < none_bytes
    assert selective.count_gemms() == none.count_gemms() + 2 * GPT.layers
    assert full.count_gemms() == none.count_gemms() + 5 * GPT.layers
    assert selective.counts[ATTENTION] == 0
    assert full.counts[ATTENTION] == GPT.layers
    assert none.counts[GELU] == 0
    assert selective.counts[GELU] == GPT.layers
    assert full.counts[GELU] == GPT.layers
