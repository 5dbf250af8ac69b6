"""Context parallelism: every rank holds the whole model and a part of each sequence; attention reaches all of it.

Weights' gradients are averaged over the same ranks by DDP, on a group of its own, so that bytes are told apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.plan.params import Value
from bench.results import details
from bench.text import UserError
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.context_parallel.allgather_kv import AllGatherAttention
from workloads.context_parallel.attention_block import Blocks
from workloads.context_parallel.attention_kernel import Dense, Kernel, Timed, kernel_for
from workloads.context_parallel.context_case import parse_attention, refusal_of_place, refuse_context, ulysses_of
from workloads.context_parallel.context_probe import Look, explain_attention
from workloads.context_parallel.dense_attention import attend_documents, attend_fully
from workloads.context_parallel.exchange_plan import ContextPlan, balance_limit
from workloads.context_parallel.recorder import Recorder
from workloads.context_parallel.ring import RingAttention
from workloads.context_parallel.torch_cp import TorchContextParallel
from workloads.context_parallel.ulysses import Ulysses
from workloads.costs.communication_pattern import ddp_sent_bytes
from workloads.costs.cp_costs import AttentionBytes, AttentionSizes, attention_bytes, crossover_ranks
from workloads.data_parallel.ddp import num_elements, wrap
from workloads.model.optimizer import make_optimizer
from workloads.model.shapes import BUCKET, Shape
from workloads.model.timed_compute import TimedCompute, fill_distinct_gradients
from workloads.model.transformer import Attention, Core, Transformer, build, rotate
from workloads.step.layout import Layout
from workloads.step.training_step import Options, TrainingStep

_ROUNDS = 3

Groups = Mapping[str, dist.ProcessGroup]


def prepare(world: World, **params: Value) -> "ContextStep":
    """Return the step."""
    return ContextStep(world, params)


class ContextStep(TrainingStep):
    """A training step on parts of sequences, which can also say what its attention sends, waits for and computes."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        self._recorder = Recorder(world.device)
        # its own: what other waits take too long must not make a block of attention shorter than it is said to be
        self._block_waiter = TimedCompute(world.device)
        super().__init__(world, params, self._lay_out)

    def reset(self) -> None:
        """Draw the next batch."""
        self._block_waiter.forget()
        super().reset()

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Add to what every step says of itself what attention does, step by step of the ring."""
        mine = self._explain_attention(begin, _ROUNDS if budget_seconds > 0 else 1)
        found = super().explain(begin, budget_seconds)
        metrics = dict(found.metrics)
        # the shared closed form is of whole sequences, and linear in their length
        whole = metrics["memory_formula.activations"]
        metrics["memory_formula.activations"] = msgspec.structs.replace(
            whole, value=(whole.value or 0.0) / self._world.size
        )
        return replace(
            found,
            metrics={**metrics, **mine.metrics},
            details={**found.details, **mine.details},
            notes=(*found.notes, *mine.notes),
        )

    def close(self) -> None:
        """Give back the process groups, and what torch's own method changed."""
        if isinstance(self._core, TorchContextParallel):
            self._core.close()
        super().close()

    def _fill_distinct_gradients(self) -> None:
        """Let each rank's timed gradients differ: all have the same sequences, and average over all ranks."""
        fill_distinct_gradients(self.layout.model, self._world.rank, self._world.size, self._world.size)

    def _explain_attention(self, begin: Callable[[], None], rounds: int) -> Explanation:
        look = Look(
            plan=self._plan,
            sent=self._sent,
            recorder=self._recorder,
            layers=self._options.shape.layers,
            forwards=_forwards(self._options),
        )
        return explain_attention(self._world, self.layout, look, self._forward, self.step, begin, rounds)

    def _lay_out(self, model: Transformer, world: World, options: Options, params: Mapping[str, Value]) -> Layout:
        plan = self._plan = plan_of(params, options.shape, world)
        axes, made = _groups(world, plan)
        kernel = _kernel(self._block_waiter, world, options, plan, str(params["attention"]))
        self._core = core_of(plan, world.rank, world.device, axes, kernel, self._recorder)
        self._sent = _attention_bytes(plan, options)
        _give(model, self._core, torch.tensor(plan.places(world.rank), device=world.device))
        ddp = wrap(model, world, float(BUCKET.default))
        gradients = ddp_sent_bytes(
            num_elements(model), options.dtype.itemsize, world.size, num_synchronisations=options.accumulation
        )
        attention = self._sent.step(options.shape.layers, options.accumulation, forwards=_forwards(options))
        return Layout(
            module=ddp,
            model=model,
            optimizer=make_optimizer(model.parameters(), options.dtype, timed=options.timed),
            axes={**axes, "dp": world.group},
            data_rank=0,
            data_size=1,
            expected_bytes={**attention, **gradients},
            loss=partial(_loss_of_part, ddp, torch.tensor(plan.tokens(world.rank), device=world.device)),
            reference_model=_alone(plan, options.shape, world) if plan.mask != "causal" else None,
            made_groups=made,
            details=_attention(plan, options.shape, self._sent, str(params["attention"]), kernel).as_details,
            notes=(*_notes(plan, str(params["attention"])), *_doubts_of_kernel(kernel, plan, options)),
        )


def plan_of(params: Mapping[str, Value], shape: Shape, world: World) -> ContextPlan:
    """Return the plan that a case's parameters mean; ``UserError`` by equation where there is none."""
    method = str(params["method"])
    reason = refuse_context(shape, params, world.size)
    reason = reason or refusal_of_place(method, world.backend, world.device.type)
    if reason is not None:
        raise UserError(reason)
    return ContextPlan(
        method=method,
        mask=str(params["mask"]),
        sequence=shape.sequence,
        ranks=world.size,
        ulysses=ulysses_of(method, int(params["ulysses"]), world.size),
        seed=world.seed,
    )


