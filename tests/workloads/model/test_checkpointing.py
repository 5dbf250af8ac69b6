"""Checkpointed layers forget, compute again, and give the same gradients bit for bit."""

import copy
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from parbench.workloads.model.shapes import CHECKPOINTINGS, Shape, shape_of
from parbench.workloads.model.transformer import (
    Transformer,
    build,
    checkpoint,
    draw_tokens,
    loss_of,
    plain_name,
)

SHAPE = shape_of({"shape": "tiny", "hidden": 32, "vocabulary": 32, "sequence": 16})
LLAMA = shape_of({"shape": "tiny-llama", "hidden": 32, "vocabulary": 32, "sequence": 16})
TOKENS = draw_tokens(SHAPE, 3, seed=7, step=0)
PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and remembers their results for as long as somebody else does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()
        self._storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func)] += 1
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self._storages.append(weakref.ref(result.untyped_storage()))
        return results

    def alive_bytes(self) -> int:
        """Bytes of results that are still held by somebody, each storage once."""
        alive = {
            storage.data_ptr(): storage.nbytes()
            for ref in self._storages
            if (storage := ref()) is not None
        }
        return sum(alive.values())


def model_of(how: str, shape: Shape = SHAPE) -> Transformer:
    model = build(shape, 7, torch.device("cpu"))
    checkpoint(model, how)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model, TOKENS).backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def forward_and_backward(how: str) -> tuple[Counter[str], int, Counter[str], int]:
    """Return the operations of the forward, the bytes it left, the backward's, and the elements that autograd saved."""
    model, saved = model_of(how), {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with Seen() as forward:
        loss = loss_of(model, TOKENS)
    held = forward.alive_bytes()
    with Seen() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, TOKENS)
    assert loss.requires_grad
    return forward.operations, held, backward.operations, sum(saved.values())


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=lambda shape: shape.recipe)
def test_gradients_are_equal_bit_for_bit(shape: Shape) -> None:
    expected = gradients(model_of("none", shape))
    for how in ("selective", "full"):
        found = gradients(model_of(how, shape))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), how


def test_full_forgets_and_computes_again_most_and_selective_only_what_is_no_product() -> None:
    """Of all results of the forward, whoever holds them: autograd or the checkpoint's own store."""
    forwards, held, backwards, saved = zip(
        *(forward_and_backward(how) for how in CHECKPOINTINGS), strict=True
    )
    none, selective, full = held
    assert full < selective < none
    layers_inputs_bytes = SHAPE.layers * 3 * SHAPE.sequence * SHAPE.hidden * 4
    assert none - full > 5 * layers_inputs_bytes
    assert max(saved[1:]) < saved[0] / 2
    products = [sum(backward[name] for name in PRODUCTS) for backward in backwards]
    # of a layer's six, the last one's result is nobody's to keep: recomputing stops before it
    assert products == [products[0], products[0], products[0] + 5 * SHAPE.layers]
    assert [backward[ATTENTION] for backward in backwards] == [0, 0, SHAPE.layers]
    assert [backward["aten.gelu.default"] for backward in backwards] == [
        0,
        SHAPE.layers,
        SHAPE.layers,
    ]
    for name in (*PRODUCTS, ATTENTION, "aten.gelu.default"):
        assert len({forward[name] for forward in forwards}) == 1, f"forwards differ in {name}"


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    for how in ("selective", "full"):
        model = model_of(how)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(other).values())
        assert loss_of(other, TOKENS) != loss_of(model, TOKENS), how
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plain_name_is_without_wrappers_torchs_own_among_them() -> None:
    name = "layers.0.ffn.up.weight"
    for wrapped in (name, f"module.{name}", f"_orig_mod.module.{name}"):
        assert plain_name(wrapped) == name
    model = build(SHAPE, 7, torch.device("cpu"))
    expected = [name for name, _ in model.named_parameters()]
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    assert [plain_name(name) for name, _ in model.named_parameters()] == expected
