"""Attention over ranks next to the formula of attention, for tests of context parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash, Grads, num_pairs
from parbench.workloads.context_parallel.context_case import ContextPlan, ulysses_of
from parbench.workloads.context_parallel.context_step import core_of, make_groups
from parbench.workloads.costs.communication_pattern import attention_bytes, bytes_by_axis
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.step.sent_bytes import counted

BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A small attention. ``sequence`` and ``heads`` may be odd multiples of the ranks."""

    sequence: int = 28
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 5
    dtype: str = "float32"

    def draw(self) -> list[Tensor]:
        """Return queries, keys, values and the gradient of the output, the same on all ranks."""
        torch.manual_seed(7)
        tensors = []
        for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads):
            tensor = torch.randn(BATCH, heads, self.sequence, self.head_size)
            tensors.append(tensor.to(getattr(torch, self.dtype)))
        return tensors


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp over the allowed pairs, in float64."""
    groups = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(groups, dim=1)
    values = v.double().repeat_interleave(groups, dim=1)
    scores = q.double() @ keys.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ values, scores.logsumexp(dim=-1)


class CountingKernel(CpuFlash):
    """Counts the pairs of a query and a key that it computes."""

    def __init__(self) -> None:
        self.pairs = {"forward": 0, "backward": 0}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        self.pairs["forward"] += num_pairs(q, k, causal)
        return super().forward(q, k, v, causal)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        self.pairs["backward"] += num_pairs(q, k, causal)
        return super().backward(dout, q, k, v, out, lse, causal)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """The attention of one rank next to its reference and its plan."""

    errors: list[float]
    """The largest relative error of the output and of the gradients of q, k and v."""
    sent_bytes: dict[str, dict[str, float]]
    expected_bytes: dict[str, dict[str, float]]
    pairs: dict[str, int]
    expected_pairs: int


def attend(world: World, method: str, mask: str, sizes: Sizes, ulysses: int) -> Attended:
    """Attend over ranks to this rank's part of the same q, k and v, forward and backward."""
    plan = ContextPlan(
        method=method,
        mask=mask,
        sequence=sizes.sequence,
        ranks=world.size,
        ulysses=ulysses_of(method, ulysses, world.size),
    )
    axes = make_groups(world, plan)
    kernel = CountingKernel()
    tokens = plan.tokens(world.rank)
    *inputs, gradient = sizes.draw()
    core = core_of(plan, world.rank, world.device, axes, kernel)
    leaves = [tensor[:, :, tokens].requires_grad_() for tensor in inputs]
    outputs: list[Tensor] = []
    forward = counted(lambda: outputs.append(core(*leaves)), axes)
    backward = counted(lambda: torch.autograd.backward(outputs, gradient[:, :, tokens]), axes)
    for group in axes.values():
        dist.destroy_process_group(group)
    results = [outputs[0].detach(), *(leaf.grad for leaf in leaves)]
    planned = attention_bytes(make_spec(plan, sizes).at(0))
    pairs = sum(plan.pairs(world.rank, step) for step in range(plan.num_steps))
    return Attended(
        errors=[
            float((result - right[:, :, tokens]).abs().max() / right.abs().max())
            for result, right in zip(results, compute_reference(plan, sizes), strict=True)
            if result is not None
        ],
        sent_bytes={
            "forward": drop_zeros(bytes_by_axis(forward)),
            "backward": drop_zeros(bytes_by_axis(backward)),
        },
        expected_bytes={name: drop_zeros(sent) for name, sent in planned.items()},
        pairs=kernel.pairs,
        expected_pairs=pairs * BATCH * sizes.heads // plan.ulysses,
    )


def make_spec(plan: ContextPlan, sizes: Sizes) -> StepSpec:
    """Return a step whose attention is that of the plan."""
    shape = replace(
        SHAPES["tiny"],
        hidden=sizes.heads * sizes.head_size,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        sequence=sizes.sequence,
    )
    return StepSpec(
        shape=shape,
        mesh={"cp": plan.ranks},
        microbatch=BATCH,
        element_bytes=getattr(torch, sizes.dtype).itemsize,
        cp_method=plan.method,
        ulysses=plan.ulysses,
    )


def compute_reference(plan: ContextPlan, sizes: Sizes) -> list[Tensor]:
    """Return the output and the gradients of q, k and v of one process."""
    *inputs, gradient = sizes.draw()
    allowed = torch.ones(plan.sequence, plan.sequence, dtype=torch.bool)
    if plan.mask == "causal":
        allowed = allowed.tril()
    q, k, v = (tensor.double().requires_grad_() for tensor in inputs)
    output, _ = formula(q, k, v, allowed)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), gradient.double())]


def drop_zeros(sent: Mapping[str, float]) -> dict[str, float]:
    return {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes}


def attend_all(world: World, cases: list[tuple[str, str, Sizes, int]]) -> list[Any]:
    return [attend(world, *case) for case in cases]
