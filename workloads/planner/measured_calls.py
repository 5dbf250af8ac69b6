"""What a measured step of this suite should send and hold, by its own name and parameters: closed forms, no counting.

The planner's dry runs describe steps as large clusters take them; here are the steps as ``workloads`` has them, call by
call, so that a run can say how far the predictions are right. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from workloads.costs.communication_pattern import StateBytes, padded_numel, state_bytes
from workloads.costs.mesh_costs import state_elements
from workloads.costs.parameter_table import ParameterPart, parts_of_rank
from workloads.mesh.axes import coordinate_of, mesh_of
from workloads.model.shapes import BUCKET, num_parameters
from workloads.pipeline_parallel.pipeline_case import pipeline_of
from workloads.pipeline_parallel.pp_bytes import bytes_by_rank
from workloads.planner.ask import Ask, as_measured
from workloads.planner.calls import calls_of
from workloads.planner.link_time import Call
from workloads.planner.measured_exchanges import attention_calls, expert_step
from workloads.planner.measured_step import Expected, Step, call_of
from workloads.planner.models import Model
from workloads.planner.stage_parts import parts_of

__all__ = ["KINDS", "Expected", "Step", "expected"]

_MEBI = 2**20


def expected(step: Step) -> Expected | str:
    """Return what a step should send and hold, or why that follows from no closed form."""
    make = _KINDS.get(step.name)
    return f"{step.name}: {_UNPREDICTED.get(step.name, 'no step of this suite')}" if make is None else make(step)


def _ddp(step: Step) -> Expected:
    return Expected(calls=_gradients(step), state=_state(step, "ddp", step.ranks))


def _gradients(step: Step) -> tuple[Call, ...]:
    """DDP's buckets, summed after each microbatch unless only the last one is."""
    whole = num_parameters(step.shape) * step.element_bytes
    buckets = max(1, -(-whole // int(float(step.params.get("bucket_mb", BUCKET.default)) * _MEBI)))
    rounds = 1 if step.params.get("no_sync") else step.microbatches
    return (call_of(step, "dp", "all_reduce", whole / buckets, buckets * rounds, step.ranks),)


def _zero1(step: Step) -> Expected:
    """DDP's gradients, then every parameter broadcast by the rank that owns its state."""
    tensors = _by_unit(_parts(step), lambda part: part.numel * step.element_bytes)
    owners = [call_of(step, "dp", "broadcast", size, count, step.ranks) for size, count in tensors.items()]
    return Expected(calls=(*_gradients(step), *owners), state=_state(step, "zero1", step.ranks))


def _zero2(step: Step) -> Expected:
    return Expected(calls=_sharded(step, _parts(step), step.ranks, gathers=1), state=_state(step, "zero2", step.ranks))


def _zero3(step: Step) -> Expected:
    return Expected(calls=_sharded(step, _parts(step), step.ranks), state=_state(step, "zero3", step.ranks))


def _hsdp(step: Step) -> Expected:
    """FSDP within shards; each unit's shard of gradients is summed over replicas. The root stays gathered."""
    shards = int(step.params["shard"]) or max(2, step.ranks // 2)
    within = [replace(call, axis="shard") for call in _sharded(step, _parts(step), shards, root_gathers=1)]
    across = [
        call_of(step, "replicate", "all_reduce", call.num_bytes / shards, call.count, step.ranks // shards)
        for call in within
        if call.op == "reduce_scatter"
    ]
    state = _state(step, "hsdp", shards)
    root = sum(part.numel for part in _parts(step) if not part.name.startswith("layers.")) * step.element_bytes
    kept = replace(state, parameters=state.parameters + root * (shards - 1) / shards)
    return Expected(calls=(*within, *across), state=kept)


def _sharded(
    step: Step, parts: Sequence[ParameterPart], ranks: int, *, gathers: int = 2, root_gathers: int | None = None
) -> tuple[Call, ...]:
    """FSDP's calls: a unit is a layer, or all that is in none, padded tensor by tensor."""
    units: dict[str, int] = {}
    for part in parts:
        unit = ".".join(part.name.split(".")[:2]) if part.name.startswith("layers.") else ""
        units[unit] = units.get(unit, 0) + padded_numel(part.size, ranks) * step.element_bytes
    rounds = 1 if step.params.get("no_sync") else step.microbatches
    found = []
    for unit, size in units.items():
        times = gathers if unit or root_gathers is None else root_gathers
        found.append(call_of(step, "dp", "all_gather", size, times * step.microbatches, ranks))
        found.append(call_of(step, "dp", "reduce_scatter", size, rounds, ranks))
    return tuple(found)


def _tp(step: Step) -> Expected:
    return Expected(calls=_layers_split(step, step.ranks), state=_split_state(step, "tp", step.ranks))


def _layers_split(step: Step, ranks: int) -> tuple[Call, ...]:
    count = 4 * step.shape.layers * step.microbatches
    return (call_of(step, "tp", "all_reduce", step.activation_bytes, count, ranks),)


def _tp_sp(step: Step) -> Expected:
    """4 gathers and 4 scatters a layer, a gather at each end, and the sum of each norm tensor's gradient once."""
    flights = 4 * step.shape.layers * step.microbatches
    norms = [part for part in _parts(step) if "norm" in part.name]
    summed = _by_unit(norms, lambda part: part.numel * step.element_bytes)
    calls = (
        call_of(step, "tp", "all_gather", step.activation_bytes, flights + 2 * step.microbatches, step.ranks),
        call_of(step, "tp", "reduce_scatter", step.activation_bytes, flights, step.ranks),
        *(call_of(step, "tp", "all_reduce", size, count, step.ranks) for size, count in summed.items()),
    )
    return Expected(calls=calls, state=_split_state(step, "tp_sp", step.ranks))


def _tp_fsdp(step: Step) -> Expected:
    inner = int(step.params["tp"])
    outer = step.ranks // inner
    parts = parts_of_rank(step.shape, (0,), (step.shape.layers,), tp=inner)
    sharded = _sharded(step, parts, outer) if outer > 1 else ()
    held = sum(part.numel for part in parts)
    return Expected(
        calls=(*_layers_split(step, inner), *sharded),
        state=state_bytes("zero3", held, outer, mixed=step.element_bytes < 4),
    )


def _pp(step: Step) -> Expected:
    """The rank that sends most; its state is the fullest rank's."""
    pipeline = pipeline_of(step.params, step.shape, step.ranks)
    sent = max(bytes_by_rank(pipeline, step.shape, int(step.params["microbatch"]), step.element_bytes))
    mesh = {"pp": step.ranks}
    held = max(
        state_elements(
            step.shape,
            mesh,
            coordinate_of(mesh, rank),
            schedule=pipeline.schedule.name,
            chunks=pipeline.schedule.chunks,
            split="+".join(map(str, pipeline.layers_by_stage)),
        ).total
        for rank in range(step.ranks)
    )
    count = sent / step.activation_bytes
    return Expected(
        calls=(call_of(step, "pp", "send", step.activation_bytes, count, step.ranks),),
        state=state_bytes("ddp", held, 1, mixed=step.element_bytes < 4),
    )


def _hybrid(step: Step) -> Expected | str:
    """The planner's own calls, as a measured step makes them; mixtures of experts route as they like."""
    mesh = mesh_of(str(step.params["mesh"]), step.ranks)
    if int(step.params["experts"]):
        return "hybrid with experts: its communication depends on routes"
    if step.params["split"]:
        return f"hybrid with split = {step.params['split']}: the planner gives every stage as many layers"
    how = str(step.params["checkpointing"])
    if how == "selective":
        return "hybrid with checkpointing = selective: it sends again what the planner's keeps"
    ask = as_measured(
        Ask(
            model=Model(name="row", shape=step.shape),
            mesh=mesh,
            microbatch=int(step.params["microbatch"]),
            microbatches=step.microbatches,
            element_bytes=step.element_bytes,
            schedule=str(step.params["schedule"]),
            chunks=int(step.params["chunks"]),
            cp_method=str(step.params["cp_method"]),
            checkpointing="full" if how == "full" else "none",
        ),
        step.device,
    )
    held = max(
        state_elements(step.shape, mesh, coordinate_of(mesh, rank), schedule=ask.schedule, chunks=ask.chunks).total
        for rank in range(step.ranks)
    )
    calls = max((calls_of(ask, part, step.on_node) for part in parts_of(ask)), key=_sent)
    return Expected(calls=calls, state=state_bytes("ddp", held, 1, mixed=step.element_bytes < 4))


def _cp(step: Step) -> Expected | str:
    """DDP over all ranks, and what a method of attention exchanges."""
    if step.params["attention"] != "real":
        return f"cp with attention = {step.params['attention']}: waits of tiles are no compute that was declared"
    return Expected(calls=(*attention_calls(step), *_gradients(step)), state=_state(step, "ddp", step.ranks))


def _sent(calls: Sequence[Call]) -> float:
    return sum(call.sent for call in calls)


def _parts(step: Step) -> list[ParameterPart]:
    return parts_of_rank(step.shape, (0,), (step.shape.layers,))


def _by_unit(parts: Sequence[ParameterPart], size: Callable[[ParameterPart], float]) -> dict[float, int]:
    """Return how many parts have each size."""
    found: dict[float, int] = {}
    for part in parts:
        found[size(part)] = found.get(size(part), 0) + 1
    return found


def _state(step: Step, strategy: str, ranks: int) -> StateBytes:
    return state_bytes(strategy, num_parameters(step.shape), ranks, mixed=step.element_bytes < 4)


def _split_state(step: Step, strategy: str, ranks: int) -> StateBytes:
    held = sum(part.numel for part in parts_of_rank(step.shape, (0,), (step.shape.layers,), tp=ranks))
    return state_bytes(strategy, held, 1, mixed=step.element_bytes < 4)


_UNPREDICTED = {
    "ep_dispatch": "dispatch and combine alone are no training step",
    "ep_layer": "a layer alone is no training step",
}
_KINDS: Mapping[str, Callable[[Step], Expected | str]] = {
    "ddp": _ddp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "hsdp": _hsdp,
    "tp": _tp,
    "tp_sp": _tp_sp,
    "tp_fsdp": _tp_fsdp,
    "pp": _pp,
    "hybrid": _hybrid,
    "cp": _cp,
    "ep_step": expert_step,
}
KINDS = tuple(_KINDS)
