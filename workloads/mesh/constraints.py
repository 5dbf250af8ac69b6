"""When a mesh can carry a step: each rule an equation, each refusal the equation with its numbers. Pure.

The rules come in the order in which one fixes them: the mesh itself, layers over ``tp``, the sequence over ``cp`` and
``tp``, layers and microbatches over ``pp``, experts over ``ep``, the global batch; last, what does not go together.
"""

import math
from collections.abc import Mapping

from bench.text import UserError, did_you_mean, listed
from workloads.context_parallel.exchange_plan import indivisible
from workloads.model.shapes import Shape
from workloads.pipeline_parallel.pipeline_case import layers_of_stages
from workloads.pipeline_parallel.schedules import require_schedule, splits_backward

AXES = ("dp", "fsdp", "pp", "cp", "tp", "ep", "etp")
INSIDE = ("ep", "etp")
"""Axes that lie inside others, and are not multiplied."""
CP_METHODS = {
    "ring": "contiguous",
    "striped": "striped",
    "zigzag": "zigzag",
    "allgather_kv": "zigzag",
    "ulysses": "contiguous",
}
"""How queries meet keys of other ranks, and the order in which each deals out tokens."""
_MOST_GATHERED_STAGES = 3

Mesh = Mapping[str, int]


def refuse(
    shape: Shape,
    mesh: Mesh,
    *,
    microbatches: int,
    microbatch: int,
    world: int,
    num_experts: int | None = None,
    schedule: str = "1f1b",
    cp_method: str = "ring",
    chunks: int = 0,
    split: str = "",
    global_batch: int | None = None,
    split_experts: bool = False,
    checkpointing: str = "none",
) -> str | None:
    """Return the first equation that a step on a mesh breaks, with its numbers; None where it can run.

    ``chunks`` 0 is the schedule's own, ``split`` the layers of each stage such as ``1+2+1``, empty for as many each;
    ``num_experts`` None is a model without mixtures of experts. ``split_experts`` is whether ``etp`` may be above 1.
    """
    return (
        refuse_axes(mesh, world, split_experts=split_experts)
        or refuse_heads(shape, mesh, experts=num_experts is not None)
        or refuse_sequence(shape, mesh, cp_method=cp_method)
        or refuse_stages(shape, mesh, microbatches=microbatches, schedule=schedule, chunks=chunks, split=split)
        or refuse_experts(mesh, num_experts)
        or refuse_batch(mesh, microbatch=microbatch, microbatches=microbatches, global_batch=global_batch)
        or refuse_split_backward(mesh, schedule=schedule, checkpointing=checkpointing, num_experts=num_experts)
    )


def refuse_axes(mesh: Mesh, world: int, *, split_experts: bool = False) -> str | None:
    """Refuse axes of unknown names or of no ranks, and a product that is not the world."""
    for name, size in mesh.items():
        if name not in AXES:
            return f"mesh axis {name!r} is not {listed(AXES)}{did_you_mean(name, AXES)}"
        if size < 1:
            return f"{name}({size}) < 1"
    if mesh.get("etp", 1) != 1 and not split_experts:
        return f"etp({mesh['etp']}) != 1: experts are whole here on every rank that holds them"
    axes = {name: size for name, size in mesh.items() if name not in INSIDE} or {"dp": 1}
    if math.prod(axes.values()) != world:
        return f"{_product(axes)} != world size({world})"
    return None


def refuse_heads(shape: Shape, mesh: Mesh, *, experts: bool = False) -> str | None:
    """Refuse layers that ``tp`` does not divide; a mixture's FFNs are not split."""
    tp = mesh.get("tp", 1)
    for name in ("heads", "kv_heads", "hidden", *(() if experts else ("ffn",))):
        if getattr(shape, name) % tp:
            return f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    return None


def refuse_sequence(shape: Shape, mesh: Mesh, *, cp_method: str = "ring") -> str | None:
    """Refuse tokens that do not divide: over ``cp`` as its method deals them out, and what it leaves over ``tp``."""
    cp, tp = mesh.get("cp", 1), mesh.get("tp", 1)
    if cp_method not in CP_METHODS:
        return f"cp method {cp_method!r} is not {listed(CP_METHODS)}{did_you_mean(cp_method, CP_METHODS)}"
    reason = indivisible(CP_METHODS[cp_method], shape.sequence, cp) if cp > 1 else None
    if reason is not None:
        return reason
    if cp_method == "ulysses":
        for name in ("heads", "kv_heads"):
            heads = getattr(shape, name)
            if cp > 1 and heads // tp % cp:
                return f"{name}({heads}) / tp({tp}) % cp({cp}) != 0: ulysses deals out heads"
    if shape.sequence // cp % tp:
        over = f"(cp({cp}) * tp({tp}))" if cp > 1 else f"tp({tp})"
        return f"sequence({shape.sequence}) % {over} != 0"
    return None


