"""How far the planner is right: a run's steps, predicted from collectives that it or another run measured.

Bytes and state come from closed forms, communication from fits, arithmetic from the row's own measured ``compute``, or
as it was declared where it is timed: what is tested is the rest, how calls add up to a step. The host's idle time is
not predicted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from parbench.bench.results.details import (
    STATE_COMPONENTS,
    Action,
    ComponentCheck,
    StepCheck,
    Validation,
)
from parbench.bench.results.metrics import MetricValue, merge_metrics
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError, format_table, pluralize
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.communication_pattern import bytes_by_axis, list_calls
from parbench.workloads.costs.memory import rank_memory
from parbench.workloads.costs.parameter_table import ParameterPart, list_parts
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from parbench.workloads.pipeline_parallel.simulation import simulate
from parbench.workloads.planner.link_time import (
    Curve,
    PlacedCall,
    Seconds,
    beyond,
    by_curves,
    curves_of,
)
from parbench.workloads.planner.placement import Place
from parbench.workloads.presets import PRESETS

_MOST_RANKS = 1 << 14
_DEFINITIONS = {definition.name: definition for definition in DEFINITIONS}


def validate(run: Run, fits: Run | None = None) -> Validation:
    """Return the predictions for all steps of a run from its own fits, or from another run's.

    ``UserError`` where the one holds no step, or the other no collective to fit, or none that any step calls.
    """
    fits = fits or run
    steps: dict[str, list[Record]] = {}
    for record in run.records:
        if record.case.name.startswith("workload."):
            steps.setdefault(record.case.id, []).append(record)
    if not steps:
        raise UserError(
            f"{run.path} holds no training step: a validation needs some of {', '.join(PRESETS)}"
        )
    curves = curves_of(fits)
    if not curves:
        raise UserError(
            f"{fits.path} holds no collective with three sizes, mode=blocking, dtype=float32, to predict from"
        )
    rows, left_out, lacking = [], {}, None
    for records in steps.values():
        try:
            found = _check(records, curves)
        except (
            UserError
        ) as error:  # a call that no curve stands in for; other steps may do without it
            found, lacking = str(error), error
        if isinstance(found, str):
            left_out[records[0].case.label] = found
        else:
            rows.append(found)
    if lacking is not None and not rows:
        raise lacking
    return Validation(run=run.info.id, fits=fits.info.id, rows=rows, left_out=left_out)


def _check(records: Sequence[Record], curves: Sequence[Curve]) -> StepCheck | str:
    measured = [record for record in records if record.status == "ok"]
    if not measured:
        return records[0].reason or records[0].status
    case, world = measured[0].case, measured[0].world
    metrics = merge_metrics([record.metrics for record in measured])
    spec = spec_of_record(measured[0])
    if isinstance(spec, str):
        return f"not predicted: {spec}"
    declared = declared_compute(spec)
    unknown = MetricValue(value=None)
    compute = metrics.get("compute", unknown).value if declared is None else declared
    if compute is None:
        return "its compute was not measured alone"
    ranks = [spec.rank_view(rank) for rank in range(world.size)]
    busiest = max(map(list_calls, ranks), key=lambda of: sum(call.sent for call in of))
    # all alike, as the run's own collectives were measured
    on_node = -(-world.size // max(1, world.nodes))
    moving = [
        PlacedCall.of(call, Place(ranks=call.ranks, on_node=min(call.ranks, on_node)))
        for call in busiest
    ]
    time = row_time(
        spec,
        moving,
        by_curves(curves),
        compute_seconds=compute,
        backend=world.backend,
    )
    held = [rank_memory(at) for at in ranks]
    rows = [
        ("step_time", "step_time", "s", time.seconds),
        *(
            (f"exposed.{axis}", f"exposed_comm.{axis}", "s", each)
            for axis, each in time.exposed_seconds.items()
        ),
        *(
            (f"comm.{axis}", f"comm_transfer.{axis}", "s", each)
            for axis, each in time.axis_seconds.items()
        ),
        *(
            (f"bytes.{axis}", f"bytes_sent.{axis}", "B", each)
            for axis, each in bytes_by_axis(busiest).items()
        ),
        *(
            (f"memory.{name}", f"memory.{name}", "B", max(getattr(one, name) for one in held))
            for name in STATE_COMPONENTS
        ),
        (
            "memory.activations",
            "memory_counted.activations",
            "B",
            max(one.activations for one in held),
        ),
    ]
    return StepCheck(
        case=case.id,
        label=case.label,
        ranks=world.size,
        rule=time.rule,
        compute="measured" if declared is None else "declared",
        components=[
            ComponentCheck(
                name=name,
                predicted=predicted,
                measured=seen.value,
                low=seen.low,
                high=seen.high,
                unit=unit,
                method=seen.method,
                is_within_repetition=seen.is_within_repetition,
            )
            for name, metric, unit, predicted in rows
            for seen in (metrics.get(metric, unknown),)
        ],
        notes=list(beyond(moving, curves)),
    )


def spec_of_record(record: Record) -> StepSpec | str:
    """Return a record's step, or why what it sends and holds follows from no closed form."""
    name = record.case.short_name
    preset, definition = PRESETS.get(name), _DEFINITIONS.get(record.case.name)
    if record.world.size > _MOST_RANKS:
        return f"{name}: its {record.world.size} ranks are more than {_MOST_RANKS}, each of which is counted"
    if preset is None or definition is None:
        return f"{name}: {'no training step' if definition else 'no step of this suite'}"
    params = definition.complete(record.case.params)
    spec = preset(params, record.world.size)
    moe = spec.moe
    if moe is None:
        return spec
    if moe.routing != BALANCED:
        how = f"routing = {moe.routing}"
        return (
            f"{name}: {how}: who sends how much is known once routes were drawn, of balanced before"
        )
    if moe.variant != "all_to_all" or moe.capacity:
        how = f"variant = {moe.variant}, capacity = {moe.capacity:g}"
        return f"{name}: {how}: only dropless all_to_all in one part has a closed form"
    return spec


