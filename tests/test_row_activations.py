"""Activations of measured steps: what a forward pass saves, tensor by tensor, and what runs on ranks counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from workloads.checkpointing import checkpoint
from workloads.definitions import with_defaults
from workloads.hybrid.hybrid_activations import Kept, stage_activations
from workloads.memory import SavedTensors
from workloads.model import build, draw_tokens, loss_of, rotate
from workloads.planner.row_activations import (
    Pass,
    activations_of,
    embedding_bytes,
    head_bytes,
    layer_bytes,
    norm_bytes,
)
from workloads.planner.row_calls import KINDS, Step
from workloads.shapes import SHAPES, Shape
from workloads.timed import Waiter, make_timed

CPU = torch.device("cpu")


def step(name: str, ranks: int = 2, *, device: str = "cpu", **params: Any) -> Step:
    asked = with_defaults({"shape": "tiny", "microbatch": 4, **params}, name)
    return Step(name=name, params=asked, ranks=ranks, on_node=ranks, device=device)


def activations(name: str, ranks: int = 2, **params: Any) -> float:
    found = activations_of(step(name, ranks, **params))
    assert found is not None
    return found


def odd(recipe: str, *, kv_heads: int = 6, layers: int = 1) -> Shape:
    """Return a shape in which no two sizes are alike."""
    named = SHAPES["tiny-llama" if recipe == "llama" else "tiny"]
    return replace(named, layers=layers, hidden=96, heads=6, kv_heads=kv_heads, ffn=320, sequence=40, vocabulary=700)


def saved(shape: Shape, dtype: torch.dtype, *, checkpointing: str = "none", timed: bool = False) -> int:
    """Return what the forward pass of three sequences saves for backward."""
    model = build(shape, 0, CPU, dtype)
    if timed:
        make_timed(model, 1e-6, Waiter(CPU))
    checkpoint(model, checkpointing)
    tokens = draw_tokens(shape, 3, 0, 0)
    with SavedTensors(model) as found:
        loss_of(model, tokens)
    return found.num_bytes


@pytest.mark.parametrize("timed", [False, True], ids=["real", "timed"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("recipe", "kv_heads", "layers"), [("gpt", 6, 1), ("gpt", 2, 3), ("llama", 6, 1), ("llama", 2, 3)]
)
def test_a_pass_keeps_what_torch_saves_to_the_byte(
    recipe: str, kv_heads: int, layers: int, dtype: torch.dtype, checkpointing: str, timed: bool
) -> None:
    shape = odd(recipe, kv_heads=kv_heads, layers=layers)
    taken = Pass(shape=shape, microbatch=3, element_bytes=dtype.itemsize, checkpointing=checkpointing, timed=timed)
    formula = layers * layer_bytes(taken) + embedding_bytes(taken, drawn=3) + head_bytes(taken)
    assert formula == saved(shape, dtype, checkpointing=checkpointing, timed=timed)


# memory_counted.activations of runs on two ranks: microbatches of four sequences, eight microbatches through pipelines
COUNTED: list[tuple[str, str, dict[str, Any], int]] = [
    ("ddp", "tiny", {}, 9216580),
    ("zero1", "tiny", {}, 9216580),
    ("zero2", "tiny", {}, 9216580),
    ("zero3", "tiny", {}, 9216580),
    ("hsdp", "tiny", {}, 9216580),
    ("tp", "tiny", {}, 6060580),
    ("tp_sp", "tiny", {}, 5461540),
    ("zero3", "tiny-llama", {}, 12024900),
    ("tp", "tiny-llama", {}, 8082468),
    ("tp_sp", "tiny-llama", {}, 6898212),
    ("tp_fsdp", "tiny-llama", {"tp": 2}, 8082468),
    ("pp", "tiny-llama", {"schedule": "1f1b", "microbatches": 8}, 11104256),
    ("pp", "tiny-llama", {"schedule": "gpipe", "microbatches": 8}, 51765280),
    ("pp", "tiny-llama", {"schedule": "zb_v", "microbatches": 8}, 12026884),
]


@pytest.mark.parametrize(("name", "shape", "params", "counted"), COUNTED)
def test_a_step_keeps_what_a_run_counted(name: str, shape: str, params: dict[str, Any], counted: int) -> None:
    assert activations(name, shape=shape, **params) == counted


def test_the_ranks_of_a_layer_divide_what_lies_between_only_along_the_sequence() -> None:
    """Only norms' inputs and statistics are divided further: nine norms of tiny."""
    tokens, hidden = 4 * 64, 128
    norms = 9 * tokens * (hidden + 2) * 4
    assert activations("tp", 4) - activations("tp_sp", 4) == norms * 3 / 4


def test_more_ranks_of_data_add_but_their_drawn_tokens() -> None:
    assert activations("ddp", 8) - activations("ddp", 2) == 6 * 4 * 65 * 8
    assert activations("zero3", 2, accumulation=3) - activations("zero3", 2) == 2 * 4 * 2 * 65 * 8


