"""Attention and its formula, in one process and over ranks, for context parallelism."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.world import World, make_group
from parbench.workloads.context_parallel.attention_kernel import CpuFlash
from parbench.workloads.context_parallel.attention_methods import build_attention
from parbench.workloads.context_parallel.sequence_split import SequenceSplit, split_sequence
from parbench.workloads.context_parallel.tiles import Tile
from parbench.workloads.costs.communication_pattern import bytes_by_axis, list_calls
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.probes.sent_bytes import record_calls

BATCH = 2


@dataclass(frozen=True)
class AttentionReference:
    """The results of attention by its formula, in float64."""

    output: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    """The gradients of q, k and v."""


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    output_gradient: Tensor,
) -> AttentionReference:
    """Compute softmax(q k^T / sqrt(d)) v over the allowed pairs, and its gradients."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group_size, dim=1)
    values = v.repeat_interleave(group_size, dim=1)
    scores = q @ keys.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    output = scores.softmax(dim=-1) @ values
    gradients = torch.autograd.grad(output, (q, k, v), output_gradient.double())
    return AttentionReference(output.detach(), scores.logsumexp(dim=-1).detach(), gradients)


@dataclass(frozen=True)
class AttentionBlock:
    """The sizes of one block of attention."""

    rows: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int
    head_size: int

    def draw(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Draw q, k, v and the gradient of the output, which are slices as in a step."""
        torch.manual_seed(0)
        tensors = []
        for heads, length in (
            (self.heads, self.rows),
            (self.kv_heads, self.keys),
            (self.kv_heads, self.keys),
            (self.heads, self.rows),
        ):
            sequence = torch.randn(BATCH, heads, length + 3, self.head_size)
            tensors.append(sequence.to(dtype)[:, :, 2:-1])
        return tensors

    def allowed_pairs(self) -> Tensor:
        pairs = torch.ones(self.rows, self.keys, dtype=torch.bool)
        return pairs.tril() if self.causal else pairs


BLOCKS = [
    AttentionBlock(8, 8, True, 4, 4, 16),
    AttentionBlock(7, 7, True, 6, 2, 5),
    AttentionBlock(1, 1, True, 3, 1, 8),
    AttentionBlock(5, 9, False, 6, 3, 8),
    AttentionBlock(9, 2, False, 3, 3, 4),
]


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Attention over ranks. ``sequence`` and ``heads`` may be odd multiples of the ranks."""

    method: str
    sequence: int
    ulysses: int = 0
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 5
    dtype: str = "float32"

    @property
    def block(self) -> AttentionBlock:
        """All queries and keys of the attention as one block."""
        return AttentionBlock(
            rows=self.sequence,
            keys=self.sequence,
            causal=True,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
        )

    def draw(self) -> list[Tensor]:
        """Draw q, k, v and the gradient of the output, the same on all ranks."""
        return self.block.draw(getattr(torch, self.dtype))

    @property
    def shape(self) -> Shape:
        return replace(
            SHAPES["tiny"],
            layers=1,
            hidden=self.heads * self.head_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            sequence=self.sequence,
        )

    def split(self, ranks: int) -> SequenceSplit:
        return split_sequence(self.method, self.shape, ranks=ranks, ulysses=self.ulysses)

    def make_spec(self, split: SequenceSplit) -> StepSpec:
        """Return a step whose attention is this one."""
        return StepSpec(
            shape=self.shape,
            dims=ParallelDims(cp=split.ranks),
            microbatch=BATCH,
            bytes_per_element=getattr(torch, self.dtype).itemsize,
            cp_method=self.method,
            ulysses=split.ulysses,
        )


def list_pairs(tiles: Iterable[Tile]) -> list[tuple[int, int]]:
    """Return all pairs of a row and a column that the tiles compute."""
    pairs = []
    for tile in tiles:
        first_column = tile.columns.start
        for offset, row in enumerate(range(tile.rows.start, tile.rows.stop)):
            stop = first_column + offset + 1 if tile.is_causal else tile.columns.stop
            pairs += [(row, column) for column in range(first_column, stop)]
    return sorted(pairs)


def count_pairs(q: Tensor, k: Tensor, is_causal: bool) -> int:
    """Return the number of pairs of a query and a key in a block, over batch and query heads."""
    batch, heads, rows, _ = q.shape
    pairs = rows * (rows + 1) // 2 if is_causal else rows * k.shape[2]
    return batch * heads * pairs


class CountingKernel(CpuFlash):
    """Counts the pairs of a query and a key that it computes."""

    def __init__(self) -> None:
        self.forward_pairs = 0
        self.backward_pairs = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        q, k, _, causal = args
        self.forward_pairs += count_pairs(q, k, causal)
        return super().forward(*args)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        saved, k, _, causal = args
        self.backward_pairs += count_pairs(saved.q, k, causal)
        return super().backward(*args)


@dataclass(frozen=True, kw_only=True)
class AttentionResult:
    """The attention of one rank next to its reference and its plan."""

    errors: list[float]
    """The largest relative error of the output and of the gradients of q, k and v."""
    sent_bytes: dict[str, float]
    expected_bytes: dict[str, float]
    forward_pairs: int
    backward_pairs: int
    expected_pairs: int


def attend(world: World, case: AttentionCase) -> AttentionResult:
    """Attend over ranks to this rank's part of the same q, k and v, forward and backward."""
    split = case.split(world.size)
    partitions = split.method.list_axis_groups(range(world.size), split.ulysses)
    axes = {axis: make_group(world, groups) for axis, groups in partitions.items()}
    kernel = CountingKernel()
    attention = build_attention(split, world.rank, world.device, axes, kernel)
    q, k, v, gradient = case.draw()
    tokens = split.list_tokens(world.rank)
    leaves = [tensor[:, :, tokens].requires_grad_() for tensor in (q, k, v)]
    outputs: list[Tensor] = []

    def run() -> None:
        outputs.append(attention(*leaves))
        torch.autograd.backward(outputs, gradient[:, :, tokens])

    calls = record_calls(run, axes)
    for group in axes.values():
        dist.destroy_process_group(group)

    reference = compute_attention(q, k, v, case.block.allowed_pairs(), gradient)
    errors = [compute_error(outputs[0], reference.output, tokens)]
    for leaf, expected in zip(leaves, reference.gradients, strict=True):
        assert leaf.grad is not None
        errors.append(compute_error(leaf.grad, expected, tokens))
    planned_calls = list_calls(case.make_spec(split).make_rank_view(0))
    pairs = sum(len(list_pairs(tiles)) for tiles in split.list_tiles(world.rank))
    return AttentionResult(
        errors=errors,
        sent_bytes=bytes_by_axis(call for call in calls if call.ranks > 1),
        expected_bytes=bytes_by_axis(call for call in planned_calls if call.axis in axes),
        forward_pairs=kernel.forward_pairs,
        backward_pairs=kernel.backward_pairs,
        expected_pairs=pairs * BATCH * case.heads // split.ulysses,
    )


def compute_error(result: Tensor, expected: Tensor, tokens: list[int]) -> float:
    """Return the largest error of a rank's tokens, relative to the largest expected value."""
    error = (result.detach() - expected[:, :, tokens]).abs().max()
    return float(error / expected.abs().max())


def attend_all(world: World, cases: list[AttentionCase]) -> list[AttentionResult]:
    return [attend(world, case) for case in cases]
