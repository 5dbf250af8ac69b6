"""What ranks do for the tests of context parallelism: attention alone, against the formula, and whole steps."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash, Grads, num_pairs
from parbench.workloads.context_parallel.context_case import ContextPlan, ulysses_of
from parbench.workloads.context_parallel.context_step import ContextStep, core_of, make_groups
from parbench.workloads.costs.communication_pattern import attention_bytes, bytes_by_axis
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.step.probe import run_probes
from parbench.workloads.step.sent_bytes import counted
from tests.support.training_steps import build_small_step

BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A small attention; ``sequence`` and ``heads`` may be odd multiples of the ranks."""

    sequence: int = 28
    heads: int = 6
    kv_heads: int = 6
    head_size: int = 5
    dtype: str = "float32"

    def drawn(self) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        sizes = [(BATCH, of, self.sequence, self.head_size) for of in heads]
        return tuple(torch.randn(size).to(getattr(torch, self.dtype)) for size in sizes)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.double() @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


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


def attended(
    world: World, method: str, mask: str, sizes: Sizes, ulysses: int
) -> dict[str, tuple[Any, Any]]:
    """Attend over ranks to this rank's part of the same q, k, v, forward and backward.

    Return what is found and expected: bytes each way by axis, pairs by direction, and tensors.
    """
    inner = ulysses_of(method, ulysses, world.size)
    plan = ContextPlan(
        method=method, mask=mask, sequence=sizes.sequence, ranks=world.size, ulysses=inner
    )
    axes = make_groups(world, plan)
    kernel, mine = CountingKernel(), plan.tokens(world.rank)
    q, k, v, gradient = sizes.drawn()
    core = core_of(plan, world.rank, world.device, axes, kernel)
    leaves = [x[:, :, mine].requires_grad_() for x in (q, k, v)]
    outs: list[Tensor] = []
    forward = counted(lambda: outs.append(core(leaves[0], leaves[1], leaves[2])), axes)
    backward = counted(lambda: outs[0].backward(gradient[:, :, mine]), axes)  # type: ignore[no-untyped-call]
    for group in axes.values():
        dist.destroy_process_group(group)
    hidden = sizes.heads * sizes.head_size
    tiny = replace(
        SHAPES["tiny"],
        hidden=hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        sequence=sizes.sequence,
    )
    spec = StepSpec(
        shape=tiny,
        mesh={"cp": plan.ranks},
        microbatch=BATCH,
        element_bytes=q.element_size(),
        cp_method=method,
        ulysses=plan.ulysses,
    )
    closed = attention_bytes(spec.at(0))
    pairs = (
        sum(plan.pairs(world.rank, step) for step in range(plan.num_steps))
        * BATCH
        * sizes.heads
        // plan.ulysses
    )
    alone = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = formula(alone[0], alone[1], alone[2], seen_by(plan))
    right = [out.detach(), *torch.autograd.grad(out, alone, gradient.double())]
    tensors = zip((outs[0].detach(), *(leaf.grad for leaf in leaves)), right, strict=True)
    return {
        "forward": (_some(bytes_by_axis(forward)), _some(closed["forward"])),
        "backward": (_some(bytes_by_axis(backward)), _some(closed["backward"])),
        "pairs": (kernel.pairs, {"forward": pairs, "backward": pairs}),
        "apart": (
            [
                float((a - b[:, :, mine]).abs().max() / b.abs().max())
                for a, b in tensors
                if a is not None
            ],
            None,
        ),
    }


def seen_by(plan: ContextPlan) -> Tensor:
    every_pair = torch.ones(plan.sequence, plan.sequence, dtype=torch.bool)
    return every_pair if plan.mask == "full" else every_pair.tril()


def _some(sent: dict[str, float]) -> dict[str, float]:
    return {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes}


def wrong_of(
    world: World, cases: list[tuple[str, str, Sizes, int]], limit: float = 1e-5
) -> list[Any]:
    """Return what is wrong: output or gradients are not the formula's, bytes not the closed form's, or pairs."""
    wrong: list[Any] = []
    for case in cases:
        found = attended(world, *case)
        apart, _ = found.pop("apart")
        if len(apart) != 4 or not max(apart) <= limit:
            wrong.append((case, apart))
        wrong += [
            (case, name, seen, expected)
            for name, (seen, expected) in found.items()
            if seen != expected
        ]
    return wrong


def explained(world: World, params: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a small step's explanation."""
    step = build_small_step(world, "cp", params)
    assert isinstance(step, ContextStep)

    def begin() -> None:
        step.reset()
        world.barrier()

    for _ in range(2):
        begin()
        step.step()
    found = run_probes(world, step.probes(), step.step, begin, 0.0)
    step.close()
    return {name: metric.value for name, metric in found.metrics.items()}
