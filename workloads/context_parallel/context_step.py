"""Context parallelism: every rank holds the whole model and a part of each sequence; attention reaches all of it.

Weights' gradients are averaged over the same ranks by DDP, on a group of its own, so that bytes are told apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.machine.world_spec import WorldSpec
from bench.plan.params import Value
from bench.results import details
from bench.text import UserError
from bench.world.world import World
from workloads.context_parallel import attention_methods as methods
from workloads.context_parallel.attention_kernel import Dense, Kernel, kernel_for, waiting_kernel
from workloads.context_parallel.context_case import ContextPlan, balance_limit, parse_attention, plan_of, refuse_place
from workloads.context_parallel.context_probe import AttentionProbe
from workloads.context_parallel.recorder import Recorder
from workloads.costs import strategies
from workloads.costs.communication_pattern import attention_bytes
from workloads.costs.step_spec import Position, StepSpec
from workloads.data_parallel.ddp import wrap
from workloads.model.shapes import BUCKET, Shape
from workloads.model.timed_compute import TimedCompute, fill_distinct_gradients
from workloads.model.transformer import Attention, Core, Transformer, outline, rotate
from workloads.step.gate import gated
from workloads.step.layout import Layout, dtype_of, group_of_mine
from workloads.step.probe import Probe
from workloads.step.training_step import TrainingStep

Groups = Mapping[str, dist.ProcessGroup]


def prepare(world: World, **params: Value) -> "ContextStep":
    return gated(ContextStep, world, params, strategies.cp)


class ContextStep(TrainingStep):
    """A training step on parts of sequences, which can also say what its attention sends, waits for and computes."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        self._recorder = Recorder(world.device)
        # its own: what other waits take too long must not make a block of attention shorter than it is said to be
        self._block_waiter = TimedCompute(world.device)
        super().__init__(world, params, self._lay_out, strategies.cp)

    def reset(self) -> None:
        self._block_waiter.forget()
        super().reset()

    def probes(self) -> Sequence[Probe[Any]]:
        each, layers = attention_bytes(self.spec.at(self._world.rank)), self.spec.shape.layers
        there, again = each["forward"], self.spec.forwards - 1  # backward computes again what checkpointing forgot
        attention = AttentionProbe(
            world=self._world,
            layout=self.layout,
            plan=self._plan,
            expected={
                "forward": {axis: layers * sent for axis, sent in there.items()},
                "backward": {axis: layers * (sent + again * there[axis]) for axis, sent in each["backward"].items()},
            },
            recorder=self._recorder,
            forward=self._forward,
        )
        return attention, *super().probes()

    def close(self) -> None:
        if isinstance(self._core, methods.TorchContextParallel):
            self._core.close()
        super().close()

    def _fill_distinct_gradients(self) -> None:
        """Let each rank's timed gradients differ: all have the same sequences, and average over all ranks."""
        fill_distinct_gradients(self.layout.model, self._world.rank, self._world.size, self._world.size)

    def _lay_out(self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
        shape, attention = spec.shape, str(params["attention"])
        plan = self._plan = plan_of(shape, params, world.size, world.seed)
        place = WorldSpec(nproc=world.size, backend=world.backend, device=world.device.type)
        if (reason := refuse_place(params, place)) is not None:
            raise UserError(reason)
        axes, kernel = make_groups(world, plan), kernel_for(world.device, dtype_of(spec), shape.head_size)
        if (seconds := parse_attention(attention)) is not None:
            each, heads = spec.microbatch, shape.heads
            kernel = waiting_kernel(seconds, plan, microbatch=each, heads=heads, waiter=self._block_waiter)
        self._core = core_of(plan, world.rank, world.device, axes, kernel, self._recorder)
        model.places = torch.tensor(plan.places(world.rank), device=world.device)
        attend_by(model, self._core, model.places)
        ddp = wrap(model, world, float(BUCKET.default))
        return replace(
            Layout.of(spec, world, model, {**axes, "dp": world.group}, module=ddp),
            loss=partial(_loss_of_part, ddp, torch.tensor(plan.tokens(world.rank), device=world.device)),
            reference_model=partial(_alone, plan, shape, world) if plan.mask != "causal" else None,
            made_groups=tuple(axes.values()),
            details=_attention(plan, spec.at(world.rank), attention, kernel).as_details,
            notes=tuple(_notes(plan, attention, kernel, spec)),
        )


def make_groups(world: World, plan: ContextPlan) -> Groups:
    """Return a rank's group of each attention axis, all newly made; every rank of the launch takes part."""
    ranks, size = dist.get_process_group_ranks(world.group), plan.ulysses
    if plan.method != "usp":
        return {"cp": group_of_mine(world, [ranks])}
    rows = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return {"ulysses": group_of_mine(world, rows), "ring": group_of_mine(world, [ranks[i::size] for i in range(size)])}


def core_of(
    plan: ContextPlan, rank: int, device: torch.device, axes: Groups, kernel: Kernel, recorder: Recorder
) -> Core:
    """Return how the rank-th of a plan's ranks attends; ``axes`` are the groups that the plan's method names."""
    if plan.method == "torch_cp":
        return methods.TorchContextParallel(axes["cp"], device.type)
    tiles = [plan.tiles(rank, step) for step in range(plan.num_steps)]
    if plan.method == "allgather_kv":
        dealt = torch.tensor(plan.dealt(), device=device)
        return methods.AllGatherAttention(axes["cp"], kernel, recorder, tiles, dealt)
    if plan.method == "ulysses":
        return methods.Ulysses(axes["cp"], methods.RingAttention(None, kernel, recorder, tiles), recorder)
    if plan.method == "usp":
        return methods.Ulysses(axes["ulysses"], methods.RingAttention(axes["ring"], kernel, recorder, tiles), recorder)
    return methods.RingAttention(axes["cp"], kernel, recorder, tiles)


def attend_by(model: nn.Module, core: Core | None, positions: Tensor) -> None:
    """Let every layer attend by a core, where one is given, and turn its tokens by their positions."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = core or module.core
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=positions)


def _loss_of_part(model: nn.Module, mine: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss over this rank's positions of tokens (b, s + 1)."""
    logits = model(tokens[:, :-1][:, mine])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, mine].flatten())


