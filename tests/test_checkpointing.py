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

from bench.errors import UserError
from workloads.checkpointing import HOWS, checkpoint, plain_name
from workloads.model import Transformer, build, draw_tokens, loss_of
from workloads.shapes import SHAPES, Shape, shape_of

SHAPE = shape_of({"shape": "tiny", "hidden": 32, "vocabulary": 32, "sequence": 16})
LLAMA = shape_of({"shape": "tiny-llama", "hidden": 32, "vocabulary": 32, "sequence": 16})
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
        alive = {storage.data_ptr(): storage.nbytes() for ref in self._storages if (storage := ref()) is not None}
        return sum(alive.values())


def model_of(how: str, shape: Shape = SHAPE) -> Transformer:
    model = build(shape, 7, torch.device("cpu"))
    checkpoint(model, how)
    return model


def gradients(model: nn.Module, shape: Shape) -> dict[str, Tensor]:
    loss_of(model, draw_tokens(shape, 3, seed=7, step=0)).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def forward_and_backward(how: str) -> tuple[Seen, int, Counter[str]]:
    """Return what was seen of the forward, the bytes it left, and the operations of the backward."""
    model, tokens = model_of(how), draw_tokens(SHAPE, 3, seed=7, step=0)
    with Seen() as forward:
        loss = loss_of(model, tokens)
    held = forward.alive_bytes()
    with Seen() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return forward, held, backward.operations


def num_saved(how: str) -> int:
    """Return the elements that autograd saves in a forward, each storage once."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model_of(how), draw_tokens(SHAPE, 3, seed=7, step=0))
    assert loss.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=str)
def test_gradients_are_equal_bit_for_bit(how: str, shape: Shape) -> None:
    expected, found = gradients(model_of("none", shape), shape), gradients(model_of(how, shape), shape)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("how", HOWS)
def test_parameters_keep_their_names_and_modules_their_types(how: str) -> None:
    plain, model = build(SHAPE, 7, torch.device("cpu")), model_of(how)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_autograd_saves_less(how: str) -> None:
    assert num_saved(how) < num_saved("none") / 2


def test_full_holds_least_and_selective_lies_between() -> None:
    """Of all results of the forward, whoever holds them: autograd or the checkpoint's own store."""
    none, selective, full = (forward_and_backward(how)[1] for how in ("none", "selective", "full"))
    assert full < selective < none
    layers_inputs_bytes = SHAPE.layers * 3 * SHAPE.sequence * SHAPE.hidden * 4
    assert none - full > 5 * layers_inputs_bytes


def test_full_computes_products_and_attention_again_and_selective_only_the_rest() -> None:
    products, attentions, others = {}, {}, {}
    for how in HOWS:
        _, _, backward = forward_and_backward(how)
        products[how] = sum(backward[name] for name in PRODUCTS)
        attentions[how] = backward[ATTENTION]
        others[how] = backward["aten.gelu.default"]
    assert products["selective"] == products["none"]
    # of a layer's six, the last one's result is nobody's to keep: recomputing stops before it
    assert products["full"] - products["none"] == 5 * SHAPE.layers
    assert attentions == {"none": 0, "selective": 0, "full": SHAPE.layers}
    assert others == {"none": 0, "selective": SHAPE.layers, "full": SHAPE.layers}


@pytest.mark.parametrize("how", HOWS)
def test_the_forward_does_the_same_operations(how: str) -> None:
    found, expected = forward_and_backward(how)[0].operations, forward_and_backward("none")[0].operations
    assert all(found[name] == expected[name] for name in (*PRODUCTS, ATTENTION, "aten.gelu.default"))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_a_copy_of_the_model_computes_with_its_own_weights(how: str) -> None:
    model = model_of(how)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(other, SHAPE).values())
    assert loss_of(other, draw_tokens(SHAPE, 3, seed=7, step=0)) != loss_of(
        model, draw_tokens(SHAPE, 3, seed=7, step=0)
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_word_is_refused_with_the_choices() -> None:
    with pytest.raises(
        UserError, match="checkpointing = 'some' is not allowed: checkpointing is none, selective, full"
    ):
        checkpoint(build(SHAPES["tiny"], 0, torch.device("meta")), "some")


@pytest.mark.parametrize(
    "wrapped",
    [
        "layers.0.ffn.up.weight",
        "module.layers.0.ffn.up.weight",
        "_orig_mod.module.layers.0.ffn.up.weight",
        "layers.0._checkpoint_wrapped_module.ffn.up.weight",
    ],
)
def test_a_plain_name_is_without_wrappers(wrapped: str) -> None:
    assert plain_name(wrapped) == "layers.0.ffn.up.weight"


def test_torchs_own_wrapper_is_known_by_name() -> None:
    model = build(SHAPE, 7, torch.device("cpu"))
    expected = [name for name, _ in model.named_parameters()]
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    assert [plain_name(name) for name, _ in model.named_parameters()] == expected