def validation_text(found: Validation) -> str:
    rows = [
        [
            row.label if i == 0 else "",
            one.name,
            *(_quantity(value, one.unit) for value in (one.predicted, one.measured)),
            one.error_text,
        ]
        for row in found.rows
        for i, one in enumerate(row.components)
    ]
    sources = "its own fits" if found.fits == found.run else f"the fits of {found.fits}"
    if found.rows:
        sources += f" and each row's {' or '.join(dict.fromkeys(row.compute for row in found.rows))} compute"
    notes = dict.fromkeys(
        f"{row.label}: {note}" for row in found.rows for note in (row.rule, *row.notes)
    )
    parts = [
        f"{found.run}, predicted from {sources}",
        format_table([["step", "component", "predicted", "measured", "error"], *rows], range(2, 5)),
        "The host's idle time is not predicted; communication is the time in which it moves, without waits for peers; "
        "activations are what is saved for backward, counted, not the peak of a pass.",
        "\n".join(notes),
        "\n".join(f"not here: {label}: {reason}" for label, reason in found.left_out.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_duration(value) if unit == "s" else f"{value:,.0f} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds with three digits, in s, ms or us."""
    if seconds == 0:
        return "0"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


_FORWARD, _BACKWARD = (
    1 / 3,
    2 / 3,
)  # of a layer's arithmetic: forward, then the gradients of inputs and of weights
_WITHIN = (
    "tp",
    "cp",
    "ring",
    "ulysses",
    "ep",
    "etp",
)  # axes whose calls stand between the operations of a microbatch


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
    if spec.simulated_seconds is None:
        return None
    return (4 if spec.checkpointing == "full" else 3) * spec.simulated_seconds * spec.microbatches


def row_time(
    spec: StepSpec,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    *,
    compute_seconds: float,
    backend: str = "gloo",
) -> RowTime:
    """Return the time of a step of so much compute."""
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
        at_once, makespan = (
            _makespan(spec, busy, late, rendezvous=rendezvous) for late in (0.0, hop)
        )
        return RowTime(
            seconds=makespan + after,
            axis_seconds=took,
            exposed_seconds={**took, "pp": makespan - at_once},
            rule=f"{spec.order.name} simulated, each message {hop * 1e3:.3g} ms on its way"
            + (" once its receiver asks for it" if rendezvous else ""),
        )
    if set(spec.dims.sizes) <= {"dp", "cp"}:
        summed = [call for call in calls if call.op == "all_reduce"]
        rule = "no rank to sum with"
        if summed:
            exposed, rule = _bucketed(spec, summed[0], calls, seconds, compute_seconds)
        elif calls:
            rule = "gradients are scattered after the backward pass, and parameters gathered after the update"
    elif spec.dims.is_sharded and (backend != "gloo" or spec.prefetch):
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
    spec: StepSpec,
    summed: PlacedCall,
    calls: Sequence[PlacedCall],
    seconds: Seconds,
    compute_seconds: float,
) -> tuple[dict[str, float], str]:
    """DDP: each bucket under what is left of the backward pass; ZeRO-1's broadcasts come after the update."""
    buckets = buckets_of(
        list(list_parts(spec.rank_view(0))),
        bucket_bytes=spec.bucket_bytes,
        bytes_per_element=spec.reduce_bytes,
    )
    rounds = spec.gradient_syncs
    window = compute_seconds * _BACKWARD / spec.microbatches
    exposed = rounds * exposed_seconds(
        buckets, lambda size: seconds(replace(summed, num_bytes=size)), window
    )
    exposed += sum(call.count * seconds(call) for call in calls if call.op != "all_reduce")
    return {
        summed.axis: exposed
    }, f"{pluralize(len(buckets), 'bucket')} summed in turn beside the backward pass"


def buckets_of(
    parts: Sequence[ParameterPart], *, bucket_bytes: int, bytes_per_element: int
) -> list[Bucket]:
    """Return DDP's buckets in the order in which they are summed; the backward pass goes by the elements of layers.

    torch fills buckets with gradients in the order in which the backward pass makes them, and closes one once it holds
    ``bucket_bytes`` or more. By default (0) the first bucket is smaller than the others.
    """
    found: list[Bucket] = []
    cap_bytes = bucket_bytes or DEFAULT_FIRST_BUCKET_BYTES
    in_layers = [part.numel if part.name.startswith("layers.") else 0 for part in parts]
    held = behind = 0
    for i, (part, numel) in enumerate(zip(reversed(parts), reversed(in_layers), strict=True), 1):
        held += part.numel * bytes_per_element
        behind += numel
        if held >= cap_bytes or i == len(parts):
            found.append(Bucket(size_bytes=held, ready=behind / sum(in_layers)))
            held = 0
            cap_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES
    return found


def exposed_seconds(
    buckets: Sequence[Bucket], seconds: Callable[[int], float], window_seconds: float
) -> float:
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
    return max(
        0.0, sum(call.count * min(seconds(call), each) for call in calls) - max(map(seconds, calls))
    )


def _makespan(
    spec: StepSpec, busy_seconds: float, hop_seconds: float, *, rendezvous: bool
) -> float:
    """Return how long a schedule takes whose mean rank is busy for so long, each stage as its layers have it."""
    order, layers = spec.order, spec.rank_view(0).layers_by_stage
    layer = busy_seconds * order.ranks / order.microbatches / sum(layers)
    share = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD / 2, "W": _BACKWARD / 2}

    def seconds(action: Action) -> float:
        return layer * layers[action.stage] * share[action.kind]

    return simulate(order, seconds, hop_seconds, rendezvous=rendezvous).makespan
