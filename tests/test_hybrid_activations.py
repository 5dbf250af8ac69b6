"""Closed forms of activations are what a stage's forward pass saves, to the byte, and fall as axes are added."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.errors import UserError
from workloads import checkpointing as forgetting
from workloads.checkpointing import checkpoint
from workloads.experts.moe import exchange_ffns, mixtures
from workloads.experts.moe_case import Moe, moe_of
from workloads.hybrid.hybrid_activations import (
    Kept,
    StageActivations,
    activation_bytes_of,
    activations_from,
    stage_activations,
)
from workloads.hybrid.hybrid_costs import place_of
from workloads.memory import SavedTensors
from workloads.model import Transformer, build
from workloads.pipeline.pp_held import peak_held
from workloads.pipeline.schedules import make_schedule
from workloads.pipeline.stages import Chunk
from workloads.shapes import SHAPES, Shape

TINY, LLAMA = SHAPES["tiny"], SHAPES["tiny-llama"]
CPU = torch.device("cpu")
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def kept(shape: Shape = TINY, mesh: dict[str, int] | None = None, **more: Any) -> Kept:
    return Kept(shape=shape, mesh=mesh or {}, **{"microbatch": 3, "element_bytes": 4, **more})


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
    """Run one microbatch through a stage, and the loss after the last."""
    size = (of.microbatch, of.shape.sequence)
    tokens, targets = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    between = torch.zeros(*size, of.shape.hidden, dtype=DTYPES[of.element_bytes], requires_grad=True)
    output: Tensor = chunk(tokens if chunk.tokens is not None else between)
    return output if chunk.head is None else F.cross_entropy(output.flatten(0, 1), targets.flatten())


def saved(of: Kept, first: int, count: int) -> int:
    chunk = Chunk(model_of(of), first, count)
    with SavedTensors(chunk) as found:
        forward(chunk, of)
    return found.num_bytes


OF_ONE: list[dict[str, Any]] = [
    {},
    {"microbatch": 1},
    {"element_bytes": 2},
    {"checkpointing": "full"},
    {"checkpointing": "full", "element_bytes": 2},
]


@pytest.mark.parametrize("shape", [TINY, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("more", OF_ONE, ids=str)
def test_a_stage_saves_what_the_closed_form_says(shape: Shape, more: dict[str, Any]) -> None:
    of = kept(shape, **more)
    for first, count in ((0, 4), (0, 1), (1, 2), (3, 1)):
        expected = stage_activations(of, count, first=first == 0, last=first + count == 4)
        assert saved(of, first, count) == expected.total, (first, count)


@pytest.mark.parametrize("shape", [TINY, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("element_bytes", [4, 2])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_a_mixture_saves_what_the_closed_form_says(shape: Shape, element_bytes: int, shared: int) -> None:
    of = kept(replace(shape, layers=1), element_bytes=element_bytes, moe=mixture(shape, shared))
    assert saved(of, 0, 1) == stage_activations(of, 1, first=True, last=True).total


def test_terms_are_of_those_that_hold_the_ends() -> None:
    of = kept()
    n, h = 3 * 64, 128
    whole = stage_activations(of, 4, first=True, last=True)
    assert whole.embeddings == 8 * n + 8 * 64
    assert whole.head == n * (h + 2) * 4 + n * h * 4
    assert whole.loss == n * 512 * 4 + 8 * n + 4
    middle = stage_activations(of, 4, first=False, last=False)
    assert middle == StageActivations(layers=whole.layers, embeddings=0.0, head=0.0, loss=0.0)
    assert whole.total == whole.layers + whole.embeddings + whole.head + whole.loss


def test_one_head_of_a_rank_needs_no_other_layout() -> None:
    of = kept(replace(LLAMA, layers=1, heads=1, kv_heads=1))
    assert saved(of, 0, 1) == stage_activations(of, 1, first=True, last=True).total


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not annotated
    """Counts what comes out of operations whose results selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.counts and func in forgetting._KEPT:
            parts = out if isinstance(out, tuple) else (out,)
            self.num_bytes += sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor))
        return out


@contextmanager
def counting(products: Products) -> Iterator[None]:
    products.counts = True
    yield
    products.counts = False


