"""How far the planner is right: a run's steps, predicted from collectives that it or another run measured.

Bytes and state come from closed forms, communication from fits, arithmetic from the row's own measured ``compute``, or
as it was declared where it is timed: what is tested is the rest, how calls add up to a step. The host's idle time is
not predicted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.results.details import PLAN_FILE, STATE, Component, StepCheck, Validation
from bench.results.records import Record
from bench.results.runs import Run
from bench.results.stats import median
from bench.text import UserError, writing
from workloads.catalogue import DEFINITIONS
from workloads.planner.link_time import Call
from workloads.planner.measured_activations import activations_of
from workloads.planner.measured_calls import KINDS, Expected, Step, expected
from workloads.planner.measured_time import RowTime, declared_compute, row_time
from workloads.planner.plan_text import duration, published_text, table
from workloads.planner.published import published
from workloads.planner.run_fits import Curve, beyond, by_curves, curves_of

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
        raise UserError(f"{run.path} holds no training step: a validation needs some of {', '.join(KINDS)}")
    curves = curves_of(fits)
    if not curves:
        raise UserError(
            f"{fits.path} holds no collective with three sizes, mode=blocking, dtype=float32, to predict from"
        )
    rows, left_out, lacking = [], {}, None
    for records in steps.values():
        try:
            found = _check(records, curves)
        except UserError as error:  # a call that no curve stands in for; other steps may do without it
            found, lacking = str(error), error
        if isinstance(found, str):
            left_out[records[0].case.label] = found
        else:
            rows.append(found)
    if lacking is not None and not rows:
        raise lacking
    return Validation(run=run.info.id, fits=fits.info.id, rows=rows, left_out=left_out, published=published())


def write_validation(path: Path, found: Validation) -> None:
    """Write ``plan.json`` into the run's folder, whole or not at all."""
    fresh = path / f".{PLAN_FILE}"
    with writing(path / PLAN_FILE):
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        fresh.replace(path / PLAN_FILE)


def _check(records: Sequence[Record], curves: Mapping[tuple[str, int], Curve]) -> StepCheck | str:
    """Return one step's predictions beside its measurements, or why there are none."""
    measured = [record for record in records if record.status == "ok"]
    if not measured:
        return records[0].reason or records[0].status
    first = measured[0]
    name = first.case.name.partition(".")[2]
    definition = _DEFINITIONS.get(first.case.name)
    metrics = _medians(measured)
    step = Step(
        name=name,
        params=definition.whole(first.case.params) if definition else first.case.whole,
        ranks=first.world.size,
        on_node=-(-first.world.size // first.world.nodes),
        device=first.world.device,
    )
    wanted = expected(step)
    if isinstance(wanted, str):
        return f"not predicted: {wanted}"
    declared = declared_compute(step)
    if declared is None and "compute" not in metrics:
        return "its compute was not measured alone"
    calls = _moving(wanted.calls)
    time = row_time(
        step,
        calls,
        by_curves(curves),
        compute_seconds=metrics["compute"] if declared is None else declared,
        outside_seconds=metrics.get("non_pipeline_time", 0.0) if declared is None else 0.0,
        backend=first.world.backend,
    )
    return StepCheck(
        case=first.case.id,
        label=first.case.label,
        ranks=step.ranks,
        rule=time.rule,
        compute="measured" if declared is None else "declared",
        components=_components(step, wanted, time, metrics, curves),
        notes=list(beyond(calls, curves)),
    )


def _components(
    step: Step,
    wanted: Expected,
    time: RowTime,
    metrics: Mapping[str, float],
    curves: Mapping[tuple[str, int], Curve],
) -> list[Component]:
    moving = _moving(wanted.calls)
    axes = list(dict.fromkeys(call.axis for call in moving))
    seconds = by_curves(curves)
    took = {axis: sum(call.count * seconds(call) for call in moving if call.axis == axis) for axis in axes}
    sent = {axis: sum(call.sent for call in moving if call.axis == axis) for axis in axes}
    found = [Component(name="step_time", predicted=time.seconds, measured=metrics.get("step_time"), unit="s")]
    found += [
        Component(name=f"exposed.{axis}", predicted=exposed, measured=metrics.get(f"exposed_comm.{axis}"), unit="s")
        for axis, exposed in time.exposed_seconds.items()
    ]
    found += [
        Component(name=f"comm.{axis}", predicted=took[axis], measured=metrics.get(f"comm_transfer.{axis}"), unit="s")
        for axis in axes
    ]
    found += [
        Component(name=f"bytes.{axis}", predicted=sent[axis], measured=metrics.get(f"bytes_sent.{axis}"), unit="B")
        for axis in axes
    ]
    found += [
        Component(
            name=f"memory.{name}",
            predicted=getattr(wanted.state, name),
            measured=metrics.get(f"memory.{name}"),
            unit="B",
        )
        for name in STATE
    ]
    activations = activations_of(step)
    if activations is not None:
        counted = metrics.get("memory_counted.activations")
        found.append(Component(name="memory.activations", predicted=activations, measured=counted, unit="B"))
    return found


def _moving(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.place.ranks > 1 and call.count]


def _medians(records: Sequence[Record]) -> dict[str, float]:
    """Return each metric's median over launches, where it is known."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    known = {
        name: [
            value for record in records if name in record.metrics and (value := record.metrics[name].value) is not None
        ]
        for name in names
    }
    return {name: median(values) for name, values in known.items() if values}


def validation_text(found: Validation) -> str:
    """Return predicted beside measured, step by step and component by component."""
    rows = [
        [
            row.label if i == 0 else "",
            component.name,
            _quantity(component.predicted, component.unit),
            "-" if component.measured is None else _quantity(component.measured, component.unit),
            "-" if component.error is None else f"{component.error:+.1%}",
        ]
        for row in found.rows
        for i, component in enumerate(row.components)
    ]
    parts = [
        f"{found.run}, predicted from {_sources(found)}",
        table(["step", "component", "predicted", "measured", "error"], rows, left=2),
        "The host's idle time is not predicted; communication is the time in which it moves, without waits for peers; "
        "activations are what is saved for backward, counted, not the peak of a pass.",
    ]
    notes = dict.fromkeys(f"{row.label}: {note}" for row in found.rows for note in (row.rule, *row.notes))
    parts.append("\n".join(notes))
    parts.append("\n".join(f"not here: {label}: {reason}" for label, reason in found.left_out.items()))
    if found.published:
        parts.append(published_text(found.published))
    return "\n\n".join(part for part in parts if part)


def _sources(found: Validation) -> str:
    """Return what the predictions are made from, for people."""
    links = "its own fits" if found.fits == found.run else f"the fits of {found.fits}"
    how = dict.fromkeys(row.compute for row in found.rows)
    return f"{links} and each row's {' or '.join(how)} compute" if how else links


def _quantity(value: float, unit: str) -> str:
    return duration(value) if unit == "s" else f"{value:,.0f} {unit}"
