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
from workloads.planner.link_time import Curve, beyond, by_curves, curves_of
from workloads.planner.measured_activations import activations_of
from workloads.planner.measured_calls import KINDS, Step, expected
from workloads.planner.measured_time import declared_compute, row_time
from workloads.planner.published import published
from workloads.planner.render import duration, published_text, table

_WHOLE = {definition.name: definition.whole for definition in DEFINITIONS}


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


def _check(records: Sequence[Record], curves: Sequence[Curve]) -> StepCheck | str:
    """Return one step's predictions beside its measurements, or why there are none."""
    measured = [record for record in records if record.status == "ok"]
    if not measured:
        return records[0].reason or records[0].status
    case, world, metrics = measured[0].case, measured[0].world, _medians(measured)
    step = Step(
        name=case.name.partition(".")[2],
        params=_WHOLE[case.name](case.params) if case.name in _WHOLE else case.whole,
        ranks=world.size,
        on_node=-(-world.size // world.nodes),
        device=world.device,
    )
    wanted = expected(step)
    if isinstance(wanted, str):
        return f"not predicted: {wanted}"
    declared = declared_compute(step)
    if declared is None and "compute" not in metrics:
        return "its compute was not measured alone"
    calls, seconds = [call for call in wanted.calls if call.place.ranks > 1 and call.count], by_curves(curves)
    time = row_time(
        step,
        calls,
        seconds,
        compute_seconds=metrics["compute"] if declared is None else declared,
        outside_seconds=metrics.get("non_pipeline_time", 0.0) if declared is None else 0.0,
        backend=world.backend,
    )
    took: dict[str, float] = {}
    sent: dict[str, float] = {}
    for call in calls:
        took[call.axis] = took.get(call.axis, 0.0) + call.count * seconds(call)
        sent[call.axis] = sent.get(call.axis, 0.0) + call.sent
    rows = [
        ("step_time", "step_time", "s", time.seconds),
        *((f"exposed.{axis}", f"exposed_comm.{axis}", "s", each) for axis, each in time.exposed_seconds.items()),
        *((f"comm.{axis}", f"comm_transfer.{axis}", "s", each) for axis, each in took.items()),
        *((f"bytes.{axis}", f"bytes_sent.{axis}", "B", each) for axis, each in sent.items()),
        *((f"memory.{name}", f"memory.{name}", "B", getattr(wanted.state, name)) for name in STATE),
        ("memory.activations", "memory_counted.activations", "B", activations_of(step)),
    ]
    return StepCheck(
        case=case.id,
        label=case.label,
        ranks=step.ranks,
        rule=time.rule,
        compute="measured" if declared is None else "declared",
        components=[
            Component(name=name, predicted=predicted, measured=metrics.get(metric), unit=unit)
            for name, metric, unit, predicted in rows
            if predicted is not None
        ],
        notes=list(beyond(calls, curves)),
    )


def _medians(records: Sequence[Record]) -> Mapping[str, float]:
    """Return each metric's median over launches, where it is known."""
    known: dict[str, list[float]] = {}
    for record in records:
        for name, metric in record.metrics.items():
            if metric.value is not None:
                known.setdefault(name, []).append(metric.value)
    return {name: median(values) for name, values in known.items()}


def validation_text(found: Validation) -> str:
    """Return predicted beside measured, step by step and component by component."""
    rows = [
        [
            row.label if i == 0 else "",
            one.name,
            *(_quantity(value, one.unit) for value in (one.predicted, one.measured)),
            "-" if one.error is None else f"{one.error:+.1%}",
        ]
        for row in found.rows
        for i, one in enumerate(row.components)
    ]
    sources = "its own fits" if found.fits == found.run else f"the fits of {found.fits}"
    if found.rows:
        sources += f" and each row's {' or '.join(dict.fromkeys(row.compute for row in found.rows))} compute"
    notes = dict.fromkeys(f"{row.label}: {note}" for row in found.rows for note in (row.rule, *row.notes))
    parts = [
        f"{found.run}, predicted from {sources}",
        table(["step", "component", "predicted", "measured", "error"], rows, left=2),
        "The host's idle time is not predicted; communication is the time in which it moves, without waits for peers; "
        "activations are what is saved for backward, counted, not the peak of a pass.",
        "\n".join(notes),
        "\n".join(f"not here: {label}: {reason}" for label, reason in found.left_out.items()),
        "Of declared hardware, not of this machine:\n" + published_text(found.published) if found.published else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return duration(value) if unit == "s" else f"{value:,.0f} {unit}"
