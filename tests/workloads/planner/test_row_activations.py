"""Activations of measured steps: what a forward pass saves, tensor by tensor, and what runs on ranks counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from training_steps import OF_NAME

from workloads.costs.activations import Kept, stage_activations
from workloads.model.checkpointing import checkpoint
from workloads.model.shapes import SHAPES, Shape
from workloads.model.timed_compute import TimedCompute, make_timed
from workloads.model.transformer import build, draw_tokens, loss_of, rotate
from workloads.planner.measured_activations import (
    Pass,
    activations_of,
    embedding_bytes,
    head_bytes,
    layer_bytes,
    norm_bytes,
)
from workloads.planner.measured_calls import KINDS, Step
from workloads.step.memory import SavedTensors

CPU = torch.device("cpu")


def step(name: str, ranks: int = 2, *, device: str = "cpu", **params: Any) -> Step:
    asked = OF_NAME[name].whole({"shape": "tiny", "microbatch": 4, **params})
    return Step(name=name, params=asked, ranks=ranks, on_node=ranks, device=device)


def activations(name: str, ranks: int = 2, **params: Any) -> float:
    found = activations_of(step(name, ranks, **params))
    assert found is not None
    return found


def odd(recipe: str, kv_heads: int, layers: int) -> Shape:
    named = SHAPES["tiny-llama" if recipe == "llama" else "tiny"]
    return replace(named, layers=layers, hidden=96, heads=6, kv_heads=kv_heads, ffn=320, sequence=40, vocabulary=700)


def saved(shape: Shape, dtype: torch.dtype, *, checkpointing: str, timed: bool) -> int:
    model = build(shape, 0, CPU, dtype)
    if timed:
        make_timed(model, 1e-6, TimedCompute(CPU))
    checkpoint(model, checkpointing)
    tokens = draw_tokens(shape, 3, 0, 0)
    with SavedTensors(model) as found:
        loss_of(model, tokens)
    return found.num_bytes


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_a_pass_keeps_what_torch_saves_to_the_byte(recipe: str) -> None:
    for kv_heads, layers, dtype, checkpointing, timed in (
        (6, 1, torch.float32, "none", False),
        (2, 3, torch.bfloat16, "none", False),
        (2, 3, torch.float32, "full", False),
        (2, 3, torch.float32, "none", True),
        (6, 1, torch.bfloat16, "full", True),
    ):
        shape = odd(recipe, kv_heads, layers)
        taken = Pass(shape=shape, microbatch=3, element_bytes=dtype.itemsize, checkpointing=checkpointing, timed=timed)
        formula = layers * layer_bytes(taken) + embedding_bytes(taken, drawn=3) + head_bytes(taken)
        torchs = saved(shape, dtype, checkpointing=checkpointing, timed=timed)
        assert formula == torchs, (kv_heads, layers, dtype, checkpointing, timed)


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


def test_a_step_keeps_what_a_run_counted() -> None:
    for name, shape, params, counted in COUNTED:
        assert activations(name, shape=shape, **params) == counted, (name, shape, params)


def test_ranks_of_a_layer_and_of_data_change_no_more_than_they_hold() -> None:
    norms = 9 * 4 * 64 * (128 + 2) * 4  # inputs and statistics of tiny's nine, which tp_sp divides further
    assert activations("tp", 4) - activations("tp_sp", 4) == norms * 3 / 4
    assert activations("ddp", 8) - activations("ddp", 2) == 6 * 4 * 65 * 8  # drawn tokens
    assert activations("zero3", 2, accumulation=3) - activations("zero3", 2) == 2 * 4 * 2 * 65 * 8


def test_checkpointing_keeps_inputs_and_ends_and_a_pipeline_tells_of_its_fullest_rank() -> None:
    taken = Pass(shape=SHAPES["tiny"], microbatch=4, element_bytes=4)
    layer, embedding, head = layer_bytes(taken), embedding_bytes(taken), head_bytes(taken)
    assert activations("ddp", checkpointing="full") == activations("ddp") - 4 * (layer - 4 * 64 * 128 * 4)
    # 1F1B holds two microbatches on the first of two ranks, one on the last: the head weighs less than two layers
    by_first, by_last = 2 * (2 * layer + embedding), 2 * layer + head
    assert activations("pp", schedule="1f1b", microbatches=8) == max(by_first, by_last)
    assert activations("pp", schedule="gpipe", microbatches=8) == 8 * by_last
    assert activations("pp", schedule="gpipe", microbatches=8, split="3+1") == 8 * (3 * layer + embedding)


def test_what_attention_gives_is_copied_where_torchs_kernel_leaves_it_by_head() -> None:
    shape, kernels = SHAPES["tiny-llama"], torch.ops.aten
    for dtype, tp, copies in (
        (torch.bfloat16, 1, 1),
        (torch.bfloat16, 2, 1),
        (torch.float32, 1, 0),
        (torch.bfloat16, 4, 0),
    ):
        projected = torch.empty(2, 64, shape.heads // tp, shape.head_size, dtype=dtype, device="meta").transpose(1, 2)
        q = rotate(projected)
        if dtype == torch.bfloat16:
            out = kernels._scaled_dot_product_flash_attention(q, q, q, 0.0, True, False)[0]
        else:
            out = kernels._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)[0]
        assert out.transpose(1, 2).flatten(2)._is_view() == (copies == 0), (dtype, tp)

        taken = Pass(shape=shape, microbatch=4, element_bytes=dtype.itemsize, tp=tp, device="cuda")
        heads = 2 + 2 * shape.kv_heads / shape.heads + copies
        ffn = 4 * shape.ffn / shape.hidden
        rest = 4 * taken.tokens * shape.heads / tp + 8 * shape.sequence * shape.head_size + 2 * norm_bytes(taken)
        assert layer_bytes(taken) == taken.hidden_bytes * (heads + ffn) / tp + rest, (dtype, tp)


def test_a_layer_keeps_the_same_by_both_closed_forms() -> None:
    shape = SHAPES["tiny-llama"]
    for device, element_bytes, tp in (("cpu", 4, 1), ("cpu", 2, 2), ("cuda", 2, 1), ("cuda", 4, 2), ("cuda", 2, 4)):
        sizes: dict[str, Any] = {"shape": shape, "microbatch": 4, "element_bytes": element_bytes}
        taken = Pass(**sizes, tp=tp, sequence_parallel=True, device=device)
        kept = Kept(**sizes, mesh={"tp": tp}, fused_norms=device != "cpu")
        own = (2 * 128 * element_bytes if device == "cuda" else 128 * (8 + element_bytes)) + 4
        assert norm_bytes(replace(taken, tp=1)) == 4 * 64 * own, (device, element_bytes)
        theirs = stage_activations(kept, 1, first=False, last=False).layers
        assert layer_bytes(taken) == theirs, (device, element_bytes, tp)


def test_a_dense_hybrid_keeps_its_fullest_rank() -> None:
    assert activations("hybrid", mesh="dp=2", microbatches=4) == pytest.approx(activations("ddp"), rel=0.01)
    pipelined = activations("hybrid", mesh="pp=2", microbatches=4)
    assert pipelined == pytest.approx(activations("pp", schedule="1f1b", microbatches=4), rel=0.01)


def test_what_is_not_known_is_none() -> None:
    unknown: list[tuple[str, dict[str, Any]]] = [
        ("ddp", {"checkpointing": "selective"}),
        ("pp", {"checkpointing": "selective", "schedule": "1f1b", "microbatches": 4}),
        ("hybrid", {"checkpointing": "selective", "mesh": "cp=2"}),
        ("hybrid", {"experts": 4, "mesh": "dp=2,ep=2"}),
        ("hybrid", {"compute": "timed:5ms", "mesh": "dp=2"}),
    ]
    for name, params in unknown:
        assert activations_of(step(name, **params)) is None, (name, params)
    needed: dict[str, dict[str, Any]] = {"tp_fsdp": {"tp": 2}, "hybrid": {"mesh": "tp=2"}}
    needed["pp"] = {"schedule": "1f1b", "microbatches": 4}
    without = {name for name in KINDS if activations_of(step(name, **needed.get(name, {}))) is None}
    assert without == {"cp", "ep_step"}  # which have kernels of their own
