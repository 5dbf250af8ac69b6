"""The seconds of a measured step from its compute and from the times of its calls. Pure.

The rules are those of the implementations: DDP reduces buckets during the backward pass, FSDP
gathers a layer while another computes, and a pipeline runs its order of actions.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parbench.bench.results.details import Action
from parbench.workloads.costs.parameter_table import (
    ParameterPart,
    count_padded,
    list_parts,
    list_units,
)
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from parbench.workloads.pipeline_parallel.simulation import simulate
from parbench.workloads.planner.dry_run import BLOCKING_AXES
from parbench.workloads.planner.link_time import PlacedCall, Seconds

FORWARD_SHARE = 1 / 3
BACKWARD_SHARE = 2 / 3
"""The fractions of a layer's compute time in the forward and in the backward pass.

The backward pass computes gradients of inputs and of weights.
"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a training step and of its communication, on one rank."""

    seconds: float
    """The seconds of the complete step."""
    axis_seconds: Mapping[str, float]
    """The seconds per step of all communication on an axis, hidden or not, by axis of the mesh."""
    exposed_seconds: Mapping[str, float]
    """The seconds by which communication on an axis lengthens the step, by axis of the mesh."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket of gradients that DDP reduces with one all_reduce."""

    size_bytes: int
    """The bytes of the gradients in the bucket, in the type in which they are reduced."""
    ready: float
    """The fraction of the backward pass after which the all_reduce can start."""


def get_declared_compute(spec: StepSpec) -> float | None:
    """Return the seconds of simulated compute per step, None if a step computes for real.

    A microbatch takes 3 T, or 4 T with full recomputation, where T is ``spec.simulated_seconds``,
    the seconds of its forward pass.
    """
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
    """Return the predicted time of a step in which a rank computes for ``compute_seconds``.

    ``calls`` are the communication calls of the rank in the step, and ``seconds`` returns the
    seconds of one call. With the backend ``gloo``, a message of a pipeline leaves only when its
    receiving rank is free, and FSDP hides calls only with ``spec.prefetch``.
    """
    axis_seconds: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        axis_seconds[call.axis] += call.count * seconds(call)
    if "pp" in axis_seconds:
        hop = seconds(next(call for call in calls if call.axis == "pp"))
        return _predict_pipeline(
            spec,
            axis_seconds,
            hop,
            compute_seconds,
            has_rendezvous=backend == "gloo",
        )
    exposed = dict(axis_seconds)
    reductions = [call for call in calls if call.op == "all_reduce"]
    if set(spec.dims.sizes) <= {"dp", "cp"} and reductions:
        exposed = _expose_buckets(spec, reductions[0], calls, seconds, compute_seconds)
    elif spec.dims.is_sharded and (backend != "gloo" or spec.prefetch):
        exposed |= _expose_units(spec, calls, seconds, compute_seconds, backend != "gloo")
    return StepTime(
        seconds=compute_seconds + sum(exposed.values()),
        axis_seconds=axis_seconds,
        exposed_seconds=exposed,
    )


def _predict_pipeline(
    spec: StepSpec,
    axis_seconds: Mapping[str, float],
    hop: float,
    compute_seconds: float,
    *,
    has_rendezvous: bool,
) -> StepTime:
    """Return the time of a step with pipeline parallelism, whose schedule is simulated.

    ``axis_seconds`` has the seconds per step of all communication by axis, and ``hop`` is the
    seconds of a message between stages. ``compute_seconds`` is the compute of a rank in the
    step. The exposed time of ``pp`` is the time by which messages lengthen the simulated schedule.
    With ``has_rendezvous`` a message leaves only when its receiving rank is free.
    """
    blocking = sum(axis_seconds.get(axis, 0.0) for axis in BLOCKING_AXES)
    after = sum(axis_seconds.values()) - blocking - axis_seconds["pp"]
    busy = compute_seconds + blocking
    without_messages = _simulate_makespan(spec, busy, 0.0, has_rendezvous=has_rendezvous)
    makespan = _simulate_makespan(spec, busy, hop, has_rendezvous=has_rendezvous)
    return StepTime(
        seconds=makespan + after,
        axis_seconds=axis_seconds,
        exposed_seconds={**axis_seconds, "pp": makespan - without_messages},
    )


def _simulate_makespan(
    spec: StepSpec, busy_seconds: float, hop_seconds: float, *, has_rendezvous: bool
) -> float:
    """Return the seconds from the first to the last action of a simulated pipeline schedule.

    ``busy_seconds`` is the compute and blocking communication of a pipeline rank in a step, as the
    mean over ranks. It is divided among the stages by their layers. ``hop_seconds`` is the time of
    a message between stages. With ``has_rendezvous`` a message leaves only when its receiving rank
    is free. The sending rank does not wait.
    """
    order, layers_by_stage = spec.order, spec.rank_view(0).layers_by_stage
    layer = busy_seconds * order.ranks / order.microbatches / sum(layers_by_stage)
    half_backward = BACKWARD_SHARE / 2
    shares = {"F": FORWARD_SHARE, "B": BACKWARD_SHARE, "I": half_backward, "W": half_backward}

    def get_seconds(action: Action) -> float:
        """Return the seconds of a pass of one stage on one microbatch, without its message."""
        return layer * layers_by_stage[action.stage] * shares[action.kind]

    return simulate(order, get_seconds, hop_seconds, rendezvous=has_rendezvous).makespan


