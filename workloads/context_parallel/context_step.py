"""Context parallelism: every rank holds the whole model and a part of each sequence; attention reaches all of it.

Weights' gradients are averaged over the same ranks by DDP, on a group of its own, so that bytes are told apart.
The probe says what attention sends, how even its pairs are, and what hops leave exposed.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parbench.bench.plan.params import Value
from parbench.bench.results import details
from parbench.bench.results.metrics import MetricValue, values
from parbench.bench.results.stats import Estimate, median
from parbench.bench.results.turns import cross_fitted
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.context_parallel import attention_methods as methods
from parbench.workloads.context_parallel import context_case
from parbench.workloads.context_parallel.attention_kernel import (
    Kernel,
    Recorder,
    Size,
    Wait,
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
from parbench.workloads.model.transformer import Attention, Core, Transformer, cross_entropy, outline, rotate
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout, dtype_of, group_of_mine
from parbench.workloads.step.probe import Begin, Probe, Step, take_turns
from parbench.workloads.step.sent_bytes import counted
from parbench.workloads.step.training_step import TrainingStep

Groups = Mapping[str, dist.ProcessGroup]
BytesEachWay = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw: bytes of one microbatch's passes by direction and axis, pairs by direction and step, waits by
    round, and the seconds of each communication with nothing beside it.
    """

    sent: BytesEachWay
    pairs: dict[tuple[str, int], int] = field(default_factory=dict)
    rounds: list[list[Wait]] = field(default_factory=list)
    alone: dict[Size, list[float]] = field(default_factory=dict)
    uncertainty_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionProbe:
    """What attention sends, computes and waits for; ``expected`` are bytes of a microbatch by direction and axis."""

    world: World
    layout: Layout
    plan: ContextPlan
    expected: BytesEachWay
    recorder: Recorder
    forward: Callable[[], Tensor]
    share = 0.1

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> Seen:
        self.layout.optimizer.zero_grad()
        begin()
        losses: list[Tensor] = []
        axes = self.layout.axes
        sent = {"forward": bytes_by_axis(counted(lambda: losses.append(self.forward()), axes))}
        sent["backward"] = bytes_by_axis(counted(losses.pop().backward, axes))
        ahead_seconds = self.world.clock.offsets_ns[self.world.global_rank] / 1e9
        rounds: list[list[Wait]] = []

        def turn() -> None:
            begin()
            with self.recorder.recording():
                step()
            rounds.append(self.recorder.waits(ahead_seconds))

        take_turns(self.world, budget_seconds, turn, most=3)
        pairs = dict(self.recorder.pairs)
        return Seen(
            sent=sent,
            pairs=pairs,
            rounds=rounds,
            alone=self._seconds_alone(rounds[-1]),
            uncertainty_seconds=self.recorder.uncertainty_seconds,
        )

    def _seconds_alone(self, waits: Sequence[Wait]) -> dict[Size, list[float]]:
        world = self.world
        found: dict[Size, list[float]] = {}
        for size in dict.fromkeys(wait.size for wait in waits):
            what, shape, dtype = size
            moved = torch.zeros(shape, dtype=dtype, device=world.device)
            found[size] = []
            for _ in range(1 + 5):  # one to warm up
                world.sync()
                world.barrier()
                began = time.perf_counter()
                self.recorder.moves[what](moved)
                world.sync()
                found[size].append(time.perf_counter() - began)
            del found[size][0]
        return found

    def summarise(self, told: Sequence[Seen]) -> Explanation:
        metrics: dict[str, MetricValue] = {}
        for direction, by_axis in self.expected.items():
            for axis, closed in by_axis.items():
                sent = told[0].sent[direction].get(axis, 0.0)
                found = {"sent": sent, "expected": closed, "ratio": sent / closed if closed else None}
                named = {f"bytes_{name}.{axis}.{direction}": number for name, number in found.items()}
                metrics |= values(named, "one microbatch")
        pairs = [[seen.pairs.get(("forward", i), 0) for i in range(self.plan.num_steps)] for seen in told]
        metrics |= values({"load_balance": context_case.balance(pairs), "balance_ceiling": self.plan.balance_ceiling()})
        hops = hops_of(told)
        exposed, waited = _exposed_and_waited(told, range(len(told[0].rounds[-1])))
        metrics |= values({"attention_comm": sum(hop.comm_seconds for hop in hops)}, "on the slowest rank")
        metrics |= values({"attention_exposed": exposed, "attention_wait": waited})
        doubt = max(seen.uncertainty_seconds for seen in told)
        notes = (f"attention's waits are of a GPU's events, known by the host's clock to {doubt * 1e6:.0f} us",)
        steps = details.AttentionSteps(attention_steps=hops).as_details
        return Explanation(metrics=metrics, details=steps, notes=notes if doubt else ())