@pytest.mark.parametrize("shape", [TINY, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("element_bytes", [4, 2])
def test_selective_checkpointing_keeps_products_and_attention(shape: Shape, element_bytes: int) -> None:
    of, products = kept(shape, element_bytes=element_bytes), Products()
    model = model_of(of)
    for layer in model.layers:
        plain = layer.forward

        def watched(x: Tensor, plain: Any = plain) -> Any:
            with counting(products):
                return plain(x)

        layer.forward = watched
    with products:
        forward(Chunk(model, 0, 4), of)
    inputs = stage_activations(replace(of, checkpointing="full"), 4, first=False, last=False).layers
    found = stage_activations(replace(of, checkpointing="selective"), 4, first=False, last=False).layers
    assert found == inputs + products.num_bytes
    assert inputs < found < stage_activations(of, 4, first=False, last=False).layers


def test_a_fused_norm_keeps_its_input_alone() -> None:
    composed, fused = (
        stage_activations(kept(LLAMA, element_bytes=2, fused_norms=how), 4, first=False, last=True)
        for how in (False, True)
    )
    n, h = 3 * 64, 128
    assert composed.total - fused.total == (2 * 4 + 1) * n * h * (8 - 2)


def test_float32_on_cuda_keeps_what_attention_gives_once() -> None:
    def layers(mesh: dict[str, int], element_bytes: int, *, fused: bool) -> float:
        of = kept(LLAMA, mesh, element_bytes=element_bytes, fused_norms=fused)
        return stage_activations(of, 1, first=False, last=False).layers

    n, h = 3 * 64, 128
    norms = {e: 2 * n * h * (8 - e) for e in (2, 4)}
    assert layers({}, 4, fused=False) - layers({}, 4, fused=True) == norms[4] + n * h * 4
    assert layers({}, 2, fused=False) - layers({}, 2, fused=True) == norms[2]
    assert layers({"cp": 2}, 4, fused=False) - layers({"cp": 2}, 4, fused=True) == norms[4] / 2


@pytest.mark.parametrize("shape", [TINY, LLAMA], ids=["gpt", "llama"])
def test_activations_fall_with_cp_and_tp(shape: Shape) -> None:
    def layers(mesh: dict[str, int]) -> float:
        return stage_activations(kept(shape, mesh), 1, first=False, last=False).layers

    whole = layers({"dp": 2, "fsdp": 4, "pp": 2})
    assert whole == layers({})
    # the output in another layout comes with the first rank of cp, where it was not there
    layout = 3 * 64 * 128 * 4 if shape.recipe == "gpt" else 0
    assert layers({"cp": 2}) == (whole + layout) / 2
    assert layers({"cp": 4}) == (whole + layout) / 4
    assert whole / 2 < layers({"tp": 2}) < whole
    assert layers({"cp": 2, "tp": 2}) < layers({"tp": 2})


def test_rows_of_experts_are_of_the_tokens_of_a_rank() -> None:
    def layers(mesh: dict[str, int], ep: int = 1) -> float:
        moe = replace(mixture(TINY), ep=ep)
        return stage_activations(kept(TINY, mesh, moe=moe), 1, first=False, last=False).layers

    n = 3 * 64
    assert layers({"ep": 2}, 2) - layers({}) == n * 2 * 16 - 4 * 2  # indices of a row there and back; ends of experts
    dense = stage_activations(kept(TINY, {"tp": 2}), 1, first=False, last=False).layers
    ffn = n * 128 * 4 + n * 2 * 512 * 4 / 2
    of_two = stage_activations(kept(TINY, moe=mixture(TINY)), 1, first=False, last=False).layers
    whole = stage_activations(kept(TINY), 1, first=False, last=False).layers
    of_one_rank = of_two - (whole - n * 128 * 4 - n * 2 * 512 * 4)
    assert layers({"tp": 2}) == dense - ffn + (of_one_rank - 16) / 2 + 16


def test_what_is_in_flight_is_held_at_once() -> None:
    given: dict[str, Any] = {"microbatch": 3, "element_bytes": 4, "microbatches": 4}
    of = kept(TINY, {"pp": 2})
    first, last = (stage_activations(of, 2, first=at == 0, last=at == 1).total for at in (0, 1))
    assert activation_bytes_of(TINY, {"pp": 2}, **given) == 2 * first
    assert activation_bytes_of(TINY, {"pp": 2}, {"pp": 1}, **given) == last
    assert activation_bytes_of(TINY, {"pp": 2}, schedule="gpipe", **given) == 4 * first
    assert activation_bytes_of(TINY, {"dp": 2}, **given) == stage_activations(of, 4, first=True, last=True).total
    found = activation_bytes_of(TINY, {"pp": 2}, schedule="interleaved", **given)
    schedule = make_schedule("interleaved", ranks=2, microbatches=4)
    each = [stage_activations(of, 1, first=at == 0, last=at == 3).total for at in range(4)]
    assert found == peak_held(schedule, 0, lambda stage: each[stage])


def test_layers_of_each_stage_are_as_they_are_split() -> None:
    given: dict[str, Any] = {"microbatch": 3, "element_bytes": 4, "microbatches": 4}
    place = place_of(TINY, {"pp": 2}, split="3+1")
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    found = activation_bytes_of(TINY, {"pp": 2}, split="3+1", **given)
    of = kept(TINY, {"pp": 2})
    assert found == activations_from(place, schedule, of) == 2 * stage_activations(of, 3, first=True, last=False).total


def test_what_no_pipeline_can_run_is_refused() -> None:
    with pytest.raises(UserError, match="split"):
        activation_bytes_of(TINY, {"pp": 2}, microbatch=1, element_bytes=2, microbatches=3, split="3+2")


def test_a_large_mesh_is_computed_at_once() -> None:
    shape = SHAPES["llama3-70b"]
    mesh = {"dp": 8, "pp": 16, "tp": 8}
    given: dict[str, Any] = {"microbatch": 1, "microbatches": 64, "element_bytes": 2, "fused_norms": True}
    whole = activation_bytes_of(shape, mesh, **given)
    # 16 in flight of 5 layers: inputs and outputs of norms, q k v and output, four times the FFN's inner size
    tokens, h, f, t = 8192, 8192, 28672, 8
    layer = tokens * 2 * (h * 2 / t + 2 * h + h * (3 + 2 / 8) / t + 4 * f / t)
    assert whole == pytest.approx(16 * 5 * layer, rel=0.02)
    assert activation_bytes_of(shape, mesh, checkpointing="full", **given) == pytest.approx(
        16 * 5 * tokens * h * 2 / t, rel=0.01
    )
