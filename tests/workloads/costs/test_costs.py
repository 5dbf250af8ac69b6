"""Closed forms: convention by convention against small rings, strategy by strategy against the sum of their calls."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.costs.communication_pattern import (
    OPERATIONS,
    LayerShape,
    ddp_sent_bytes,
    fsdp_sent_bytes,
    gpt_activation_bytes,
    hsdp_sent_bytes,
    padded_numel,
    recompute_activation_bytes,
    sent_bytes,
    state_bytes,
    swiglu_activation_bytes,
    total_padded_numel,
    tp_sent_bytes,
    zero1_sent_bytes,
)
from workloads.model.shapes import Shape
from workloads.model.transformer import Layer
from workloads.step.memory import SavedTensors

LAYER = LayerShape(microbatch=2, sequence=16, hidden=32, heads=4, kv_heads=4, ffn=128)
TOKENS = LAYER.microbatch * LAYER.sequence
NORM_VALUES = 4  # two norms keep two values per token
UNIT = 1000 * 2 * 3 / 4  # 1000 parameters of two bytes, gathered or reduced once on four ranks


def test_a_call_on_800_bytes_sends_what_nccl_tests_count_and_one_rank_alone_nothing() -> None:
    """An all_reduce is a ring's n - 1 steps twice; a broadcast counts the busiest rank of a chain, not the mean."""
    rings = dict.fromkeys(["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"], 600)
    expected = {"all_reduce": 1200, **rings, "broadcast": 800, "reduce": 800, "send": 800, "recv": 0, "barrier": 0}
    assert {operation: sent_bytes(operation, 800, 4) for operation in OPERATIONS} == expected
    assert sent_bytes("all_reduce", 800, 2) == sent_bytes("send", 800, 2) == 800
    assert {sent_bytes(operation, 800, 1) for operation in OPERATIONS} == {0}


def test_what_means_nothing_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"operation\(allreduce\) is none of all_reduce, all_gather"):
        sent_bytes("allreduce", 8, 2)
    with pytest.raises(ValueError, match=r"n\(0\) < 1"):
        sent_bytes("all_reduce", 8, 0)
    with pytest.raises(ValueError, match=r"tp\(0\) < 1"):
        gpt_activation_bytes(LAYER, 2, tp=0)
    with pytest.raises(ValueError, match="no dimension"):
        padded_numel((), 2)
    with pytest.raises(ValueError, match=r"strategy\(zero4\) is none of ddp, zero1"):
        state_bytes("zero4", 1, 1, mixed=True)
    for num_kept in (-1, 1001):
        with pytest.raises(ValueError, match=rf"num_kept\({num_kept}\) is not within 0 and padded_parameters\(1000\)"):
            fsdp_sent_bytes(1000, 2, 4, num_kept=num_kept)


def test_each_parameter_is_padded_on_its_own_to_equal_chunks() -> None:
    for shape, n in [(shape, n) for shape in ((1,), (7, 3), (8, 2), (9, 2, 5)) for n in (1, 2, 4, 8)]:
        assert padded_numel(shape, n) == n * torch.empty(shape, device="meta").chunk(n, dim=0)[0].numel(), (shape, n)
    assert total_padded_numel([(3, 5), (4,), (1, 2)], 4) == 4 * 5 + 4 + 4 * 2


