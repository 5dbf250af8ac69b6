"""How a measured step's compute and calls add up to its time. Pure.

What stands in the way is added to the compute. DDP's buckets pass beside the backward pass; parameters that are
gathered one layer ahead pass beside a layer. A pipeline is simulated: its schedule, its stages, a message's way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.results.details import Action
from workloads.costs.parameter_table import parts_of_rank
from workloads.model.compute_kind import parse_compute
from workloads.model.shapes import BUCKET
from workloads.pipeline_parallel.pipeline_case import Pipeline, pipeline_of
from workloads.pipeline_parallel.simulate import simulate
from workloads.planner.ddp_buckets import buckets_of, exposed_seconds
from workloads.planner.link_time import Call, Seconds
from workloads.planner.measured_calls import Step

_FORWARD, _BACKWARD = 1 / 3, 2 / 3  # of a layer's arithmetic: forward, then the gradients of inputs and of weights
_BUCKETED = ("ddp", "zero1")
_SHARDED = ("zero2", "zero3", "hsdp", "tp_fsdp")
_WITHIN = ("tp", "cp", "ep")  # axes whose calls stand between the operations of a microbatch
_MEBI = 2**20


@dataclass(frozen=True, kw_only=True)
class RowTime:
    """A step as predicted: its seconds, what of each axis no compute hides, and by which rule."""

    seconds: float
    exposed_seconds: Mapping[str, float]
    rule: str


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A step and what it is made of: all calls that move something, and how long each takes."""

    step: Step
    calls: Sequence[Call]
    seconds: Seconds
    compute_seconds: float
    backend: str

    @property
    def took(self) -> dict[str, float]:
        """Seconds of each axis' calls, one after another."""
        found: dict[str, float] = {}
        for call in self.calls:
            found[call.axis] = found.get(call.axis, 0.0) + call.count * self.seconds(call)
        return found


def declared_compute(step: Step) -> float | None:
    """Return the compute of a step whose compute is timed: 3 T a microbatch, a forward again if checkpointed."""
    timed = parse_compute(str(step.params["compute"]))
    if timed is None:
        return None
    passes = 4 if step.params["checkpointing"] == "full" else 3
    return passes * timed * step.microbatches


def row_time(
    step: Step,
    calls: Sequence[Call],
    seconds: Seconds,
    *,
    compute_seconds: float,
    outside_seconds: float = 0.0,
    backend: str = "gloo",
) -> RowTime:
    """Return the time of a step of so much compute; a pipeline has ``outside_seconds`` before and after it."""
    parts = _Parts(step=step, calls=calls, seconds=seconds, compute_seconds=compute_seconds, backend=backend)
    if any(call.axis == "pp" for call in calls):
        return _pipelined(parts, outside_seconds)
    if step.name in _BUCKETED:
        return _bucketed(parts)
    if step.name in _SHARDED and (backend != "gloo" or step.params.get("prefetch") == "explicit"):
        return _gathered_ahead(parts)
    return _sum(parts, parts.took, "nothing hides communication")


def _sum(parts: _Parts, exposed: Mapping[str, float], rule: str) -> RowTime:
    return RowTime(seconds=parts.compute_seconds + sum(exposed.values()), exposed_seconds=exposed, rule=rule)


def _bucketed(parts: _Parts) -> RowTime:
    """DDP: each bucket under what is left of the backward pass; ZeRO-1's broadcasts come after the update."""
    step = parts.step
    sums = [call for call in parts.calls if call.op == "all_reduce"]
    others = [call for call in parts.calls if call.op != "all_reduce"]
    if not sums:
        return _sum(parts, parts.took, "no rank to sum with")
    buckets = buckets_of(
        parts_of_rank(step.shape, (0,), (step.shape.layers,)),
        cap_bytes=float(step.params.get("bucket_mb", BUCKET.default)) * _MEBI,
        element_bytes=step.element_bytes,
    )
    rounds = 1 if step.params.get("no_sync") else step.microbatches
    window = parts.compute_seconds * _BACKWARD / step.microbatches

    def took(size_bytes: int) -> float:
        return parts.seconds(replace(sums[0], num_bytes=size_bytes))

    exposed = rounds * exposed_seconds(buckets, took, window)
    exposed += sum(call.count * parts.seconds(call) for call in others)
    count = f"{len(buckets)} bucket" + ("s" if len(buckets) > 1 else "")
    return _sum(parts, {sums[0].axis: exposed}, f"{count} summed in turn beside the backward pass")


def _gathered_ahead(parts: _Parts) -> RowTime:
    """FSDP with gathers one layer ahead; NCCL also scatters beside the next layer, gloo blocks there."""
    windows = {"all_gather": parts.compute_seconds}
    if parts.backend != "gloo":
        windows["reduce_scatter"] = parts.compute_seconds * _BACKWARD
    exposed = parts.took
    for axis in exposed:
        for op, window in windows.items():
            mine = [call for call in parts.calls if call.axis == axis and call.op == op]
            exposed[axis] -= sum(call.count * parts.seconds(call) for call in mine) - _ahead(
                mine, parts.seconds, window
            )
    words = " and ".join(windows)
    return _sum(parts, exposed, f"each {words} but the longest beside one layer's compute")


def _ahead(calls: Sequence[Call], seconds: Seconds, window: float) -> float:
    """Return what shows of calls beside a layer each: one whole, and of each what its layer does not cover."""
    if not calls:
        return 0.0
    each = window / sum(call.count for call in calls)
    over = sum(call.count * max(0.0, seconds(call) - each) for call in calls)
    whole = sum(call.count * seconds(call) for call in calls)
    return min(whole, max(seconds(call) for call in calls) + over)


def _pipelined(parts: _Parts, outside_seconds: float) -> RowTime:
    """Simulate the schedule; what stands within a microbatch lengthens its passes, what comes after it is added."""
    step, took = parts.step, parts.took
    message = next(call for call in parts.calls if call.axis == "pp")
    hop = parts.seconds(message)
    within = sum(seconds for axis, seconds in took.items() if axis in _WITHIN)
    after = sum(seconds for axis, seconds in took.items() if axis not in (*_WITHIN, "pp"))
    pipeline = pipeline_of(step.params, step.shape, message.place.ranks)
    busy, rendezvous = parts.compute_seconds + within, parts.backend == "gloo"
    at_once, makespan = (_makespan(pipeline, busy, late, rendezvous=rendezvous) for late in (0.0, hop))
    return RowTime(
        seconds=makespan + after + outside_seconds,
        exposed_seconds={**took, "pp": makespan - at_once},
        rule=f"{pipeline.schedule.name} simulated, each message {hop * 1e3:.3g} ms on its way"
        + (" once its receiver asks for it" if rendezvous else ""),
    )


def _makespan(pipeline: Pipeline, busy_seconds: float, hop_seconds: float, *, rendezvous: bool) -> float:
    """Return how long a schedule takes whose mean rank is busy for so long, each stage as its layers have it."""
    schedule, layers = pipeline.schedule, pipeline.layers_by_stage
    layer = busy_seconds * schedule.ranks / schedule.microbatches / sum(layers)
    share = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD / 2, "W": _BACKWARD / 2}

    def seconds(action: Action) -> float:
        return layer * layers[action.stage] * share[action.kind]

    return simulate(schedule, seconds, lambda source, target: hop_seconds, rendezvous=rendezvous).makespan
