"""Closed forms of activations are what a stage's forward pass saves, to the byte, and fall as axes are added."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.text import UserError
from workloads.costs.activations import (
    Kept,
    StageActivations,
    activation_bytes_of,
    activations_from,
    stage_activations,
)
from workloads.costs.mesh_costs import place_of
from workloads.expert_parallel.moe_case import Moe, moe_of
from workloads.expert_parallel.moe_layer import exchange_ffns, mixtures
from workloads.model import checkpointing as forgetting
from workloads.model.checkpointing import checkpoint
from workloads.model.shapes import SHAPES, Shape
from workloads.model.transformer import Transformer, build
from workloads.pipeline_parallel.schedules import make_schedule, peak_held
from workloads.pipeline_parallel.stages import Chunk
from workloads.step.memory import SavedTensors

TINY, LLAMA = SHAPES["tiny"], SHAPES["tiny-llama"]
CPU = torch.device("cpu")
DTYPES = {4: torch.float32, 2: torch.bfloat16}
N, H = 3 * 64, 128  # tokens of a microbatch, hidden size


def kept(shape: Shape = TINY, mesh: dict[str, int] | None = None, **more: Any) -> Kept:
    return Kept(shape=shape, mesh=mesh or {}, **{"microbatch": 3, "element_bytes": 4, **more})


def layers(mesh: dict[str, int] | None = None, shape: Shape = TINY, **more: Any) -> float:
    return stage_activations(kept(shape, mesh, **more), 1, first=False, last=False).layers


def mixture(shape: Shape, shared: int = 1) -> Moe:
    return moe_of({"ep": 1, "experts": 4, "top_k": 2, "shared": shared}, shape, 1)


def model_of(of: Kept) -> Transformer:
    model = build(of.shape, 0, CPU, DTYPES[of.element_bytes])
    if of.moe is not None:
        exchange_ffns(model, of.shape, of.moe, 0)
        first = torch.arange(of.tokens)
        for one in mixtures(model):
            one.given = torch.stack([first % 4, (first + 1) % 4], dim=1)
    checkpoint(model, of.checkpointing)
    return model


def forward(chunk: Chunk, of: Kept) -> Tensor:
    size = (of.microbatch, of.shape.sequence)
    tokens, targets = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    between = torch.zeros(*size, of.shape.hidden, dtype=DTYPES[of.element_bytes], requires_grad=True)
    output: Tensor = chunk(tokens if chunk.tokens is not None else between)
    return output if chunk.head is None else F.cross_entropy(output.flatten(0, 1), targets.flatten())


def assert_saved(of: Kept, first: int, count: int) -> None:
    chunk = Chunk(model_of(of), first, count)
    with SavedTensors(chunk) as saved:
        forward(chunk, of)
    last = first + count == of.shape.layers
    assert saved.num_bytes == stage_activations(of, count, first=first == 0, last=last).total, (of, first, count)


def test_a_stage_saves_what_the_closed_form_says() -> None:
    for shape in (TINY, LLAMA):
        for more in ({}, {"microbatch": 1}, {"element_bytes": 2}, {"checkpointing": "full", "element_bytes": 2}):
            for first, count in ((0, 4), (0, 1), (1, 2), (3, 1)):
                assert_saved(kept(shape, **more), first, count)
        for element_bytes, shared in product((4, 2), (0, 1, 2)):
            moe = mixture(shape, shared)
            assert_saved(kept(replace(shape, layers=1), element_bytes=element_bytes, moe=moe), 0, 1)
    assert_saved(kept(replace(LLAMA, layers=1, heads=1, kv_heads=1)), 0, 1)  # one head needs no other layout


def test_terms_are_of_those_that_hold_the_ends() -> None:
    whole = stage_activations(kept(), 4, first=True, last=True)
    ends = {"embeddings": 8 * N + 8 * 64, "head": N * (H + 2) * 4 + N * H * 4, "loss": N * 512 * 4 + 8 * N + 4}
    assert whole == StageActivations(layers=whole.layers, **ends)
    assert whole.total == whole.layers + sum(ends.values())
    middle = stage_activations(kept(), 4, first=False, last=False)
    assert middle == StageActivations(layers=whole.layers, embeddings=0.0, head=0.0, loss=0.0)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not annotated
    """Counts what comes out of operations in layers whose results selective checkpointing keeps."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self._inside = 0
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: self._enter(1))
            layer.register_forward_hook(lambda *_: self._enter(-1))

    def _enter(self, by: int) -> None:
        self._inside += by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._inside and func in forgetting._KEPT:
            parts = out if isinstance(out, tuple) else (out,)
            self.num_bytes += sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor))
        return out