def _groups(world: World, plan: ContextPlan) -> tuple[dict[str, dist.ProcessGroup], tuple[dist.ProcessGroup, ...]]:
    """Return a rank's group of each attention axis, all newly made; every rank of the launch takes part."""
    ranks, size = dist.get_process_group_ranks(world.group), plan.ulysses
    if plan.method == "usp":
        rows = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        axes = {"ulysses": _mine(rows, world), "ring": _mine([ranks[i::size] for i in range(size)], world)}
    else:
        axes = {"cp": _mine([ranks], world)}
    return axes, tuple(axes.values())


def _mine(partition: Sequence[Sequence[int]], world: World) -> dist.ProcessGroup:
    """Make every group of a partition of ranks, as each rank must, and return the one that has this rank."""
    made = [dist.new_group(list(ranks)) for ranks in partition]
    mine: dist.ProcessGroup = next(g for g, of in zip(made, partition, strict=True) if world.global_rank in of)
    return mine


def _kernel(waiter: TimedCompute, world: World, options: Options, plan: ContextPlan, attention: str) -> Kernel:
    shape, seconds = options.shape, parse_attention(attention)
    if seconds is None:
        return kernel_for(world.device, options.dtype, shape.head_size)
    pairs = options.microbatch * shape.heads * plan.all_pairs()
    return Timed(waiter, seconds * plan.ranks / pairs)


def core_of(
    plan: ContextPlan, rank: int, device: torch.device, axes: Groups, kernel: Kernel, recorder: Recorder
) -> Core:
    """Return how the rank-th of a plan's ranks attends; ``axes`` are the groups that the plan's method names."""
    if plan.method == "torch_cp":
        return TorchContextParallel(axes["cp"], device.type)
    tiles = [plan.tiles(rank, step) for step in range(plan.num_steps)]
    blocks = Blocks(kernel=kernel, recorder=recorder, tiles=tiles)
    if plan.method == "allgather_kv":
        return AllGatherAttention(axes["cp"], blocks, plan.dealt(), device)
    if plan.method == "ulysses":
        return Ulysses(axes["cp"], RingAttention(None, blocks), recorder)
    if plan.method == "usp":
        return Ulysses(axes["ulysses"], RingAttention(axes["ring"], blocks), recorder)
    return RingAttention(axes["cp"], blocks)


def _give(model: Transformer, core: Core, places: Tensor) -> None:
    """Let every layer attend by a core, and its tokens stand at their places."""
    model.places = places
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = core
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=places)


def _loss_of_part(model: nn.Module, mine: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss over this rank's positions of tokens (b, s + 1)."""
    logits = model(tokens[:, :-1][:, mine])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, mine].flatten())


def _alone(plan: ContextPlan, shape: Shape, world: World) -> Callable[[torch.dtype], nn.Module]:
    """Return what builds a single process's model under the plan's mask."""
    whole = replace(plan, method="ring", ranks=1, ulysses=1)
    places = torch.tensor(whole.places(0), device=world.device)
    core: Core = attend_fully if plan.mask == "full" else partial(attend_documents, starts=plan.starts)

    def build_alone(dtype: torch.dtype) -> nn.Module:
        model = build(shape, world.seed, world.device, dtype)
        _give(model, core, places)
        return model

    return build_alone


def _attention_bytes(plan: ContextPlan, options: Options) -> AttentionBytes:
    shape = options.shape
    sizes = AttentionSizes(
        microbatch=options.microbatch,
        sequence=shape.sequence,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        element_bytes=options.dtype.itemsize,
    )
    return attention_bytes(plan.method, sizes, plan.ranks, plan.ulysses)


def _forwards(options: Options) -> int:
    """Return how often a step computes a layer's forward pass: backward does again what checkpointing forgot."""
    return 1 if options.checkpointing == "none" else 2


def _attention(
    plan: ContextPlan, shape: Shape, sent: AttentionBytes, attention: str, kernel: Kernel
) -> details.Attention:
    return details.Attention(
        method=plan.method,
        mask=plan.mask,
        token_order=plan.order,
        sequence=plan.sequence,
        tokens_per_rank=plan.sequence // plan.ranks,
        documents=tuple(plan.lengths) if plan.mask == "packed" else None,
        attention=attention,
        attention_bytes={"forward": sent.forward, "backward": sent.backward, "per": "layer and microbatch"},
        crossover_ranks=crossover_ranks(shape.heads, shape.kv_heads),
        balance_limit=balance_limit(plan.method, plan.ranks) if plan.mask == "causal" else None,
        kernel=None if plan.method == "torch_cp" else kernel.name,
    )


def _notes(plan: ContextPlan, attention: str) -> tuple[str, ...]:
    notes = []
    if parse_attention(attention) is not None:
        notes.append(f"attention {attention}: a layer's forward on the mean rank, shared by the pairs a mask leaves")
    if plan.method == "torch_cp":
        notes.append("torch_cp: torch computes and communicates within, so that balance and ring steps are not seen")
    return tuple(notes)


def _doubts_of_kernel(kernel: Kernel, plan: ContextPlan, options: Options) -> tuple[str, ...]:
    """Return what to say where attention is slower than a fused kernel's; torch's own method has kernels of its own."""
    if not isinstance(kernel, Dense) or plan.method == "torch_cp":
        return ()
    dtype, size = str(options.dtype).removeprefix("torch."), options.shape.head_size
    return (
        "attention: the plain formula in float32, for no fused kernel of this device gives the log-sum-exp "
        f"in {dtype} with heads of {size}",
    )