def hops_of(told: Sequence[Seen]) -> tuple[details.Hop, ...]:
    """Return each hop of a step: its bytes, how often it is made, how long it takes and what of it is exposed."""
    last = told[0].rounds[-1]
    hops: defaultdict[tuple[str, int, Size], list[int]] = defaultdict(list)
    for k, wait in enumerate(last):
        hops[wait.direction, wait.step, wait.size].append(k)
    found = []
    for (direction, step, size), chosen in hops.items():
        exposed, waited = _exposed_and_waited(told, chosen)
        alone = median([max(moves) for moves in zip(*(seen.alone[size] for seen in told), strict=True)])
        hop = details.Hop(
            direction=direction,
            step=step,
            what=size[0],
            num_bytes=last[chosen[0]].num_bytes,
            count=len(chosen),
            comm_seconds=len(chosen) * alone,
            exposed_seconds=exposed.value,
            wait_seconds=waited.value,
            pairs_by_rank=tuple(seen.pairs.get((direction, step), 0) for seen in told),
        )
        found.append(hop)
    return tuple(found)


def _exposed_and_waited(told: Sequence[Seen], chosen: Sequence[int]) -> tuple[Estimate, Estimate]:
    """Return sums over some waits, alike on all ranks, of the rank with the most: exposed ones, and all."""
    rounds = list(zip(*(seen.rounds for seen in told), strict=True))
    exposed = [
        [sum(_exposed(by_rank, by_rank[rank], k) for k in chosen) for by_rank in rounds] for rank in range(len(told))
    ]
    waited = [[sum(waits[k].seconds for k in chosen) for waits in seen.rounds] for seen in told]
    return cross_fitted(exposed), cross_fitted(waited)


def _exposed(by_rank: Sequence[Sequence[Wait]], mine: Sequence[Wait], k: int) -> float:
    """Return the seconds of a wait in which nothing was missing but the transfer: all peers had begun with theirs."""
    ready = max([mine[k].began, *(by_rank[peer][k].issued for peer in mine[k].peers)])
    return max(0.0, mine[k].ended - ready)


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

    def _fill_distinct_gradients(self) -> None:
        """Let each rank's timed gradients differ: all have the same sequences, and average over all ranks."""
        fill_distinct_gradients(self.layout.model, self._world.rank, self._world.size, self._world.size)

    def _lay_out(self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
        shape, attention = spec.shape, str(params["attention"])
        plan = self._plan = context_case.plan_of(shape, params, world.size)
        axes, kernel = make_groups(world, plan), kernel_for(world.device, dtype_of(spec), shape.head_size)
        if (seconds := context_case.parse_attention(attention)) is not None:
            each, heads = spec.microbatch, shape.heads
            kernel = waiting_kernel(seconds, plan, microbatch=each, heads=heads, waiter=self._block_waiter)
        self._core = core_of(plan, world.rank, world.device, axes, kernel, self._recorder)
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


def _attention(plan: ContextPlan, at: Position, attention: str, kernel: Kernel) -> details.Attention:
    shape = at.spec.shape
    return details.Attention(
        method=plan.method,
        mask=plan.mask,
        token_order=plan.order,
        sequence=plan.sequence,
        tokens_per_rank=plan.sequence // plan.ranks,
        attention=attention,
        attention_bytes={**attention_bytes(at), "per": "layer and microbatch"},
        crossover_ranks=1 + shape.heads / shape.kv_heads,  # above which Ulysses sends less forward than a ring: 1 + 1/g
        balance_limit=context_case.balance_limit(plan.method, plan.ranks) if plan.mask == "causal" else None,
        kernel=kernel.name,
    )


def _notes(attention: str) -> Iterator[str]:
    if context_case.parse_attention(attention) is not None:
        yield f"attention {attention}: a layer's forward on the mean rank, shared by the pairs a mask leaves"


prepare = behind_gate(ContextStep, strategies.cp)
