"""Context parallelism: every rank holds the whole model and a part of each sequence; attention reaches all of it.

Weights' gradients are averaged over the same ranks by DDP, on a group of its own, so that bytes are told apart.
The probe says what attention sends each way and how even its pairs are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parbench.bench.plan.params import Value
from parbench.bench.results import details
from parbench.bench.results.metrics import make_values
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.context_parallel import attention_methods as methods
from parbench.workloads.context_parallel import context_case
from parbench.workloads.context_parallel.attention_kernel import (
    Kernel,
    kernel_for,
    waiting_kernel,
)
from parbench.workloads.context_parallel.context_case import ContextPlan
from parbench.workloads.costs import strategies
from parbench.workloads.costs.communication_pattern import attention_bytes, bytes_by_axis
from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.data_parallel.ddp import wrap
from parbench.workloads.model.shapes import BUCKET, Shape
from parbench.workloads.model.timed_compute import TimedCompute, fill_distinct_gradients
from parbench.workloads.model.transformer import (
    Attention,
    Core,
    Transformer,
    cross_entropy,
    outline,
    rotate,
)
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout, dtype_of, group_of_mine
from parbench.workloads.step.probe import Probe, ResetFn, Step
from parbench.workloads.step.sent_bytes import record_calls
from parbench.workloads.step.training_step import TrainingStep

Groups = Mapping[str, dist.ProcessGroup]
BytesEachWay = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class AttentionProbe:
    """Compares the bytes that attention sends with the analytical ones; both by direction and axis, a microbatch."""

    layout: Layout
    plan: ContextPlan
    expected: BytesEachWay
    forward: Callable[[], Tensor]
    share = 0.1

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float) -> BytesEachWay:
        self.layout.optimizer.zero_grad()
        begin()
        losses: list[Tensor] = []
        axes = self.layout.axes
        forward_bytes = bytes_by_axis(record_calls(lambda: losses.append(self.forward()), axes))
        backward_bytes = bytes_by_axis(record_calls(losses.pop().backward, axes))
        return {"forward": forward_bytes, "backward": backward_bytes}

    def summarize(self, told: Sequence[BytesEachWay]) -> Explanation:
        metrics = make_values({"load_balance": self.plan.load_balance()})
        for direction, expected_by_axis in self.expected.items():
            for axis, expected in expected_by_axis.items():
                sent = told[0][direction].get(axis, 0.0)
                ratio = sent / expected if expected else None
                bytes_by_kind = {"sent": sent, "expected": expected, "ratio": ratio}
                named = {
                    f"bytes_{kind}.{axis}.{direction}": number
                    for kind, number in bytes_by_kind.items()
                }
                metrics |= make_values(named, "one microbatch")
        return Explanation(metrics=metrics)


class ContextStep(TrainingStep):
    """A training step on parts of sequences, which can also say what its attention sends."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        # its own: what other waits take too long must not make a block of attention shorter than it is said to be
        self._block_waiter = TimedCompute(world.device)
        super().__init__(world, params, self._lay_out, strategies.cp)

    def reset(self) -> None:
        self._block_waiter.forget()
        super().reset()

    def probes(self) -> Sequence[Probe[Any]]:
        each, layers = attention_bytes(self.spec.at(self._world.rank)), self.spec.shape.layers
        there, again = (
            each["forward"],
            self.spec.forwards - 1,
        )  # backward computes again what checkpointing forgot
        attention = AttentionProbe(
            layout=self.layout,
            plan=self._plan,
            expected={
                "forward": {axis: layers * sent for axis, sent in there.items()},
                "backward": {
                    axis: layers * (sent + again * there[axis])
                    for axis, sent in each["backward"].items()
                },
            },
            forward=self._forward,
        )
        return attention, *super().probes()

    def _fill_distinct_gradients(self) -> None:
        """Let each rank's timed gradients differ: all have the same sequences, and average over all ranks."""
        fill_distinct_gradients(
            self.layout.model, self._world.rank, self._world.size, self._world.size
        )

    def _lay_out(
        self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
    ) -> Layout:
        shape, attention = spec.shape, str(params["attention"])
        plan = self._plan = context_case.plan_of(shape, params, world.size)
        axes, kernel = (
            make_groups(world, plan),
            kernel_for(world.device, dtype_of(spec), shape.head_size),
        )
        if (seconds := context_case.parse_attention(attention)) is not None:
            each, heads = spec.microbatch, shape.heads
            kernel = waiting_kernel(
                seconds, plan, microbatch=each, heads=heads, waiter=self._block_waiter
            )
        self._core = core_of(plan, world.rank, world.device, axes, kernel)
        model.places = torch.tensor(plan.tokens(world.rank), device=world.device)
        attend_by(model, self._core, model.places)
        ddp, mine = wrap(model, world, float(BUCKET.default)), model.places
        return replace(
            Layout.of(spec, world, model, {**axes, "dp": world.group}, module=ddp),
            loss=lambda tokens: cross_entropy(ddp(tokens[:, :-1][:, mine]), tokens[:, 1:][:, mine]),
            reference_model=partial(_full_mask_model, shape) if plan.mask == "full" else None,
            made_groups=tuple(axes.values()),
            details=_attention(plan, spec.at(world.rank), attention, kernel).as_details,
            notes=tuple(_notes(attention)),
        )


