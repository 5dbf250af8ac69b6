"""What a search chooses from: every mesh that could carry a step, and how it could be taken on it. Pure.

In three layers, each deciding what the one before leaves open: blocks are steps of one stage, of which tp, cp and its
method, microbatch and checkpointing make the time of a layer; stages add the pipeline and how experts are dealt out;
shards say how the data axes replicate and shard state.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain, product

from parbench.workloads.costs.divisibility import (
    find_indivisible_heads,
    find_indivisible_sequence,
)
from parbench.workloads.costs.flops import stage_flops
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES as ALL_SCHEDULES
from parbench.workloads.pipeline_parallel.schedules import find_schedule

MICROBATCHES = (1, 2, 4, 8)
CHECKPOINTINGS = ("none", "selective", "full:4", "full:2", "full")
SCHEDULES = tuple(
    (schedule.name, stages_per_rank)
    for schedule in ALL_SCHEDULES.values()
    for stages_per_rank in schedule.planned_stages_per_rank
)
CP_METHODS = ("zigzag", "allgather_kv", "ulysses")
_ORDER = ("dp", "pp", "fsdp", "cp", "tp")
_EXPERT_ORDER = ("pp", "dp", "fsdp", "cp", "tp")
"""The pipeline is outermost, so that ranks that exchange tokens are neighbors."""


def place_step(step: StepSpec, dims: ParallelDims) -> StepSpec:
    """Return a step on a mesh as clusters run it.

    FSDP reduces gradients in every microbatch, because whole gradients would not fit.
    """
    return replace(step.with_dims(dims), no_sync=not dims.is_sharded)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is searched for: a step but for its mesh and batch, on how many GPUs, and the sequences of all together.

    What is not said is tried in all ways: ``microbatch`` 0, the words empty, ``zero`` None.
    """

    step: StepSpec
    gpus: int
    global_batch: int
    microbatch: int = 0
    checkpointing: str = ""
    schedule: str = ""
    cp_method: str = ""
    zero: int | None = None

    @property
    def microbatches(self) -> tuple[int, ...]:
        return (self.microbatch,) if self.microbatch else MICROBATCHES

    @property
    def checkpointings(self) -> tuple[str, ...]:
        return (self.checkpointing,) if self.checkpointing else CHECKPOINTINGS

    @property
    def schedules(self) -> tuple[tuple[str, int], ...]:
        chunks = self.step.pipeline_options.stages_per_rank
        known = tuple(each for each in SCHEDULES if each[0] == self.schedule and not chunks)
        return known or ((self.schedule, chunks),) if self.schedule else SCHEDULES


def candidates(wanted: Wanted) -> Iterator[StepSpec]:
    """Yield every step that makes the global batch; rules are yet to be asked.

    What the model's own sizes forbid whatever else is chosen is left out at once: heads over tp, tokens over cp.
    """
    for block in blocks(wanted):
        for pipeline in pipelines(wanted, block):
            for stage in dealt_out(pipeline):
                yield from chain(*shards(wanted, stage))