def _expose_buckets(
    spec: StepSpec,
    reduction: PlacedCall,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    compute_seconds: float,
) -> dict[str, float]:
    """Return the seconds per step of DDP's communication that compute does not hide, by axis.

    The only key is the axis of ``reduction``, an all_reduce of gradients whose size is ignored.
    ``calls`` are all calls of the step, ``seconds`` returns the seconds of one call, and
    ``compute_seconds`` is the compute of the step. The broadcasts of ZeRO-1 follow the update and
    are fully exposed.
    """
    buckets = list_buckets(
        list(list_parts(spec.rank_view(0))),
        bucket_bytes=spec.bucket_bytes,
        bytes_per_element=spec.reduce_bytes,
    )

    def get_seconds(num_bytes: int) -> float:
        """Return the seconds of an all_reduce of ``num_bytes`` bytes."""
        return seconds(replace(reduction, num_bytes=num_bytes))

    window = compute_seconds * BACKWARD_SHARE / spec.microbatches
    exposed = spec.gradient_syncs * compute_exposed_seconds(buckets, get_seconds, window)
    exposed += sum(call.count * seconds(call) for call in calls if call.op != "all_reduce")
    return {reduction.axis: exposed}


def list_buckets(
    parts: Sequence[ParameterPart], *, bucket_bytes: int, bytes_per_element: int
) -> list[Bucket]:
    """Return DDP's buckets of gradients in the order of their reduction.

    ``parts`` are the parameters in the order of the model. Torch fills buckets in the order of the
    backward pass, and closes a bucket that has ``bucket_bytes`` or more. 0 means torch's default,
    in which the first bucket is smaller than the others. The time of a layer's backward pass is
    assumed to be proportional to the number of the layer's elements.
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
    """Return the seconds from the end of a backward pass until all of its buckets are reduced.

    The backward pass takes ``window_seconds``. Buckets are reduced one after the other. The
    function ``seconds`` returns the seconds of an all_reduce from its bytes.
    """
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * window_seconds) + seconds(bucket.size_bytes)
    return end - window_seconds


def _expose_units(
    spec: StepSpec,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    compute_seconds: float,
    has_streams: bool,
) -> dict[str, float]:
    """Return the seconds per step of FSDP's collectives that compute does not hide, by mesh axis.

    The axes are ``fsdp`` and, for experts, ``efsdp``. An FSDP unit is the embeddings, a layer or
    the head. Embeddings and head are taken to compute for no time. The rules are:

    * Parameters of a unit are all-gathered while the unit before it in the same pass computes. The
      time of the gather beyond that compute is exposed. The first gather of forward, in each
      microbatch, is fully exposed.
    * Gradients of a unit are reduce-scattered while the next unit in backward computes. This needs
      ``has_streams``, as on NCCL. Otherwise their whole time is exposed.

    ``calls`` are the communication calls of one rank in a step. ``seconds`` returns the seconds of
    one call. ``compute_seconds`` is the compute of one rank in a step.
    """
    layer = compute_seconds / spec.microbatches / spec.shape.layers
    windows = [0.0, *[layer] * spec.shape.layers, 0.0]
    forward = [FORWARD_SHARE * window for window in windows]
    backward = [BACKWARD_SHARE * window for window in windows]
    exposed: dict[str, float] = {}
    for call in calls:
        if call.axis not in ("fsdp", "efsdp") or call.axis in exposed:
            continue
        gathers = _list_unit_seconds(spec, replace(call, op="all_gather"), seconds)
        scatters = _list_unit_seconds(spec, replace(call, op="reduce_scatter"), seconds)
        gathering = gathers[0] + _sum_excess(gathers[1:], forward)
        if spec.reshard:
            gathering += _sum_excess(gathers[:-1], backward[1:])
        scattering = sum(scatters)
        if has_streams:
            scattering = scatters[0] + _sum_excess(scatters[1:], backward)
        exposed[call.axis] = spec.microbatches * gathering + spec.gradient_syncs * scattering
    return exposed


def _list_unit_seconds(spec: StepSpec, call: PlacedCall, seconds: Seconds) -> list[float]:
    """Return the seconds of one all_gather or reduce_scatter of each FSDP unit.

    The units are the embeddings, each layer and the head, in this order. ``call`` has the
    operation, the group and the axis of these calls, and its size is ignored. ``seconds`` returns
    the seconds of one call. A unit without parameters on the axis takes 0 seconds.
    """
    units = list_units(spec.rank_view(0))
    parts_by_unit = [units.embeddings]
    for count, parts in units.layers:
        parts_by_unit += [parts] * count
    parts_by_unit.append(units.head)
    width = spec.bytes_per_element if call.op == "all_gather" else spec.reduce_bytes
    unit_seconds = []
    for parts in parts_by_unit:
        elements = count_padded(parts, spec.dims.shard_size)
        if call.axis == "efsdp":
            elements = sum(part.numel for part in parts if part.kind == "routed")
        sized = replace(call, num_bytes=elements * width)
        unit_seconds.append(seconds(sized) if elements else 0.0)
    return unit_seconds


def _sum_excess(durations: Sequence[float], windows: Sequence[float]) -> float:
    """Return the seconds by which calls exceed the compute that hides them, summed over calls.

    ``durations`` has the seconds of each call, and ``windows`` the seconds of compute that run
    during the call with the same index. The longer of both sequences is cut to the length of the
    other.
    """
    excesses = [
        max(0.0, duration - window) for duration, window in zip(durations, windows, strict=False)
    ]
    return sum(excesses)
