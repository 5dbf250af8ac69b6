"""The steps that a search considers: practical meshes, and the settings of a step on each. Pure.

A mesh is practical if ``tp`` stays within a node, ``cp`` leaves each rank more than 4,096 tokens,
and a pipeline has at least as many microbatches as ranks and at most 4 stages per rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from parbench.bench.text import UserError
from parbench.workloads.costs.divisibility import (
    find_indivisible_heads,
    find_indivisible_sequence,
)
from parbench.workloads.costs.flops import count_rank_flops
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import CHECKPOINTINGS, Shape
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES, find_schedule
from parbench.workloads.pipeline_parallel.simulation import simulate

MIN_TOKENS = 2048
"""The fewest tokens of a microbatch on a rank, unless the model's sequences are shorter."""
MAX_TOKENS = 16384
"""The most tokens of a microbatch on a rank, unless a single sequence is longer."""
CONTEXT_TOKENS = 4096
"""Context parallelism leaves each rank more tokens of a sequence than this.

A search allows fewer tokens only if no mesh fits in memory otherwise.
"""
MAX_STAGES_PER_RANK = 4
"""The most pipeline stages per rank that a search tries."""
CP_METHODS = ("zigzag", "allgather_kv", "ulysses", "usp")
"""The methods of context parallelism that a search tries."""
SIMPLEST_SCHEDULE = "1f1b"
"""The pipeline schedule that a search tries first."""
ORDER = ("dp", "pp", "fsdp", "cp", "tp")
"""The axes of a mesh without expert parallelism, outermost first."""
EXPERT_ORDER = ("pp", "dp", "fsdp", "cp", "tp")
"""The axes of a mesh with expert parallelism, outermost first.

The pipeline is outermost, so that ranks that exchange tokens are neighbors.
"""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The model, the number of GPUs and the batch for which a search ranks meshes.

    The search tries all values of a setting that is empty, 0 or None.
    """

    step: StepSpec
    """The model and its precision. The search sets the mesh and the batch."""
    gpus: int
    """The number of GPUs, all of which a mesh uses."""
    global_batch: int
    """The sequences per step on all GPUs."""
    microbatch: int = 0
    """The sequences of a microbatch on a data rank."""
    checkpointing: str = ""
    """The activation checkpointing: none, selective, full, or full:K for one layer in K."""
    schedule: str = ""
    """The name of the pipeline schedule."""
    cp_method: str = ""
    """The name of the method of context parallelism."""
    zero: int | None = None
    """The stage of ZeRO, 0 to 3."""
    context_tokens: int = CONTEXT_TOKENS
    """Context parallelism must leave each rank more tokens of a sequence than this number."""

    @property
    def checkpointings(self) -> tuple[str, ...]:
        """The activation checkpointings to try, the one with least recomputation first."""
        return (self.checkpointing,) if self.checkpointing else CHECKPOINTINGS

    @property
    def cp_methods(self) -> tuple[str, ...]:
        """The methods of context parallelism to try: the requested one, or all."""
        return (self.cp_method,) if self.cp_method else CP_METHODS


def place_step(step: StepSpec, dims: ParallelDims) -> StepSpec:
    """Return a copy of a step on the mesh ``dims``.

    The copy reduces gradients over data ranks once per step. With FSDP it reduces them in every
    microbatch, because full gradients would not fit in memory.
    """
    return replace(step.with_dims(dims), no_sync=not dims.is_sharded)


def list_layouts(request: SearchRequest, gpus_per_node: int) -> Iterator[StepSpec]:
    """Yield the request's step on each practical mesh, with each stage of ZeRO on that mesh.

    On a practical mesh, tp stays within a node and divides the heads, and cp leaves each rank
    enough tokens. The yielded steps (layouts) differ in mesh, method of context parallelism and
    stage of ZeRO. Their batch, pipeline schedule and checkpointing are set later.
    """
    for dims, method in _list_model_dims(request, gpus_per_node):
        step = replace(request.step, cp_method=method)
        meshes = _list_data_dims(dims, gpus_per_node)
        for sharded_dims in _list_expert_dims(step, meshes, gpus_per_node):
            yield from _list_zero_stages(request, place_step(step, sharded_dims))


def _list_model_dims(
    request: SearchRequest, gpus_per_node: int
) -> Iterator[tuple[ParallelDims, str]]:
    """Yield each mesh of tp, cp and pp that a search tries, with the name of a method for cp.

    The size of tp divides a node and the heads. See ``_list_context_sizes`` for cp and
    ``list_pipeline_sizes`` for pp. All other ranks of the mesh are in ``dp``. The method has no
    effect if cp is 1.
    """
    shape = request.step.shape
    for tp in list_divisors(request.gpus):
        if gpus_per_node % tp or find_indivisible_heads(
            shape, tp, has_ffn=request.step.moe is None
        ):
            continue
        for cp in _list_context_sizes(request, request.gpus // tp):
            methods = request.cp_methods if cp > 1 else request.cp_methods[:1]
            for method in methods:
                if find_indivisible_sequence(shape, ParallelDims(cp=cp, tp=tp), method):
                    continue
                ranks = request.gpus // (tp * cp)
                for pp in list_pipeline_sizes(shape.layers, ranks):
                    yield ParallelDims(dp=ranks // pp, pp=pp, cp=cp, tp=tp, order=ORDER), method


def _list_context_sizes(request: SearchRequest, ranks: int) -> list[int]:
    """Return the sizes of ``cp`` to try, ascending: powers of two from 1 that divide ``ranks``.

    A size above 1 leaves each rank more than ``request.context_tokens`` tokens of a sequence.
    """
    sizes = [1]
    while ranks % (2 * sizes[-1]) == 0:
        size = 2 * sizes[-1]
        if request.step.shape.sequence // size <= request.context_tokens:
            break
        sizes.append(size)
    return sizes


def list_pipeline_sizes(layers: int, ranks: int) -> list[int]:
    """Return the sizes of ``pp`` to try for a model with ``layers`` layers, ascending.

    They are the divisors of ``ranks``, up to the number of layers, that are powers of two or
    divide the number of layers.
    """
    sizes = [pp for pp in list_divisors(ranks) if pp <= layers]
    return [pp for pp in sizes if pp & (pp - 1) == 0 or layers % pp == 0]


def _list_data_dims(dims: ParallelDims, gpus_per_node: int) -> Iterator[ParallelDims]:
    """Yield the mesh ``dims`` with its data ranks as replicas, as FSDP shards, and as both (HSDP).

    ``dims`` has all data ranks in ``dp``. HSDP is tried only without a pipeline. A replica of the
    model then spans 1, 8 or 64 nodes.
    """
    yield dims
    data_ranks = dims.dp
    if data_ranks == 1:
        return
    yield dims.resize(dp=1, fsdp=data_ranks)
    if dims.pp > 1:
        return
    for nodes in (1, 8, 64):
        shards = nodes * gpus_per_node // (dims.cp * dims.tp)
        if 1 < shards < data_ranks and data_ranks % shards == 0:
            yield dims.resize(dp=data_ranks // shards, fsdp=shards)


def _list_expert_dims(
    step: StepSpec, meshes: Iterator[ParallelDims], gpus_per_node: int
) -> Iterator[ParallelDims]:
    """Yield each of ``meshes``, for a MoE model once for each practical size of ``ep``.

    The sizes are 1 rank, the GPUs of a node, and the GPUs of 2, 4 or 8 nodes, at most one rank per
    expert. A mesh that does not allow one of these sizes is not yielded with it.
    """
    if step.moe is None:
        yield from meshes
        return
    experts = step.moe.experts
    sizes = [1, min(experts, gpus_per_node)]
    sizes += [nodes * gpus_per_node for nodes in (2, 4, 8) if nodes * gpus_per_node <= experts]
    for dims in meshes:
        for ep in sizes:
            sized = dims.resize(ep=ep, order=EXPERT_ORDER if ep > 1 else ORDER)
            if not sized.find_broken_rule(sized.ranks, experts):
                yield sized


def _list_zero_stages(request: SearchRequest, step: StepSpec) -> Iterator[StepSpec]:
    """Yield the step, which is on a mesh, with each stage of ZeRO that the request allows.

    FSDP meshes have stage 3 and, without a pipeline, stage 2. Other meshes have stages 0 and 1.
    Replicas of a pipeline have stage 0 only on request, because stage 1 (ZeRO-1) sends no more
    bytes than the all_reduces of stage 0, and needs less memory.
    """
    dims = step.dims
    steps: list[StepSpec] = []
    if dims.is_sharded:
        steps.append(step)
        if dims.pp == 1:
            steps.append(replace(step, reshard=False))
    else:
        if dims.pp == 1 or dims.dp == 1 or request.zero == 0:
            steps.append(step)
        if dims.size("dp", "cp") > 1:
            steps.append(replace(step, zero1="distributed"))
    for sharded in steps:
        if request.zero in (None, sharded.zero_stage):
            yield sharded


def list_batches(request: SearchRequest, layout: StepSpec) -> Iterator[StepSpec]:
    """Yield a layout, a step on a mesh, with each possible microbatch size, smallest first.

    The sizes are 1, 2, 4, 8 and 16 sequences, or the requested size. A size must divide the
    sequences of a data rank into at least as many microbatches as the pipeline has ranks. Unless
    requested, a size with too few or too many tokens per rank is left out (``MIN_TOKENS``,
    ``MAX_TOKENS``).
    """
    dims = layout.dims
    tokens = layout.shape.sequence // dims.cp
    sizes = (request.microbatch,) if request.microbatch else (1, 2, 4, 8, 16)
    for microbatch in sizes:
        microbatches, remainder = divmod(request.global_batch, dims.dp * dims.fsdp * microbatch)
        if remainder or microbatches < dims.pp:
            continue
        is_small = tokens * microbatch < MIN_TOKENS and layout.shape.sequence > MIN_TOKENS
        is_large = tokens * microbatch > MAX_TOKENS and microbatch > 1
        if request.microbatch or not (is_small or is_large):
            yield replace(layout, microbatch=microbatch, microbatches=microbatches)


def list_pipelines(request: SearchRequest, step: StepSpec) -> Iterator[StepSpec]:
    """Yield a step with each pipeline schedule that the request allows, simplest first.

    The layers of the stages are balanced. Schedules with more stages than layers are left out. A
    step without a pipeline is yielded unchanged.
    """
    dims = step.dims
    if dims.pp == 1:
        yield step
        return
    for name, stages_per_rank in list_schedules(request):
        if dims.pp * stages_per_rank > step.shape.layers:
            continue
        sized = step.with_pipeline(schedule=name, stages_per_rank=stages_per_rank)
        layers = balance_layers(step.shape, step.moe, dims.pp, stages_per_rank, name)
        yield sized.with_pipeline(layers_per_stage=layers)


def list_schedules(request: SearchRequest) -> list[tuple[str, int]]:
    """Return the pipeline schedules to try as pairs of name and stages per rank.

    1F1B is first. All others follow in order of their stages per rank.
    """
    requested = request.step.pipeline_options.stages_per_rank
    pairs: list[tuple[str, int]] = []
    for schedule in SCHEDULES.values():
        if request.schedule not in ("", schedule.name):
            continue
        counts = [schedule.stages_per_rank]
        if schedule.min_stages_per_rank is not None:
            counts = [2, MAX_STAGES_PER_RANK]
        pairs += [(schedule.name, count) for count in ([requested] if requested else counts)]
    return sorted(pairs, key=lambda pair: (pair[0] != SIMPLEST_SCHEDULE, pair[1]))


@lru_cache(maxsize=4096)
def estimate_bubble(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> float:
    """Return the idle time of a pipeline rank in a step, in multiples of a microbatch's time.

    A microbatch's time is that of its forward and backward pass on the rank. Forward, input
    gradient and weight gradient are assumed to take equal time. ``ranks`` and ``microbatches`` are
    those of the pipeline. The step is simulated if the schedule has no formula for these sizes.
    The result is infinite if the schedule cannot run with them.
    """
    pipeline_schedule = find_schedule(schedule)
    try:
        size = pipeline_schedule.size(ranks, microbatches, stages_per_rank)
    except UserError:
        return math.inf
    third = 1 / 3
    passes = PassSeconds(third, third, third)
    bubble = pipeline_schedule.compute_bubble(size, passes)
    if bubble is not None:
        return bubble.seconds
    seconds = {"F": passes.forward, "I": third, "W": third, "B": passes.backward}
    timeline = simulate(
        pipeline_schedule.make_order(size),
        lambda action: seconds[action.kind] / size.stages_per_rank,
    )
    return timeline.idle / ranks


@lru_cache(maxsize=4096)
def balance_layers(
    shape: Shape, moe: Moe | None, pp: int, stages_per_rank: int, schedule: str
) -> str:
    """Return the number of layers of each pipeline stage as text, such as ``7+8+8+7``.

    The numbers minimize the FLOPs of the rank with most FLOPs, where the FLOPs of the language
    model's head count too. The text is empty if stages of equal size are as good, or if the model
    has fewer layers than stages. ``pp`` is the number of pipeline ranks.
    """
    num_stages = pp * stages_per_rank
    if pp == 1 or shape.layers < num_stages:
        return ""
    options = PipelineOptions(schedule=schedule, stages_per_rank=stages_per_rank)
    size = options.get_size(pp, num_stages)
    stages_by_rank = [find_schedule(schedule).list_stages(rank, size) for rank in range(pp)]
    last_stage = num_stages - 1
    head = _count_head_layers(shape, moe)
    counts = [1] * num_stages
    loads = [stages_per_rank + (head if last_stage in stages else 0.0) for stages in stages_by_rank]

    def order_rank(rank: int) -> tuple[float, bool, int]:
        """Return the sort key of a pipeline rank. The rank with the smallest key gets a layer.

        The key is (its layers so far, where the head counts as a number of layers; True for the
        first and the last rank; its index).
        """
        # The first and the last rank also hold the embedding and the logits.
        return loads[rank], rank in (0, pp - 1), rank

    def order_stage(stage: int) -> tuple[int, bool, int]:
        """Return the sort key of a stage of the rank. The stage with the smallest key gets a layer.

        The key is (layers so far, True for the first and the last stage, stage).
        """
        return counts[stage], stage in (0, last_stage), stage

    for _ in range(shape.layers - num_stages):
        rank = min(range(pp), key=order_rank)
        counts[min(stages_by_rank[rank], key=order_stage)] += 1
        loads[rank] += 1
    if shape.layers % num_stages == 0 and max(loads) >= shape.layers / pp + head:
        return ""
    return "+".join(map(str, counts))


@lru_cache
def _count_head_layers(shape: Shape, moe: Moe | None) -> float:
    """Return the FLOPs of the language model's head, relative to the FLOPs of one layer."""
    uniform = moe and replace(moe, dense_layers=0)
    step = StepSpec(
        shape=replace(shape, layers=2), moe=uniform, dims=ParallelDims(pp=2), microbatches=2
    )
    layer, layer_and_head = (count_rank_flops(step.make_stage_view(rank)) for rank in (0, 1))
    return layer_and_head / layer - 1


@lru_cache
def list_divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order, from 1 to ``number``."""
    return [size for size in range(1, number + 1) if number % size == 0]
