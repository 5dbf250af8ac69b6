"""How a measured step's compute and calls add up to its time. Pure.

What stands in the way is added to the compute. DDP's buckets pass beside the backward pass; parameters that are
gathered one layer ahead pass beside a layer. A pipeline is simulated: its schedule, its stages, a message's way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.results.details import Action
from bench.text import counted
from workloads.costs.memory import schedule_of
from workloads.costs.parameter_table import ParameterPart, parts_of
from workloads.costs.step_spec import StepSpec
from workloads.pipeline_parallel.simulate import simulate
from workloads.planner.link_time import PlacedCall, Seconds

_FORWARD, _BACKWARD = 1 / 3, 2 / 3  # of a layer's arithmetic: forward, then the gradients of inputs and of weights
_WITHIN = ("tp", "cp", "ring", "ulysses", "ep", "etp")  # axes whose calls stand between the operations of a microbatch


@dataclass(frozen=True, kw_only=True)
class RowTime:
    """A step as predicted: its seconds, what each axis' calls take, what of it no compute hides, and by which rule."""

    seconds: float
    axis_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]
    rule: str


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are summed by one call; ``ready`` is the share of the backward pass after which it can start."""

    size_bytes: int
    ready: float


def declared_compute(spec: StepSpec) -> float | None:
    """Return the compute of a step whose compute is timed: 3 T a microbatch, a forward again if checkpointed."""
    if spec.timed_seconds is None:
        return None
    return (4 if spec.checkpointing == "full" else 3) * spec.timed_seconds * spec.microbatches


def row_time(
    spec: StepSpec,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    *,
    compute_seconds: float,
    outside_seconds: float = 0.0,
    backend: str = "gloo",
) -> RowTime:
    """Return the time of a step of so much compute; a pipeline has ``outside_seconds`` before and after it."""
    took: dict[str, float] = {}
    for call in calls:
        took[call.axis] = took.get(call.axis, 0.0) + call.count * seconds(call)
    exposed = dict(took)
    rule = "nothing hides communication"
    if "pp" in took:
        hop = seconds(next(call for call in calls if call.axis == "pp"))
        within = sum(each for axis, each in took.items() if axis in _WITHIN)
        after = sum(each for axis, each in took.items() if axis not in (*_WITHIN, "pp"))
        busy, rendezvous = compute_seconds + within, backend == "gloo"
        at_once, makespan = (_makespan(spec, busy, late, rendezvous=rendezvous) for late in (0.0, hop))
        return RowTime(
            seconds=makespan + after + outside_seconds,
            axis_seconds=took,
            exposed_seconds={**took, "pp": makespan - at_once},
            rule=f"{schedule_of(spec).name} simulated, each message {hop * 1e3:.3g} ms on its way"
            + (" once its receiver asks for it" if rendezvous else ""),
        )
    if spec.overlaps and set(spec.mesh) == {"dp"}:
        summed = [call for call in calls if call.op == "all_reduce"]
        rule = "no rank to sum with"
        if summed:
            exposed, rule = _bucketed(spec, summed[0], calls, seconds, compute_seconds)
        elif calls:
            rule = "gradients are scattered after the backward pass, and parameters gathered after the update"
    elif spec.overlaps and "fsdp" in spec.mesh and (backend != "gloo" or spec.prefetches):
        # NCCL also scatters beside the next layer, where gloo blocks
        windows = {"all_gather": compute_seconds}
        if backend != "gloo":
            windows["reduce_scatter"] = compute_seconds * _BACKWARD
        for axis, op in product(exposed, windows):
            mine = [call for call in calls if (call.axis, call.op) == (axis, op)]
            exposed[axis] -= _hidden(mine, seconds, windows[op])
        rule = f"each {' and '.join(windows)} but the longest beside one layer's compute"
    whole = compute_seconds + sum(exposed.values())
    return RowTime(seconds=whole, axis_seconds=took, exposed_seconds=exposed, rule=rule)


def _bucketed(
    spec: StepSpec, summed: PlacedCall, calls: Sequence[PlacedCall], seconds: Seconds, compute_seconds: float
) -> tuple[dict[str, float], str]:
    """DDP: each bucket under what is left of the backward pass; ZeRO-1's broadcasts come after the update."""
    width = spec.reduced_bytes or spec.element_bytes
    buckets = buckets_of(list(parts_of(spec.at(0))), cap_bytes=spec.bucket_bytes, element_bytes=width)
    rounds = spec.microbatches if spec.each_microbatch else 1
    window = compute_seconds * _BACKWARD / spec.microbatches
    exposed = rounds * exposed_seconds(buckets, lambda size: seconds(replace(summed, num_bytes=size)), window)
    exposed += sum(call.count * seconds(call) for call in calls if call.op != "all_reduce")
    return {summed.axis: exposed}, f"{counted(len(buckets), 'bucket')} summed in turn beside the backward pass"


def buckets_of(parts: Sequence[ParameterPart], *, cap_bytes: float, element_bytes: int) -> list[Bucket]:
    """Return DDP's buckets in the order in which they are summed; the backward pass goes by the elements of layers.

    torch fills buckets with gradients in the order in which the backward pass makes them, and closes one once it holds
    ``bucket_cap_mb`` or more.
    """
    found: list[Bucket] = []
    in_layers = [part.numel if part.name.startswith("layers.") else 0 for part in parts]
    held = behind = 0
    for i, (part, numel) in enumerate(zip(reversed(parts), reversed(in_layers), strict=True), 1):
        held += part.numel * element_bytes
        behind += numel
        if held >= cap_bytes or i == len(parts):
            found.append(Bucket(size_bytes=held, ready=behind / sum(in_layers)))
            held = 0
    return found


def exposed_seconds(buckets: Sequence[Bucket], seconds: Callable[[int], float], window_seconds: float) -> float:
    """Return what is left to wait for after a backward pass of ``window_seconds``: bucket after bucket."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * window_seconds) + seconds(bucket.size_bytes)
    return end - window_seconds


def _hidden(calls: Sequence[PlacedCall], seconds: Seconds, window: float) -> float:
    """Return what hides of calls beside a layer each: all but one whole, and of each what its layer does not cover."""
    if not calls:
        return 0.0
    each = window / sum(call.count for call in calls)
    return max(0.0, sum(call.count * min(seconds(call), each) for call in calls) - max(map(seconds, calls)))


def _makespan(spec: StepSpec, busy_seconds: float, hop_seconds: float, *, rendezvous: bool) -> float:
    """Return how long a schedule takes whose mean rank is busy for so long, each stage as its layers have it."""
    schedule, layers = schedule_of(spec), spec.at(0).layers_by_stage
    layer = busy_seconds * schedule.ranks / schedule.microbatches / sum(layers)
    share = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD / 2, "W": _BACKWARD / 2}

    def seconds(action: Action) -> float:
        return layer * layers[action.stage] * share[action.kind]

    return simulate(schedule, seconds, lambda source, target: hop_seconds, rendezvous=rendezvous).makespan