def test_full_checkpointing_keeps_inputs_and_ends() -> None:
    whole, kept = activations("ddp"), activations("ddp", checkpointing="full")
    taken = Pass(shape=SHAPES["tiny"], microbatch=4, element_bytes=4)
    assert kept == whole - 4 * (layer_bytes(taken) - 4 * 64 * 128 * 4)


def test_a_pipeline_tells_of_its_fullest_rank() -> None:
    """1F1B holds two microbatches on the first of two ranks, one on the last: the head weighs less than two layers."""
    taken = Pass(shape=SHAPES["tiny"], microbatch=4, element_bytes=4)
    first = 2 * layer_bytes(taken) + embedding_bytes(taken)
    last = 2 * layer_bytes(taken) + head_bytes(taken)
    assert activations("pp", schedule="1f1b", microbatches=8) == max(2 * first, last)
    assert activations("pp", schedule="gpipe", microbatches=8) == 8 * last
    assert activations("pp", schedule="gpipe", microbatches=8, split="3+1") == 8 * (
        3 * layer_bytes(taken) + embedding_bytes(taken)
    )


def test_another_device_has_fused_norms() -> None:
    taken = Pass(shape=SHAPES["tiny-llama"], microbatch=4, element_bytes=2)
    fused = replace(taken, device="cuda")
    tokens, hidden = 4 * 64, 128
    assert norm_bytes(taken) == tokens * (8 * hidden + 4) + tokens * hidden * 2
    assert norm_bytes(fused) == tokens * (2 * hidden + 4) + tokens * hidden * 2
    assert layer_bytes(taken) - layer_bytes(fused) == 2 * tokens * 6 * hidden
    assert activations("ddp", shape="tiny-llama", device="cuda") < activations("ddp", shape="tiny-llama")


@pytest.mark.parametrize(("element_bytes", "tp", "copies"), [(2, 1, 1), (2, 2, 1), (4, 1, 0), (2, 4, 0)])
def test_what_attention_gives_is_copied_where_torchs_kernel_leaves_it_by_head(
    element_bytes: int, tp: int, copies: int
) -> None:
    """Queries turned by RoPE are laid out by head; torch's own shapes of CUDA's kernels say what comes of them."""
    shape = SHAPES["tiny-llama"]
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    heads = shape.heads // tp
    projected = torch.empty(2, 64, heads, shape.head_size, dtype=dtype, device="meta").transpose(1, 2)
    q = rotate(projected)
    kernels = torch.ops.aten
    if element_bytes == 2:
        out = kernels._scaled_dot_product_flash_attention(q, q, q, 0.0, True, False)[0]
    else:
        out = kernels._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)[0]
    assert out.transpose(1, 2).flatten(2)._is_view() == (copies == 0)

    taken = Pass(shape=shape, microbatch=4, element_bytes=element_bytes, tp=tp, device="cuda", sequence_parallel=True)
    between = 2 * norm_bytes(taken) + 4 * taken.hidden_bytes * shape.ffn / shape.hidden / tp
    rest = 4 * taken.tokens * shape.heads / tp + 8 * shape.sequence * shape.head_size
    heads_of = taken.hidden_bytes * (2 + 2 * shape.kv_heads / shape.heads + copies) / tp
    assert layer_bytes(taken) == between + heads_of + rest


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_keeps_the_same_by_both_closed_forms(device: str, element_bytes: int, tp: int) -> None:
    shape = SHAPES["tiny-llama"]
    taken = Pass(shape=shape, microbatch=4, element_bytes=element_bytes, tp=tp, sequence_parallel=True, device=device)
    kept = Kept(shape=shape, mesh={"tp": tp}, microbatch=4, element_bytes=element_bytes, fused_norms=device != "cpu")
    assert layer_bytes(taken) == stage_activations(kept, 1, first=False, last=False).layers


def test_a_dense_hybrid_keeps_its_fullest_rank() -> None:
    on_one = activations("hybrid", mesh="dp=2", microbatches=4)
    assert on_one == pytest.approx(activations("ddp"), rel=0.01)
    pipelined = activations("hybrid", mesh="pp=2", microbatches=4)
    assert pipelined == pytest.approx(activations("pp", schedule="1f1b", microbatches=4), rel=0.01)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ddp", {"checkpointing": "selective"}),
        ("pp", {"checkpointing": "selective", "schedule": "1f1b", "microbatches": 4}),
        ("hybrid", {"checkpointing": "selective", "mesh": "cp=2"}),
        ("hybrid", {"experts": 4, "mesh": "dp=2,ep=2"}),
        ("hybrid", {"compute": "timed:5ms", "mesh": "dp=2"}),
        ("ep_step", {}),
    ],
)
def test_what_is_not_known_is_none(name: str, params: dict[str, Any]) -> None:
    assert activations_of(step(name, **params)) is None


def test_every_kind_that_is_predicted_has_activations_but_those_with_kernels_of_their_own() -> None:
    own: dict[str, dict[str, Any]] = {
        "pp": {"schedule": "1f1b", "microbatches": 4},
        "tp_fsdp": {"tp": 2},
        "hybrid": {"mesh": "tp=2"},
    }
    without = {name for name in KINDS if activations_of(step(name, **own.get(name, {}))) is None}
    assert without == {"cp", "ep_step"}