def make_groups(world: World, plan: ContextPlan) -> Groups:
    """Return a rank's group of each attention axis, all newly made; every rank of the repetition takes part."""
    ranks, size = dist.get_process_group_ranks(world.group), plan.ulysses
    if plan.method != "usp":
        return {"cp": group_of_mine(world, [ranks])}
    rows = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return {
        "ulysses": group_of_mine(world, rows),
        "ring": group_of_mine(world, [ranks[i::size] for i in range(size)]),
    }


def core_of(
    plan: ContextPlan, rank: int, device: torch.device, axes: Groups, kernel: Kernel
) -> Core:
    """Return how the rank-th of a plan's ranks attends; ``axes`` are the groups that the plan's method names."""
    tiles = [plan.tiles(rank, step) for step in range(plan.num_steps)]
    if plan.method == "allgather_kv":
        dealt = torch.tensor(plan.dealt(), device=device)
        return methods.AllGatherAttention(axes["cp"], kernel, tiles, dealt)
    if plan.method == "ulysses":
        return methods.Ulysses(axes["cp"], methods.RingAttention(None, kernel, tiles))
    if plan.method == "usp":
        return methods.Ulysses(axes["ulysses"], methods.RingAttention(axes["ring"], kernel, tiles))
    return methods.RingAttention(axes["cp"], kernel, tiles)


def attend_by(model: nn.Module, core: Core | None, positions: Tensor) -> None:
    """Let every layer attend by a core, where one is given, and turn its tokens by their positions."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = core or module.core
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=positions)


def _full_mask_model(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Return one process's model, in which every query sees all keys."""
    model = outline(shape, dtype)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = attend_to_all
    return model


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q (b, a, s, d), k and v (b, a_kv, s, d)."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _attention(
    plan: ContextPlan, at: Position, attention: str, kernel: Kernel
) -> details.AttentionDetails:
    shape = at.spec.shape
    return details.AttentionDetails(
        method=plan.method,
        mask=plan.mask,
        token_order=plan.order,
        sequence=plan.sequence,
        tokens_per_rank=plan.sequence // plan.ranks,
        attention=attention,
        attention_bytes={**attention_bytes(at), "per": "layer and microbatch"},
        crossover_ranks=1
        + shape.heads
        / shape.kv_heads,  # above which Ulysses sends less forward than a ring: 1 + 1/g
        balance_limit=context_case.balance_limit(plan.method, plan.ranks)
        if plan.mask == "causal"
        else None,
        kernel=kernel.name,
    )


def _notes(attention: str) -> Iterator[str]:
    if context_case.parse_attention(attention) is not None:
        yield f"attention {attention}: a layer's forward on the mean rank, shared by the pairs a mask leaves"


prepare = behind_gate(ContextStep, strategies.cp)
