"""What a search chooses from: every mesh that could carry a step, and how it could be taken on it. Pure.

In three layers, each deciding what the one before leaves open: blocks are steps of one stage, of which tp, cp and its
method, microbatch and checkpointing make the time of a layer; stages add the pipeline and how experts are dealt out;
shards say how the data axes replicate and shard state.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain, product

from parbench.workloads.costs.flops import stage_flops
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.mesh.axes import refuse_experts, refuse_heads, refuse_sequence
from parbench.workloads.model.shapes import Shape
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
        chunks = self.step.chunks
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
        mesh = {"dp": 1, "pp": 1, "fsdp": wanted.gpus // tp // cp, "cp": cp, "tp": tp}
        for how in wanted.checkpointings:
            step = wanted.step.on(mesh, cp_method=method).checkpointed(how)
            for microbatch in wanted.microbatches:
                if wanted.global_batch >= microbatch:
                    yield replace(step, microbatch=microbatch)


def tokens_and_heads(wanted: Wanted) -> Iterator[tuple[int, int, str]]:
    """Yield the sizes of tp and cp that heads and tokens allow, with cp's methods."""
    shape, moe = wanted.step.shape, wanted.step.moe
    methods = (wanted.cp_method,) if wanted.cp_method else CP_METHODS
    for tp in divisors(wanted.gpus):
        if refuse_heads(shape, {"tp": tp}, experts=moe is not None):
            continue
        for cp in divisors(wanted.gpus // tp):
            for method in methods if cp > 1 else methods[:1]:
                if not refuse_sequence(shape, {"cp": cp, "tp": tp}, cp_method=method):
                    yield tp, cp, method


def pipelines(wanted: Wanted, block: StepSpec) -> Iterator[StepSpec]:
    """Yield the steps of a block with every pipeline, all data ranks in ``fsdp``; experts are not dealt out yet."""
    cp, tp = block.size("cp"), block.size("tp")
    ranks, layers = wanted.gpus // cp // tp, block.shape.layers
    cannot_split = block.checkpointing != "none" or block.moe is not None
    for pp in divisors(ranks):
        if pp > layers:
            break
        data = ranks // pp
        count, rest = divmod(wanted.global_batch, data * block.microbatch)
        if rest or not count:
            continue
        mesh = {"dp": 1, "pp": pp, "fsdp": data, "cp": cp, "tp": tp}
        step = block.on(mesh, microbatches=count)
        for schedule, chunks in wanted.schedules if pp > 1 else wanted.schedules[:1]:
            if pp == 1:
                yield replace(step, schedule=schedule, chunks=0)
            elif wanted.schedule or (
                pp * chunks <= layers
                and not (cannot_split and find_schedule(schedule).splits_backward)
            ):
                yield replace(
                    step, schedule=schedule, chunks=chunks
                )  # what is refused only if it was asked for


def dealt_out(pipeline: StepSpec) -> Iterator[StepSpec]:
    """Yield a pipeline's steps with its experts over every ``ep`` and ``etp``, its layers dealt out to stages."""
    shape, moe, mesh, pp = pipeline.shape, pipeline.moe, pipeline.mesh, pipeline.size("pp")
    meshes: list[Mapping[str, int]] = [mesh]
    if moe is not None:
        # the pipeline outermost, so that ranks that deal out experts are neighbours
        outer = {"pp": pp, **mesh}
        sizes = product(divisors(moe.experts), sorted({1, pipeline.size("tp")}))
        every = [{**(outer if ep > 1 else mesh), "ep": ep, "etp": etp} for ep, etp in sizes]
        meshes = [each for each in every if not refuse_experts(each, moe.experts)]
    chunks = pipeline.chunks or find_schedule(pipeline.schedule).stages_per_rank
    for mesh, split in product(meshes, splits(shape, moe, pp, chunks, pipeline.schedule)):
        yield pipeline.on(mesh, split=split)


def shards(wanted: Wanted, stage: StepSpec) -> tuple[Iterator[StepSpec], Iterator[StepSpec]]:
    """Return the ways in which data ranks shard gradients, and those in which they do not; what holds least first."""
    return _sharded(wanted.zero, stage), _replicated(wanted.zero, stage)


def _sharded(zero: int | None, stage: StepSpec) -> Iterator[StepSpec]:
    data, mesh = stage.size("fsdp"), stage.mesh
    for fsdp in reversed(divisors(data)):
        each = replace(stage, mesh={**mesh, "dp": data // fsdp, "fsdp": fsdp})
        if fsdp > 1 and zero in (None, 3):
            yield each
        if (
            fsdp > 1 and zero in (None, 2) and stage.size("pp") == 1
        ):  # which keeps parameters as it is
            yield replace(each, reshard=False)


def _replicated(zero: int | None, stage: StepSpec) -> Iterator[StepSpec]:
    each = replace(stage, mesh={**stage.mesh, "dp": stage.size("fsdp"), "fsdp": 1})
    if zero in (None, 1) and each.size("dp", "cp") > 1:
        yield replace(each, zero1="reduce_scatter")
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
    step = StepSpec(shape=shape, moe=moe, mesh={"pp": pp}, schedule=schedule, chunks=chunks)
    rank_of = {stage: rank for rank in range(pp) for stage in step.at_stage(rank).stages}
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
    two = StepSpec(shape=replace(shape, layers=2), moe=alike, mesh={"pp": 2})
    layer, with_head = (stage_flops(two.at_stage(rank)).total for rank in (0, 1))
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
        "tp": (refuse_heads(shape, {"tp": size}, experts=experts) for size in sizes),
        "cp": (refuse_sequence(shape, {"cp": size}, cp_method=method) for size in sizes),
        "pp": (f"layers({shape.layers}) < pp({size})" for size in sizes if size > shape.layers),
        "dp": (
            f"global batch({batch}) % (dp * fsdp)({size}) != 0" for size in sizes if batch % size
        ),
    }
    return {
        axis: reason for axis, of in reasons.items() if (reason := next(filter(None, of), None))
    }
