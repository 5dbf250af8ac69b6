"""What ranks do for the tests of context parallelism: attention alone, against the formula, and whole steps."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from test_dense_attention import formula
from test_training import small
from torch import Tensor

from bench.world import World
from workloads.communication import Call, counted
from workloads.context.attention_kernel import kernel_for
from workloads.context.cp import ContextStep, _groups, core_of
from workloads.context.cp_case import ulysses_of
from workloads.context.cp_costs import AttentionSizes, attention_bytes
from workloads.context.cp_plan import ContextPlan
from workloads.context.cp_recorder import Recorder
from workloads.costs import sent_bytes

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
        """Return q, k, v of the whole sequences and the output's gradient."""
        torch.manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        sizes = [(BATCH, of, self.sequence, self.head_size) for of in heads]
        return tuple(torch.randn(size).to(getattr(torch, self.dtype)) for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Found:
    """How far attention is from the formula, relative to its largest value; bytes as sent and by closed form."""

    apart: dict[str, float]
    sent: dict[str, dict[str, float]]
    expected: dict[str, dict[str, float]]
    pairs: dict[tuple[str, int], int]


def attended(world: World, method: str, mask: str, sizes: Sizes, ulysses: int = 0) -> Found:
    """Attend over ranks forward and backward, on this rank's part of the same q, k, v."""
    plan = ContextPlan(
        method=method,
        mask=mask,
        sequence=sizes.sequence,
        ranks=world.size,
        ulysses=ulysses_of(method, ulysses, world.size),
        seed=3,
    )
    axes, made = _groups(world, plan)
    recorder, mine = Recorder(world.device), plan.tokens(world.rank)
    q, k, v, gradient = sizes.drawn()
    kernel = kernel_for(world.device, q.dtype, sizes.head_size)
    core = core_of(plan, world.rank, world.device, axes, kernel, recorder)
    leaves = [x[:, :, mine].requires_grad_() for x in (q, k, v)]
    outs: list[Tensor] = []
    with recorder.recording():
        forward = counted(lambda: outs.append(core(leaves[0], leaves[1], leaves[2])), axes)
        backward = counted(lambda: outs[0].backward(gradient[:, :, mine]), axes)  # type: ignore[no-untyped-call]
    for group in made:
        dist.destroy_process_group(group)
    closed = attention_bytes(method, _sizes(sizes, q), plan.ranks, plan.ulysses)
    return Found(
        apart=_apart(plan, (q, k, v, gradient), [outs[0].detach(), *(leaf.grad for leaf in leaves)], mine),
        sent={"forward": _by_axis(forward), "backward": _by_axis(backward)},
        expected={"forward": _some(closed.forward), "backward": _some(closed.backward)},
        pairs=dict(recorder.pairs),
    )


def _sizes(sizes: Sizes, q: Tensor) -> AttentionSizes:
    return AttentionSizes(
        microbatch=BATCH,
        sequence=sizes.sequence,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        element_bytes=q.element_size(),
    )


def _apart(
    plan: ContextPlan, drawn: tuple[Tensor, ...], found: list[Tensor | None], mine: list[int]
) -> dict[str, float]:
    leaves = [x.double().requires_grad_() for x in drawn[:3]]
    out = formula(leaves[0], leaves[1], leaves[2], seen_by(plan))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, drawn[3].double())]
    apart = {}
    for name, ours, theirs in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert ours is not None
        apart[name] = float((ours - theirs[:, :, mine]).abs().max() / theirs.abs().max())
    return apart


def seen_by(plan: ContextPlan) -> Tensor:
    """Return which keys each query of the whole sequence sees."""
    positions = torch.arange(plan.sequence)
    if plan.mask == "full":
        return torch.ones(plan.sequence, plan.sequence, dtype=torch.bool)
    document = torch.searchsorted(torch.tensor(plan.starts), positions, right=True)
    return (positions[:, None] >= positions) & (document[:, None] == document)


def _by_axis(calls: tuple[Call, ...]) -> dict[str, float]:
    sent: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)
    return _some(sent)


def _some(sent: dict[str, float]) -> dict[str, float]:
    return {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes}


def all_attended(world: World, cases: list[tuple[str, str, Sizes, int]]) -> list[Found]:
    """Return what each of some cases finds."""
    return [attended(world, method, mask, sizes, ulysses) for method, mask, sizes, ulysses in cases]


def assert_right(found: Found, limit: float = 1e-5) -> None:
    """Let output and gradients be the formula's, and bytes those of the closed form."""
    assert max(found.apart.values()) <= limit, found.apart
    assert found.sent == found.expected
    assert found.sent["forward"]


def explained(
    world: World, params: dict[str, Any], whole: bool = False
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return the metrics and the details of a small step's explanation: of its attention, or the whole."""
    step = small(world, "cp", params)
    assert isinstance(step, ContextStep)

    def begin() -> None:
        step.reset()
        world.barrier()

    for _ in range(2):
        begin()
        step.step()
    found = step.explain(begin, 0.0) if whole else step._explain_attention(begin, 3)
    step.close()
    return {name: metric.value for name, metric in found.metrics.items()}, found.details