def _alone(plan: ContextPlan, shape: Shape, world: World, dtype: torch.dtype) -> nn.Module:
    model = outline(shape, dtype)
    whole = replace(plan, method="ring", ranks=1, ulysses=1)
    core = partial(attend_alone, starts=None if plan.mask == "full" else plan.starts)
    model.places = torch.tensor(whole.places(0), device=world.device)
    attend_by(model, core, model.places)
    return model


def attend_alone(q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int] | None) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q (b, a, s, d), k and v (b, a_kv, s, d), with nothing dealt out.

    A query sees keys that are not later and of its document, these start at ``starts``; without them, all keys.
    """
    seen = None
    if starts is not None:
        positions = torch.arange(q.shape[2], device=q.device)
        documents = torch.searchsorted(torch.tensor(starts, device=q.device), positions, right=True)
        seen = (documents[:, None] == documents) & (positions[:, None] >= positions)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])


def _attention(plan: ContextPlan, at: Position, attention: str, kernel: Kernel) -> details.Attention:
    shape = at.spec.shape
    return details.Attention(
        method=plan.method,
        mask=plan.mask,
        token_order=plan.order,
        sequence=plan.sequence,
        tokens_per_rank=plan.sequence // plan.ranks,
        documents=tuple(plan.lengths) if plan.mask == "packed" else None,
        attention=attention,
        attention_bytes={**attention_bytes(at), "per": "layer and microbatch"},
        crossover_ranks=1 + shape.heads / shape.kv_heads,  # above which Ulysses sends less forward than a ring: 1 + 1/g
        balance_limit=balance_limit(plan.method, plan.ranks) if plan.mask == "causal" else None,
        kernel=None if plan.method == "torch_cp" else kernel.name,
    )


def _notes(plan: ContextPlan, attention: str, kernel: Kernel, spec: StepSpec) -> Iterator[str]:
    if parse_attention(attention) is not None:
        yield f"attention {attention}: a layer's forward on the mean rank, shared by the pairs a mask leaves"
    if plan.method == "torch_cp":
        yield "torch_cp: torch computes and communicates within, so that balance and ring steps are not seen"
    elif isinstance(kernel, Dense):
        yield (
            "attention: the plain formula in float32, for no fused kernel of this device gives the log-sum-exp "
            f"in {str(dtype_of(spec)).removeprefix('torch.')} with heads of {spec.shape.head_size}"
        )