def refuse_stages(
    shape: Shape, mesh: Mesh, *, microbatches: int, schedule: str = "1f1b", chunks: int = 0, split: str = ""
) -> str | None:
    """Refuse a pipeline whose schedule does not exist for so many microbatches, or whose layers do not divide."""
    pp = mesh.get("pp", 1)
    if microbatches < 1:
        return f"microbatches({microbatches}) < 1"
    if pp == 1:
        return None
    try:
        of_rank = require_schedule(schedule, ranks=pp, microbatches=microbatches, chunks=chunks)
        if shape.layers < pp * of_rank:
            return f"layers({shape.layers}) < pp({pp}) * chunks({of_rank})"
        layers_of_stages(shape.layers, pp * of_rank, split)
    except UserError as error:
        return str(error)
    if mesh.get("fsdp", 1) > 1 and of_rank > _MOST_GATHERED_STAGES:
        return (
            f"chunks({of_rank}) > {_MOST_GATHERED_STAGES} with fsdp({mesh['fsdp']}): "
            "torch's runtime keeps so many stages gathered and would gather the others again"
        )
    return None


def refuse_experts(mesh: Mesh, num_experts: int | None) -> str | None:
    """Refuse experts that do not divide over ``ep``, which divides the data axes' ranks, or ``etp``, which ``tp``'s."""
    ep, etp, tp = mesh.get("ep", 1), mesh.get("etp", 1), mesh.get("tp", 1)
    if num_experts is None:
        if etp > 1:
            return f"etp({etp}) > 1 without experts: a dense model has none to split"
        return None if ep == 1 else f"ep({ep}) > 1 without experts: a dense model has none to deal out"
    if tp % etp:
        return f"tp({tp}) % etp({etp}) != 0"
    if num_experts % ep:
        return f"experts({num_experts}) % ep({ep}) != 0"
    data = [mesh.get(axis, 1) for axis in ("dp", "fsdp", "cp")]
    if math.prod(data) % ep:
        return f"(dp({data[0]}) * fsdp({data[1]}) * cp({data[2]})) % ep({ep}) != 0"
    return None


def refuse_batch(mesh: Mesh, *, microbatch: int, microbatches: int, global_batch: int | None = None) -> str | None:
    """Refuse a microbatch of nothing, and a global batch that is not what all data ranks take together."""
    if microbatch < 1:
        return f"microbatch({microbatch}) < 1"
    found = sequences_of(mesh, microbatch=microbatch, microbatches=microbatches)
    if global_batch is None or found == global_batch:
        return None
    replicas = {axis: mesh[axis] for axis in ("dp", "fsdp") if axis in mesh} or {"dp": 1}
    return (
        f"{_product(replicas)} * microbatch({microbatch}) * microbatches({microbatches}) = {found} "
        f"!= global batch({global_batch})"
    )


def refuse_split_backward(
    mesh: Mesh, *, schedule: str, checkpointing: str = "none", num_experts: int | None = None
) -> str | None:
    """Refuse what needs a backward pass whole where the pipeline's schedule splits it in two."""
    if mesh.get("pp", 1) == 1 or not splits_backward(schedule):
        return None
    if checkpointing != "none":
        return (
            f"checkpointing = {checkpointing} is not allowed with schedule = {schedule}, which splits the backward "
            "pass: layers would be computed again for the input gradient and once more for the weight gradient"
        )
    if mesh.get("fsdp", 1) > 1:
        return (
            f"schedule = {schedule} is not allowed with fsdp({mesh['fsdp']}): torch's FSDP reduces gradients "
            "after a whole backward pass, and this schedule splits it"
        )
    if num_experts:
        return (
            f"schedule = {schedule} is not allowed with experts({num_experts}): tokens come back from "
            "their experts once in a backward pass, and this schedule splits it"
        )
    return None


def sequences_of(mesh: Mesh, *, microbatch: int, microbatches: int) -> int:
    """Return the sequences of a step: dp * fsdp * microbatch * microbatches."""
    return mesh.get("dp", 1) * mesh.get("fsdp", 1) * microbatch * microbatches


def _product(axes: Mesh) -> str:
    return " * ".join(f"{name}({size})" for name, size in axes.items())
