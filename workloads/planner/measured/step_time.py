"""The seconds of a measured step from its compute and from the times of its calls. Pure.

The rules are those of the implementations: DDP reduces buckets during the backward pass, FSDP
gathers a layer while another computes, and a pipeline runs its order of actions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parbench.bench.results.details import Action
from parbench.bench.text import pluralize
from parbench.workloads.costs.parameter_table import ParameterPart, list_parts
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from parbench.workloads.pipeline_parallel.simulation import simulate
from parbench.workloads.planner.dry_run import BLOCKING_AXES
from parbench.workloads.planner.link_time import PlacedCall, Seconds

FORWARD_SHARE = 1 / 3
BACKWARD_SHARE = 2 / 3
"""Shares of a layer's compute: backward has the gradients of inputs and of weights."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted seconds of a step, of its axes, and the rule for what is exposed."""

    seconds: float
    axis_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]
    rule: str


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that one call reduces."""

    size_bytes: int
    ready: float  # the share of the backward pass after which the call can start


def get_declared_compute(spec: StepSpec) -> float | None:
    """Return the seconds of simulated compute: 3 T per microbatch, with a repeated forward 4 T."""
    if spec.simulated_seconds is None:
        return None
    passes = 4 if spec.checkpointing == "full" else 3
    return passes * spec.simulated_seconds * spec.microbatches


def predict_step_time(
    spec: StepSpec,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    *,
    compute_seconds: float,
    backend: str = "gloo",
) -> StepTime:
    """Return the time of a step with so much compute."""
    axis_seconds: dict[str, float] = {}
    for call in calls:
        total = axis_seconds.get(call.axis, 0.0) + call.count * seconds(call)
        axis_seconds[call.axis] = total
    if "pp" in axis_seconds:
        hop = seconds(next(call for call in calls if call.axis == "pp"))
        return _predict_pipeline(
            spec,
            axis_seconds,
            hop,
            compute_seconds,
            has_rendezvous=backend == "gloo",
        )
    exposed, rule = dict(axis_seconds), "nothing hides communication"
    if set(spec.dims.sizes) <= {"dp", "cp"}:
        reductions = [call for call in calls if call.op == "all_reduce"]
        if reductions:
            exposed, rule = _expose_buckets(spec, reductions[0], calls, seconds, compute_seconds)
        elif calls:
            rule = "gradients are scattered after backward, parameters gathered after the update"
        else:
            rule = "no rank to reduce with"
    elif spec.dims.is_sharded and (backend != "gloo" or spec.prefetch):
        exposed, rule = _expose_units(calls, seconds, compute_seconds, axis_seconds, backend)
    return StepTime(
        seconds=compute_seconds + sum(exposed.values()),
        axis_seconds=axis_seconds,
        exposed_seconds=exposed,
        rule=rule,
    )


def _predict_pipeline(
    spec: StepSpec,
    axis_seconds: Mapping[str, float],
    hop: float,
    compute_seconds: float,
    *,
    has_rendezvous: bool,
) -> StepTime:
    """Return the time of a pipeline, whose messages are exposed by what they add to its makespan."""
    blocking = sum(axis_seconds.get(axis, 0.0) for axis in BLOCKING_AXES)
    after = sum(axis_seconds.values()) - blocking - axis_seconds["pp"]
    busy = compute_seconds + blocking
    without_messages = _simulate_makespan(spec, busy, 0.0, has_rendezvous=has_rendezvous)
    makespan = _simulate_makespan(spec, busy, hop, has_rendezvous=has_rendezvous)
    rule = f"{spec.order.name} simulated, with messages of {hop * 1e3:.3g} ms"
    if has_rendezvous:
        rule += " that wait for their receiver"
    return StepTime(
        seconds=makespan + after,
        axis_seconds=axis_seconds,
        exposed_seconds={**axis_seconds, "pp": makespan - without_messages},
        rule=rule,
    )


def _simulate_makespan(
    spec: StepSpec, busy_seconds: float, hop_seconds: float, *, has_rendezvous: bool
) -> float:
    """Return the makespan of a schedule whose mean rank is busy for so long."""
    order, layers_by_stage = spec.order, spec.rank_view(0).layers_by_stage
    layer = busy_seconds * order.ranks / order.microbatches / sum(layers_by_stage)
    half_backward = BACKWARD_SHARE / 2
    shares = {"F": FORWARD_SHARE, "B": BACKWARD_SHARE, "I": half_backward, "W": half_backward}

    def get_seconds(action: Action) -> float:
        return layer * layers_by_stage[action.stage] * shares[action.kind]

    return simulate(order, get_seconds, hop_seconds, rendezvous=has_rendezvous).makespan


def _expose_buckets(
    spec: StepSpec,
    reduction: PlacedCall,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    compute_seconds: float,
) -> tuple[dict[str, float], str]:
    """Return the exposed time of DDP's buckets. The broadcasts of ZeRO-1 follow the update."""
    buckets = list_buckets(
        list(list_parts(spec.rank_view(0))),
        bucket_bytes=spec.bucket_bytes,
        bytes_per_element=spec.reduce_bytes,
    )

    def get_seconds(num_bytes: int) -> float:
        return seconds(replace(reduction, num_bytes=num_bytes))

    window = compute_seconds * BACKWARD_SHARE / spec.microbatches
    exposed = spec.gradient_syncs * compute_exposed_seconds(buckets, get_seconds, window)
    exposed += sum(call.count * seconds(call) for call in calls if call.op != "all_reduce")
    rule = f"{pluralize(len(buckets), 'bucket')} reduced one by one during backward"
    return {reduction.axis: exposed}, rule