def test_ddp_sends_the_gradients_twice_less_its_own_part_and_zero1_a_broadcast_of_every_shard_besides() -> None:
    n, psi, e = 4, 1000, 4
    assert ddp_sent_bytes(psi, e, n) == {"dp": 2 * 1000 * 4 * 3 / 4}
    assert ddp_sent_bytes(psi, e, n, num_synchronisations=3) == {"dp": 3 * 6000}
    broadcasts = sum(sent_bytes("broadcast", psi * e // n, n) for _ in range(n))
    assert zero1_sent_bytes(psi, e, n) == {"dp": 6000 + broadcasts}
    assert zero1_sent_bytes(psi, e, n, num_synchronisations=3) == {"dp": 3 * 6000 + broadcasts}
    assert zero1_sent_bytes(psi, e, 1) == {"dp": 0}


def test_zero2_gathers_once_and_zero3_twice_and_accumulation_repeats_everything_unless_sync_is_off() -> None:
    for microbatches in (1, 5):
        kept = fsdp_sent_bytes(1000, 2, 4, num_kept=1000, num_microbatches=microbatches)
        assert kept == {"dp": microbatches * 2 * UNIT}
        assert fsdp_sent_bytes(1000, 2, 4, num_microbatches=microbatches) == {"dp": microbatches * 3 * UNIT}
    synced_once = fsdp_sent_bytes(1000, 2, 4, num_microbatches=5, num_synchronisations=1)
    assert synced_once == {"dp": 5 * 2 * UNIT + UNIT}
    saved = fsdp_sent_bytes(1000, 2, 4)["dp"] - fsdp_sent_bytes(1000, 2, 4, num_kept=100)["dp"]
    assert saved == sent_bytes("all_gather", 100 * 2, 4), "a root that stays gathered saves its own second gather"
    assert fsdp_sent_bytes(1000, 2, 4, reduce_element_bytes=4) == {"dp": 2 * UNIT + 2 * UNIT}


def test_hsdp_all_reduces_only_a_shard_between_replicas_and_is_fsdp_or_ddp_at_its_ends() -> None:
    sent = hsdp_sent_bytes(1200, 4, replicas=2, shards=3)
    assert sent == {"shard": 3 * 1200 * 4 * 2 / 3, "replicate": 2 * 1200 * 4 * 1 / (2 * 3)}
    twice = hsdp_sent_bytes(1200, 4, replicas=2, shards=3, num_microbatches=2)
    assert twice == {axis: 2 * num_bytes for axis, num_bytes in sent.items()}
    kept = hsdp_sent_bytes(1200, 4, replicas=1, shards=3, num_kept=60)
    assert kept == {"shard": fsdp_sent_bytes(1200, 4, 3, num_kept=60)["dp"], "replicate": 0}
    assert hsdp_sent_bytes(1200, 4, replicas=3, shards=1) == {"shard": 0, "replicate": ddp_sent_bytes(1200, 4, 3)["dp"]}


def test_tensor_parallelism_sends_the_same_as_all_reduces_and_as_gathers_and_scatters() -> None:
    sent = tp_sent_bytes(layers=3, microbatch=2, sequence=16, hidden=32, element_bytes=4, tp=4, num_microbatches=5)
    whole = 2 * 16 * 32 * 4
    assert sent == {"tp": 8 * whole * 3 / 4 * 3 * 5}
    assert sent["tp"] == 15 * 4 * (sent_bytes("all_gather", whole, 4) + sent_bytes("reduce_scatter", whole, 4))


def test_each_strategy_splits_its_own_part_of_the_state() -> None:
    """And 7.5 billion parameters on 64 ranks hold as many gigabytes as the paper says."""
    splits = {"ddp": (1, 1, 1), "zero1": (1, 1, 4), "zero2": (1, 4, 4), "zero3": (4, 4, 4)}
    splits |= {"hsdp": (4, 4, 4), "tp": (1, 1, 1), "tp_sp": (1, 1, 1), "tp_fsdp": (4, 4, 4)}
    for strategy, split in splits.items():
        for mixed, sizes in ((True, (2, 2, 12)), (False, (4, 4, 8))):
            state = state_bytes(strategy, 1000, 4, mixed=mixed)
            expected = tuple(1000 * size / parts for size, parts in zip(sizes, split, strict=True))
            assert (state.parameters, state.gradients, state.optimizer) == expected, (strategy, mixed)
            assert state.total == sum(expected), (strategy, mixed)
    for strategy, gigabytes in {"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.88}.items():
        held = state_bytes(strategy, 7_500_000_000, 64, mixed=True).total / 1e9
        assert held == pytest.approx(gigabytes, rel=3e-3), strategy
    for strategy, n in (("tp", 1), ("tp_fsdp", 2)):
        held = state_bytes(strategy, 1000, n, mixed=False, tp=4, num_replicated=200).total
        assert held == 16 * (200 + 800 / 4) / n, strategy


def gpt_layer(shape: LayerShape) -> Layer:
    sizes = {"hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads, "ffn": shape.ffn}
    return Layer(Shape(recipe="gpt", layers=1, sequence=shape.sequence, vocabulary=64, **sizes))


class ModernLayer(nn.Module):
    """Norms that keep their input and two values per token, grouped attention, SwiGLU; no biases."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        h, self.shape = shape.hidden, shape
        width = h // shape.heads
        self.q, self.out = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.k, self.v = (nn.Linear(h, shape.kv_heads * width, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(h, shape.ffn, bias=False), nn.Linear(h, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        normed = F.layer_norm(x, (h,))
        q, k, v = (
            part(normed).view(b, s, -1, h // self.shape.heads).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, h))
        normed = F.layer_norm(x, (h,))
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def saved_bytes(layer: nn.Module, shape: LayerShape, dtype: torch.dtype, *, again: bool = False) -> int:
    x = torch.randn(shape.microbatch, shape.sequence, shape.hidden, dtype=dtype, requires_grad=True)
    with SavedTensors(layer) as saved:
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if again else layer(x)
    return saved.num_bytes


def test_layers_save_what_the_formulas_say_and_the_norms_values() -> None:
    other = LayerShape(microbatch=1, sequence=24, hidden=48, heads=6, kv_heads=6, ffn=192)
    for shape, dtype in [(shape, dtype) for shape in (LAYER, other) for dtype in (torch.float32, torch.bfloat16)]:
        norm_bytes = NORM_VALUES * shape.microbatch * shape.sequence * dtype.itemsize
        expected = gpt_activation_bytes(shape, dtype.itemsize) + norm_bytes
        assert saved_bytes(gpt_layer(shape).to(dtype), shape, dtype) == expected, (shape, dtype)
    for kv_heads in (4, 2, 1):
        shape = replace(LAYER, kv_heads=kv_heads, ffn=88)
        expected = swiglu_activation_bytes(shape, 4) + NORM_VALUES * TOKENS * 4
        assert saved_bytes(ModernLayer(shape), shape, torch.float32) == expected, kv_heads
    recomputed = saved_bytes(gpt_layer(LAYER), LAYER, torch.float32, again=True)
    assert recomputed == recompute_activation_bytes(LAYER, 4) == math.prod((2, 16, 32)) * 4


def test_formulas_of_activations_are_those_of_the_literature_and_divide_by_tensor_ranks() -> None:
    """Tensor parallelism leaves norms whole, sequence parallelism only their outputs."""
    sbh, modern = TOKENS * LAYER.hidden, replace(LAYER, kv_heads=2, ffn=88)
    assert gpt_activation_bytes(LAYER, 2) == pytest.approx(sbh * (32 + 4 * LAYER.heads / LAYER.hidden))
    assert swiglu_activation_bytes(modern, 2) == pytest.approx(sbh * (12 + 4 * 2 / 4 + 8 * 88 / 32 + 4 * 4 / 32))
    unit, log_sum_exp = sbh * 2, 4 * LAYER.heads * TOKENS / 4
    assert gpt_activation_bytes(LAYER, 2, tp=4) == unit * (4 + 12 / 4) + log_sum_exp
    assert gpt_activation_bytes(LAYER, 2, tp=4, sequence_parallel=True) == unit * (2 + 2 / 4 + 12 / 4) + log_sum_exp
    assert swiglu_activation_bytes(LAYER, 2, tp=4, sequence_parallel=True) == unit * (2 + 2 / 4 + 20 / 4) + log_sum_exp