def test_selective_checkpointing_keeps_products_and_attention() -> None:
    for shape, element_bytes in product((TINY, LLAMA), (4, 2)):
        of = kept(shape, element_bytes=element_bytes)
        model = model_of(of)
        with Products(model) as products:
            forward(Chunk(model, 0, 4), of)
        inputs, found, whole = (
            stage_activations(replace(of, checkpointing=how), 4, first=False, last=False).layers
            for how in ("full", "selective", "none")
        )
        assert found == inputs + products.num_bytes
        assert inputs < found < whole


def test_cuda_keeps_a_fused_norm_s_input_alone_and_in_float32_what_attention_gives_once() -> None:
    norms = {e: 2 * N * H * (8 - e) for e in (2, 4)}
    for mesh, e, saved in (({}, 4, norms[4] + N * H * 4), ({}, 2, norms[2]), ({"cp": 2}, 4, norms[4] / 2)):
        composed, fused = (layers(mesh, LLAMA, element_bytes=e, fused_norms=how) for how in (False, True))
        assert composed - fused == saved, (mesh, e)
    heads = [
        stage_activations(kept(LLAMA, element_bytes=2, fused_norms=how), 4, first=False, last=True).head
        for how in (False, True)
    ]
    assert heads[0] - heads[1] == N * H * (8 - 2)


def test_activations_fall_with_cp_and_tp() -> None:
    for shape in (TINY, LLAMA):
        whole = layers({"dp": 2, "fsdp": 4, "pp": 2}, shape)
        assert whole == layers({}, shape)
        # the output in another layout comes with the first rank of cp, where it was not there
        layout = N * H * 4 if shape.recipe == "gpt" else 0
        for cp in (2, 4):
            assert layers({"cp": cp}, shape) == (whole + layout) / cp
        assert whole / 2 < layers({"tp": 2}, shape) < whole
        assert layers({"cp": 2, "tp": 2}, shape) < layers({"tp": 2}, shape)


def test_rows_of_experts_are_of_the_tokens_of_a_rank() -> None:
    moe = mixture(TINY)
    mixed = layers(moe=moe)
    # indices of a row there and back; ends of experts
    assert layers({"ep": 2}, moe=replace(moe, ep=2)) - mixed == N * 2 * 16 - 4 * 2
    ffn, inner = N * H * 4, N * 2 * 512 * 4
    of_mixture = mixed - (layers() - ffn - inner)
    dense = layers({"tp": 2}) - ffn - inner / 2
    assert layers({"tp": 2}, moe=moe) == dense + (of_mixture - 16) / 2 + 16


def test_what_is_in_flight_is_held_at_once_by_layers_as_they_are_split() -> None:
    given: dict[str, Any] = {"microbatch": 3, "element_bytes": 4, "microbatches": 4}
    mesh, of = {"pp": 2}, kept(TINY, {"pp": 2})
    first, last = (stage_activations(of, 2, first=at == 0, last=at == 1).total for at in (0, 1))
    assert activation_bytes_of(TINY, mesh, **given) == 2 * first
    assert activation_bytes_of(TINY, mesh, {"pp": 1}, **given) == last
    assert activation_bytes_of(TINY, mesh, schedule="gpipe", **given) == 4 * first
    assert activation_bytes_of(TINY, {"dp": 2}, **given) == stage_activations(of, 4, first=True, last=True).total
    schedule = make_schedule("interleaved", ranks=2, microbatches=4)
    each = [stage_activations(of, 1, first=at == 0, last=at == 3).total for at in range(4)]
    held = peak_held(schedule, 0, lambda stage: each[stage])
    assert activation_bytes_of(TINY, mesh, schedule="interleaved", **given) == held
    three = stage_activations(of, 3, first=True, last=False).total
    found = activations_from(place_of(TINY, mesh, split="3+1"), make_schedule("1f1b", ranks=2, microbatches=4), of)
    assert activation_bytes_of(TINY, mesh, split="3+1", **given) == found == 2 * three
    with pytest.raises(UserError, match="split"):
        activation_bytes_of(TINY, mesh, split="3+2", **given)