def blocks(wanted: Wanted) -> Iterator[StepSpec]:
    for tp, cp, method in tokens_and_heads(wanted):
        dims = ParallelDims(fsdp=wanted.gpus // tp // cp, cp=cp, tp=tp, order=_ORDER)
        for how in wanted.checkpointings:
            step = replace(place_step(wanted.step, dims), cp_method=method)
            step = step.with_checkpointing(how)
            for microbatch in wanted.microbatches:
                if wanted.global_batch >= microbatch:
                    yield replace(step, microbatch=microbatch)


def tokens_and_heads(wanted: Wanted) -> Iterator[tuple[int, int, str]]:
    """Yield the sizes of tp and cp that heads and tokens allow, with cp's methods."""
    shape, moe = wanted.step.shape, wanted.step.moe
    methods = (wanted.cp_method,) if wanted.cp_method else CP_METHODS
    for tp in divisors(wanted.gpus):
        if find_indivisible_heads(shape, tp, has_experts=moe is not None):
            continue
        for cp in divisors(wanted.gpus // tp):
            for method in methods if cp > 1 else methods[:1]:
                if not find_indivisible_sequence(shape, ParallelDims(cp=cp, tp=tp), method):
                    yield tp, cp, method


def pipelines(wanted: Wanted, block: StepSpec) -> Iterator[StepSpec]:
    """Yield the steps of a block with every pipeline, all data ranks in ``fsdp``; experts are not dealt out yet."""
    cp, tp = block.dims.size("cp"), block.dims.size("tp")
    ranks, layers = wanted.gpus // cp // tp, block.shape.layers
    cannot_split = block.checkpointing != "none" or block.moe is not None
    for pp in divisors(ranks):
        if pp > layers:
            break
        data = ranks // pp
        count, rest = divmod(wanted.global_batch, data * block.microbatch)
        if rest or not count:
            continue
        dims = ParallelDims(pp=pp, fsdp=data, cp=cp, tp=tp, order=_ORDER)
        step = replace(place_step(block, dims), microbatches=count)
        for schedule, chunks in wanted.schedules if pp > 1 else wanted.schedules[:1]:
            if pp == 1:
                yield step.with_pipeline(schedule=schedule, stages_per_rank=0)
            elif wanted.schedule or (
                pp * chunks <= layers
                and not (cannot_split and find_schedule(schedule).splits_backward)
            ):
                # A rule that the user's schedule breaks is reported later.
                yield step.with_pipeline(schedule=schedule, stages_per_rank=chunks)


def dealt_out(pipeline: StepSpec) -> Iterator[StepSpec]:
    """Yield a pipeline's steps with its experts over every ``ep`` and ``etp``, its layers dealt out to stages."""
    shape, moe, dims, pp = pipeline.shape, pipeline.moe, pipeline.dims, pipeline.dims.pp
    meshes = [dims]
    if moe is not None:
        sizes = product(divisors(moe.experts), sorted({1, dims.tp}))
        every = [
            dims.resize(ep=ep, etp=etp, order=_EXPERT_ORDER if ep > 1 else _ORDER)
            for ep, etp in sizes
        ]
        meshes = [mesh for mesh in every if not mesh.find_broken_rule(dims.ranks, moe.experts)]
    schedule = pipeline.pipeline_options.schedule
    layer_splits = splits(shape, moe, pp, pipeline.pipeline_size.stages_per_rank, schedule)
    for mesh, split in product(meshes, layer_splits):
        yield place_step(pipeline, mesh).with_pipeline(split=split)


def shards(wanted: Wanted, stage: StepSpec) -> tuple[Iterator[StepSpec], Iterator[StepSpec]]:
    """Return the ways in which data ranks shard gradients, and those in which they do not; what holds least first."""
    return _sharded(wanted.zero, stage), _replicated(wanted.zero, stage)


def _sharded(zero: int | None, stage: StepSpec) -> Iterator[StepSpec]:
    data = stage.dims.fsdp
    for fsdp in reversed(divisors(data)):
        dims = stage.dims.resize(dp=data // fsdp, fsdp=fsdp)
        if dims.find_broken_rule(dims.ranks, stage.moe.experts if stage.moe else 0):
            continue  # Experts would span replicas.
        each = place_step(stage, dims)
        if fsdp > 1 and zero in (None, 3):
            yield each
        if (
            fsdp > 1 and zero in (None, 2) and stage.dims.size("pp") == 1
        ):  # which keeps parameters as it is
            yield replace(each, reshard=False)


def _replicated(zero: int | None, stage: StepSpec) -> Iterator[StepSpec]:
    each = place_step(stage, stage.dims.resize(dp=stage.dims.fsdp, fsdp=1))
    if zero in (None, 1) and each.dims.size("dp", "cp") > 1:
        yield replace(each, zero1="distributed")
    if zero in (None, 0):
        yield each


@lru_cache
def splits(shape: Shape, moe: Moe | None, pp: int, chunks: int, schedule: str) -> tuple[str, ...]:
    """Return how layers are dealt out to stages: as many each where they divide, and where the head weighs on the last
    rank so that the slowest is least slow."""
    num_stages = pp * chunks
    even = [""] * (shape.layers % num_stages == 0)
    if pp == 1 or shape.layers < num_stages:
        return ("",)  # the latter is refused
    options = PipelineOptions(schedule=schedule, stages_per_rank=chunks)
    size = options.get_size(pp, num_stages)
    stages_of = find_schedule(schedule).stages_of
    rank_of = {stage: rank for rank in range(pp) for stage in stages_of(rank, size)}
    last, head = rank_of[num_stages - 1], _head_layers(shape, moe)
    counts = [1] * num_stages
    loads = [(chunks + head * (rank == last), rank in (0, last), rank) for rank in range(pp)]
    heapify(loads)
    for _ in range(
        shape.layers - num_stages
    ):  # of the least loaded, the ends last, for they hold most beside
        load, end, rank = loads[0]
        mine = [stage for stage in rank_of if rank_of[stage] == rank]
        counts[
            min(mine, key=lambda stage: (counts[stage], stage in (0, num_stages - 1), stage))
        ] += 1
        heapreplace(loads, (load + 1, end, rank))
    if even and max(loads)[0] >= shape.layers / pp + head:
        return ("",)
    return (*even, "+".join(map(str, counts)))


@lru_cache
def _head_layers(shape: Shape, moe: Moe | None) -> float:
    """Return how many layers' arithmetic the head is."""
    alike = moe and replace(moe, dense_layers=0)
    dims = ParallelDims(pp=2)
    two = StepSpec(shape=replace(shape, layers=2), moe=alike, dims=dims, microbatches=2)
    layer, with_head = (stage_flops(two.stage_view(rank)).total for rank in (0, 1))
    return with_head / layer - 1


@lru_cache
def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def limits(wanted: Wanted) -> dict[str, str]:
    """Return the rules that bound an axis whatever else is chosen: by axis, the first size that one refuses."""
    shape, batch, method = wanted.step.shape, wanted.global_batch, wanted.cp_method or CP_METHODS[0]
    experts, sizes = wanted.step.moe is not None, divisors(wanted.gpus)
    reasons: dict[str, Iterator[str | None]] = {
        "tp": (find_indivisible_heads(shape, size, has_experts=experts) for size in sizes),
        "cp": (find_indivisible_sequence(shape, ParallelDims(cp=size), method) for size in sizes),
        "pp": (f"layers({shape.layers}) < pp({size})" for size in sizes if size > shape.layers),
        "dp": (
            f"global batch({batch}) % (dp * fsdp)({size}) != 0" for size in sizes if batch % size
        ),
    }
    return {
        axis: reason for axis, of in reasons.items() if (reason := next(filter(None, of), None))
    }
