"""Closed forms: convention by convention against small rings, strategy by strategy against the sum of their calls."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from workloads.costs import (
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
    tp_fsdp_sent_bytes,
    tp_sent_bytes,
    zero1_sent_bytes,
    zero2_sent_bytes,
    zero3_sent_bytes,
)
from workloads.memory import SavedTensors
from workloads.model import Layer
from workloads.shapes import Shape

LAYER = LayerShape(microbatch=2, sequence=16, hidden=32, heads=4, kv_heads=4, ffn=128)
TOKENS = LAYER.microbatch * LAYER.sequence
NORM_VALUES = 4  # two norms keep two values per token


def gpt_layer(shape: LayerShape) -> Layer:
    return Layer(
        Shape(
            recipe="gpt",
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn=shape.ffn,
            sequence=shape.sequence,
            vocabulary=64,
        )
    )


@pytest.mark.parametrize(
    ("operation", "n", "expected"),
    [
        ("all_reduce", 4, 1200),
        ("all_gather", 4, 600),
        ("reduce_scatter", 4, 600),
        ("all_to_all", 4, 600),
        ("gather", 4, 600),
        ("scatter", 4, 600),
        ("broadcast", 4, 800),
        ("reduce", 4, 800),
        ("send", 2, 800),
        ("barrier", 4, 0),
        ("all_reduce", 2, 800),
    ],
)
def test_a_call_on_800_bytes_sends_what_nccl_tests_count(operation: str, n: int, expected: float) -> None:
    assert sent_bytes(operation, 800, n) == expected


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_alone_sends_nothing(operation: str) -> None:
    assert sent_bytes(operation, 800, 1) == 0


def test_a_ring_all_reduce_that_is_walked_through_sends_as_many_bytes() -> None:
    n, chunk_bytes = 5, 40
    steps = 2 * (n - 1)  # n-1 to reduce, n-1 to gather, one chunk each
    assert sent_bytes("all_reduce", n * chunk_bytes, n) == steps * chunk_bytes


def test_a_broadcast_down_a_chain_counts_the_busiest_rank_not_the_mean() -> None:
    n, num_bytes = 4, 100
    sent = [num_bytes] * (n - 1) + [0]
    assert sent_bytes("broadcast", num_bytes, n) == max(sent)
    assert sum(sent) / n == num_bytes * (n - 1) / n


def test_an_unknown_operation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"operation\(allreduce\) is none of all_reduce, all_gather"):
        sent_bytes("allreduce", 8, 2)


def test_no_ranks_are_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match=r"n\(0\) < 1"):
        sent_bytes("all_reduce", 8, 0)
    with pytest.raises(ValueError, match=r"tp\(0\) < 1"):
        gpt_activation_bytes(LAYER, 2, tp=0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 8))
@settings(deadline=None)
def test_padding_is_that_of_equal_chunks(shape: list[int], n: int) -> None:
    largest = torch.empty(shape, device="meta").chunk(n, dim=0)[0].numel()
    assert padded_numel(shape, n) == n * largest


def test_each_parameter_is_padded_on_its_own() -> None:
    assert total_padded_numel([(3, 5), (4,), (1, 2)], 4) == 4 * 5 + 4 + 4 * 2


def test_a_scalar_cannot_be_padded() -> None:
    with pytest.raises(ValueError, match="no dimension"):
        padded_numel((), 2)


def test_ddp_sends_the_gradients_twice_less_its_own_part() -> None:
    assert ddp_sent_bytes(1000, 4, 4) == {"dp": 2 * 1000 * 4 * 3 / 4}
    assert ddp_sent_bytes(1000, 4, 4, num_synchronisations=3) == {"dp": 3 * 6000}


def test_zero1_adds_a_broadcast_of_every_shard_once_per_step() -> None:
    n, psi, e = 4, 1000, 4
    broadcasts = sum(sent_bytes("broadcast", psi * e // n, n) for _ in range(n))
    assert zero1_sent_bytes(psi, e, n) == {"dp": 6000 + broadcasts}
    assert zero1_sent_bytes(psi, e, n, num_synchronisations=3) == {"dp": 3 * 6000 + broadcasts}
    assert zero1_sent_bytes(psi, e, 1) == {"dp": 0}


def test_zero2_gathers_once_and_zero3_twice() -> None:
    unit = 1000 * 2 * 3 / 4
    assert zero2_sent_bytes(1000, 2, 4) == {"dp": 2 * unit}
    assert zero3_sent_bytes(1000, 2, 4) == {"dp": 3 * unit}


def test_accumulation_repeats_everything_unless_gradient_sync_is_off() -> None:
    unit = 1000 * 2 * 3 / 4
    assert zero2_sent_bytes(1000, 2, 4, num_microbatches=5) == {"dp": 5 * 2 * unit}
    assert zero3_sent_bytes(1000, 2, 4, num_microbatches=5) == {"dp": 5 * 3 * unit}
    synced_once = fsdp_sent_bytes(1000, 2, 4, num_microbatches=5, num_synchronisations=1)
    assert synced_once == {"dp": 5 * 2 * unit + unit}


def test_a_root_that_stays_gathered_saves_its_own_second_gather() -> None:
    saved = zero3_sent_bytes(1000, 2, 4)["dp"] - fsdp_sent_bytes(1000, 2, 4, num_kept=100)["dp"]
    assert saved == sent_bytes("all_gather", 100 * 2, 4)


def test_gradients_reduced_in_float32_send_twice_their_16_bit_bytes() -> None:
    unit = 1000 * 2 * 3 / 4
    assert fsdp_sent_bytes(1000, 2, 4, reduce_element_bytes=4) == {"dp": 2 * unit + 2 * unit}


@pytest.mark.parametrize("num_kept", [-1, 1001])
def test_more_or_less_kept_than_there_is_is_refused_with_the_numbers(num_kept: int) -> None:
    with pytest.raises(ValueError, match=rf"num_kept\({num_kept}\) is not within 0 and padded_parameters\(1000\)"):
        fsdp_sent_bytes(1000, 2, 4, num_kept=num_kept)


def test_hsdp_all_reduces_only_a_shard_between_replicas() -> None:
    sent = hsdp_sent_bytes(1200, 4, replicas=2, shards=3)
    assert sent == {"shard": 3 * 1200 * 4 * 2 / 3, "replicate": 2 * 1200 * 4 * 1 / (2 * 3)}
    twice = hsdp_sent_bytes(1200, 4, replicas=2, shards=3, num_microbatches=2)
    assert twice == {axis: 2 * num_bytes for axis, num_bytes in sent.items()}


def test_hsdp_of_one_replica_is_fsdp_and_of_one_shard_is_ddp() -> None:
    assert hsdp_sent_bytes(1200, 4, replicas=1, shards=3) == {
        "shard": zero3_sent_bytes(1200, 4, 3)["dp"],
        "replicate": 0,
    }
    assert hsdp_sent_bytes(1200, 4, replicas=3, shards=1) == {"shard": 0, "replicate": ddp_sent_bytes(1200, 4, 3)["dp"]}


def test_tensor_parallelism_sends_the_same_as_all_reduces_and_as_gathers_and_scatters() -> None:
    sent = tp_sent_bytes(layers=3, microbatch=2, sequence=16, hidden=32, element_bytes=4, tp=4, num_microbatches=5)
    whole = 2 * 16 * 32 * 4
    assert sent == {"tp": 8 * whole * 3 / 4 * 3 * 5}
    assert sent["tp"] == 15 * 4 * (sent_bytes("all_gather", whole, 4) + sent_bytes("reduce_scatter", whole, 4))


def test_fsdp_over_tensor_parallelism_sends_on_both_axes() -> None:
    assert tp_fsdp_sent_bytes(123.0, 500, 4, 2) == {"tp": 123.0, "dp": 3 * 500 * 4 / 2}


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("ddp", 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.88), ("hsdp", 1.88)]
)
def test_7_5_billion_parameters_on_64_ranks_hold_what_the_paper_says(strategy: str, gigabytes: float) -> None:
    assert state_bytes(strategy, 7_500_000_000, 64, mixed=True).total / 1e9 == pytest.approx(gigabytes, rel=3e-3)


@pytest.mark.parametrize(
    ("strategy", "mixed", "expected"),
    [
        ("ddp", True, (2, 2, 12)),
        ("zero1", True, (2, 2, 3)),
        ("zero2", True, (2, 0.5, 3)),
        ("zero3", True, (0.5, 0.5, 3)),
        ("ddp", False, (4, 4, 8)),
        ("zero1", False, (4, 4, 2)),
        ("zero2", False, (4, 1, 2)),
        ("zero3", False, (1, 1, 2)),
        ("tp", False, (4, 4, 8)),
        ("tp_sp", True, (2, 2, 12)),
        ("tp_fsdp", False, (1, 1, 2)),
    ],
)
def test_each_strategy_splits_its_own_part_of_the_state(
    strategy: str, mixed: bool, expected: tuple[float, float, float]
) -> None:
    state = state_bytes(strategy, 1000, 4, mixed=mixed)
    assert (state.parameters, state.gradients, state.optimizer) == tuple(1000 * share for share in expected)


def test_tensor_parallelism_divides_all_but_the_replicated_parameters() -> None:
    assert state_bytes("tp", 1000, 1, mixed=False, tp=4, num_replicated=200).total == 16 * (200 + 800 / 4)
    assert state_bytes("tp_fsdp", 1000, 2, mixed=False, tp=4, num_replicated=200).total == 16 * (200 + 800 / 4) / 2


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"strategy\(zero4\) is none of ddp, zero1"):
        state_bytes("zero4", 1, 1, mixed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [LAYER, LayerShape(microbatch=1, sequence=24, hidden=48, heads=6, kv_heads=6, ffn=192)]
)
def test_the_models_layer_saves_what_the_formula_says_and_the_norms_values(
    shape: LayerShape, dtype: torch.dtype
) -> None:
    layer = gpt_layer(shape).to(dtype)
    x = torch.randn(shape.microbatch, shape.sequence, shape.hidden, dtype=dtype, requires_grad=True)
    with SavedTensors(layer) as saved:
        layer(x)
    norm_bytes = NORM_VALUES * shape.microbatch * shape.sequence * dtype.itemsize
    assert saved.num_bytes == gpt_activation_bytes(shape, dtype.itemsize) + norm_bytes


def test_in_16_bit_the_gpt_formula_is_the_one_of_the_literature() -> None:
    sbh = TOKENS * LAYER.hidden
    assert gpt_activation_bytes(LAYER, 2) == pytest.approx(sbh * (32 + 4 * LAYER.heads / LAYER.hidden))


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


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_modern_layer_saves_what_the_formula_says(kv_heads: int) -> None:
    shape = replace(LAYER, kv_heads=kv_heads, ffn=88)
    layer = ModernLayer(shape)
    with SavedTensors(layer) as saved:
        layer(torch.randn(shape.microbatch, shape.sequence, shape.hidden, requires_grad=True))
    assert saved.num_bytes == swiglu_activation_bytes(shape, 4) + NORM_VALUES * TOKENS * 4


def test_in_16_bit_the_modern_formula_is_the_one_of_the_literature() -> None:
    shape = replace(LAYER, kv_heads=2, ffn=88)
    per_sbh = 12 + 4 * 2 / 4 + 8 * 88 / 32 + 4 * 4 / 32
    assert swiglu_activation_bytes(shape, 2) == pytest.approx(TOKENS * 32 * per_sbh)


def test_tensor_parallelism_leaves_norms_whole_and_sequence_parallelism_only_their_outputs() -> None:
    unit = TOKENS * LAYER.hidden * 2
    log_sum_exp = 4 * LAYER.heads * TOKENS / 4
    assert gpt_activation_bytes(LAYER, 2, tp=4) == unit * (4 + 12 / 4) + log_sum_exp
    assert gpt_activation_bytes(LAYER, 2, tp=4, sequence_parallel=True) == unit * (2 + 2 / 4 + 12 / 4) + log_sum_exp
    assert swiglu_activation_bytes(LAYER, 2, tp=4, sequence_parallel=True) == unit * (2 + 2 / 4 + 20 / 4) + log_sum_exp


def test_recomputing_keeps_the_input_alone() -> None:
    layer = gpt_layer(LAYER)
    x = torch.randn(LAYER.microbatch, LAYER.sequence, LAYER.hidden, requires_grad=True)
    with SavedTensors(layer) as saved:
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    assert saved.num_bytes == recompute_activation_bytes(LAYER, 4) == math.prod(x.shape) * 4