def list_buckets(
    parts: Sequence[ParameterPart], *, bucket_bytes: int, bytes_per_element: int
) -> list[Bucket]:
    """Return DDP's buckets in the order of their reduction.

    Torch fills buckets in the order of the backward pass, and closes a bucket that has
    ``bucket_bytes`` or more. By default (0) the first bucket is smaller than the others. The
    backward pass advances by the elements of layers.
    """
    buckets: list[Bucket] = []
    cap_bytes = bucket_bytes or DEFAULT_FIRST_BUCKET_BYTES
    layer_elements = [part.numel if part.name.startswith("layers.") else 0 for part in parts]
    total = sum(layer_elements)
    size_bytes = finished = 0
    for index in reversed(range(len(parts))):
        size_bytes += parts[index].numel * bytes_per_element
        finished += layer_elements[index]
        if size_bytes >= cap_bytes or index == 0:
            buckets.append(Bucket(size_bytes=size_bytes, ready=finished / total))
            size_bytes = 0
            cap_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES
    return buckets


def compute_exposed_seconds(
    buckets: Sequence[Bucket], seconds: Callable[[int], float], window_seconds: float
) -> float:
    """Return the seconds after a backward pass of ``window_seconds`` until all buckets are reduced."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * window_seconds) + seconds(bucket.size_bytes)
    return end - window_seconds


def _expose_units(
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    compute_seconds: float,
    axis_seconds: Mapping[str, float],
    backend: str,
) -> tuple[dict[str, float], str]:
    """Return the exposed time of FSDP's units, which gloo gathers only during compute."""
    windows = {"all_gather": compute_seconds}
    if backend != "gloo":
        windows["reduce_scatter"] = compute_seconds * BACKWARD_SHARE
    exposed = dict(axis_seconds)
    for axis in axis_seconds:
        for op, window in windows.items():
            unit_calls = [call for call in calls if call.axis == axis and call.op == op]
            exposed[axis] -= _compute_hidden_seconds(unit_calls, seconds, window)
    rule = f"each {' and '.join(windows)} but the longest during one layer's compute"
    return exposed, rule


def _compute_hidden_seconds(calls: Sequence[PlacedCall], seconds: Seconds, window: float) -> float:
    """Return the hidden seconds of calls that each have one layer's compute, without the longest."""
    if not calls:
        return 0.0
    layer = window / sum(call.count for call in calls)
    covered = sum(call.count * min(seconds(call), layer) for call in calls)
    return max(0.0, covered - max(seconds(call) for call in calls))
