"""Predictions of a run's steps next to their measurements, by component.

A step is predicted as in a plan, with two measured inputs: the times of communication calls come
from the fits of collectives, and the compute time from the measured step itself. If compute is
simulated, its time is that of the parameter ``compute``. A comparison therefore tests the rules by
which compute and calls add up to a step. The host's idle time is not predicted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from parbench.bench.results.details import (
    STATE_COMPONENTS,
    ComponentCheck,
    StepCheck,
    Validation,
)
from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.metrics import MetricValue, merge_metrics
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Document, Row, Section, SortedText, Table
from parbench.bench.text import UserError
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.communication_pattern import list_busiest_calls
from parbench.workloads.costs.memory import RankMemory, compute_rank_memory
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.planner.dry_run import DryRun, dry_run, place_call
from parbench.workloads.planner.hardware import OVERLAP, Efficiency, Hardware
from parbench.workloads.planner.hardware import PRESETS as HARDWARE
from parbench.workloads.planner.link_time import (
    Curve,
    fit_curves_of_run,
    list_extrapolations,
    make_curve_predictor,
)
from parbench.workloads.planner.report.columns import make_column
from parbench.workloads.presets import PRESETS

Metrics = Mapping[str, MetricValue]
"""The measured values of a training step, by name of the metric."""
_DEFINITIONS = {definition.name: definition for definition in DEFINITIONS}
"""The declarations of all training steps that can be measured, by name such as workload.fsdp."""


def validate(run: Run, fits: Run | None = None) -> Validation:
    """Compare the training steps of a run with their predictions, and return the comparison.

    The times of communication calls are predicted from the collectives that the run ``fits``
    measured, or from those of ``run`` if it is None. Raises ``UserError`` if the run has no
    training step, or if too few sizes of collectives were measured.
    """
    fits = fits or run
    records_by_case: dict[str, list[Record]] = {}
    for record in run.records:
        if record.case.name.startswith("workload."):
            records_by_case.setdefault(record.case.id, []).append(record)
    if not records_by_case:
        raise UserError(f"{run.path} has no training step. Measure some: parbench run")
    curves = fit_curves_of_run(fits)
    if not curves:
        raise UserError(
            f"{fits.path} has no collective with three sizes, from which the times of "
            "communication are predicted. Measure one: parbench run all_reduce --sizes 64K,1M,16M, "
            "and add --links latest"
        )
    rows: list[StepCheck] = []
    left_out: dict[str, str] = {}
    for records in records_by_case.values():
        try:
            rows.append(_check_step(records, curves))
        except UserError as error:
            left_out[records[0].case.label] = str(error)
    return Validation(run=run.info.id, fits=fits.info.id, rows=rows, left_out=left_out)


def _check_step(records: Sequence[Record], curves: Sequence[Curve]) -> StepCheck:
    """Predict a training step, and return the prediction next to the measurement, by component.

    ``records`` has one record for each repetition of the same training step. ``curves`` are the
    fits that predict the seconds of communication calls. Raises ``UserError`` if the step was not
    measured or cannot be predicted.
    """
    measured = [record for record in records if record.status == "ok"]
    if not measured:
        raise UserError(records[0].reason or records[0].status)
    case, world = measured[0].case, measured[0].world
    metrics = merge_metrics([record.metrics for record in measured])
    spec = build_spec_of_record(measured[0])
    declared = get_declared_compute(spec)
    compute = get_value(metrics, "compute") if declared is None else declared
    if compute is None:
        raise UserError("its compute time was not measured")
    hardware = describe_machine(world, spec)
    run = dry_run(spec, hardware, seconds=make_curve_predictor(curves), compute_seconds=compute)
    calls = [place_call(call, hardware, spec) for call in list_busiest_calls(spec.distinct_views)]
    return StepCheck(
        case=case.id,
        label=case.label,
        ranks=world.size,
        compute="measured" if declared is None else "declared",
        components=list(_list_components(run, metrics)),
        notes=list(list_extrapolations(calls, curves)),
    )


def get_declared_compute(spec: StepSpec) -> float | None:
    """Return the seconds of simulated compute per step, None if a step computes for real.

    A microbatch takes (2 + ``spec.forward_passes``) T, where T is ``spec.simulated_seconds``, the
    seconds of a forward pass without recomputation.
    """
    if spec.simulated_seconds is None:
        return None
    return (2 + spec.forward_passes) * spec.simulated_seconds * spec.microbatches


def describe_machine(world: WorldInfo, spec: StepSpec) -> Hardware:
    """Return the hardware for the prediction of a measured step: its nodes, and assumed overlap.

    ``world`` has the numbers of ranks and nodes on which the step ``spec`` was measured. Compute
    and links are those of an H100, but measured times replace them. The fractions of communication
    that compute can hide are those that a plan assumes. On gloo, without ``spec.prefetch``, compute
    hides nothing of FSDP's communication.
    """
    overlap = dict(OVERLAP)
    if world.backend == "gloo" and not spec.prefetch:
        overlap |= {"fsdp": 0.0, "efsdp": 0.0}
    return replace(
        HARDWARE["h100"],
        gpus_per_node=-(-world.size // max(1, world.nodes)),
        efficiency=Efficiency(overlap=overlap),
    )


def predict_torch_memory(view: RankView) -> RankMemory:
    """Return the predicted memory of a rank in a step with tensor parallelism by torch's DTensor.

    A plan predicts the memory of Megatron's tensor parallelism (``compute_rank_memory``). With sequence
    parallelism, Megatron saves a rank's part of the tokens as the input of each block and of the
    head, and gathers the others again in the backward pass. DTensor saves the tokens of all ``tp``
    ranks, so that it has more activations.
    """
    spec, memory = view.spec, compute_rank_memory(view)
    blocks = 0
    if spec.checkpointing == "none":
        # A mixture of experts is not split.
        blocks = view.layers + (view.layers if spec.moe is None else spec.moe.dense_layers)
    inputs = blocks * view.microbatches_in_flight + view.has_head * view.logits_in_flight
    tokens = inputs * (spec.local_tokens - spec.sharded_tokens)
    gathered = tokens * spec.shape.hidden * spec.bytes_per_element
    return replace_fields(memory, activations=memory.activations + gathered)


def get_value(metrics: Metrics, name: str) -> float | None:
    """Return the value of a metric, None if the metric is missing or its value is unknown."""
    return metrics[name].value if name in metrics else None


def _list_components(run: DryRun, metrics: Metrics) -> Iterator[ComponentCheck]:
    """Yield each predicted quantity of a step (a component) together with its measurement.

    The components are the step time, exposed and total seconds of communication by axis, bytes sent
    by axis, and the memory of state and activations. Bytes and memory are the maximum over ranks.
    Messages of a pipeline are not exposed but part of its bubble, so that ``pp`` has no exposed
    seconds. ``metrics`` has the measurements by name.
    """
    yield _check("step_time", run.seconds, "s", metrics.get("step_time"))
    for axis in run.axes:
        if axis.name != "pp":
            measured = metrics.get(f"exposed_comm.{axis.name}")
            yield _check(f"exposed.{axis.name}", axis.exposed_seconds, "s", measured)
    for axis in run.axes:
        measured = metrics.get(f"comm_transfer.{axis.name}")
        yield _check(f"comm.{axis.name}", axis.seconds, "s", measured)
    for axis in run.axes:
        measured = metrics.get(f"bytes_sent.{axis.name}")
        yield _check(f"bytes.{axis.name}", axis.sent_bytes, "B", measured)
    memories = [predict_torch_memory(view) for view in run.spec.distinct_views]
    for name in (*STATE_COMPONENTS, "activations"):
        # The measured activations of a peak also include tensors that backward does not need.
        source = "memory_counted" if name == "activations" else "memory"
        num_bytes = max(getattr(memory, name) for memory in memories)
        yield _check(f"{source}.{name}", num_bytes, "B", metrics.get(f"{source}.{name}"))


def _check(name: str, predicted: float, unit: str, metric: MetricValue | None) -> ComponentCheck:
    """Return one component of a step: its predicted and its measured value.

    ``name`` is the component, such as ``memory.gradients``, ``unit`` that of ``predicted``, and
    ``metric`` the measurement, None if there is none.
    """
    measured = metric or MetricValue(value=None, unit=unit)
    return ComponentCheck(name=name, predicted=predicted, measured=measured)


def build_spec_of_record(record: Record) -> StepSpec:
    """Return the description of the training step that a record measured.

    Raises ``UserError`` with the reason if the record is not of a training step of parbench, or if
    its experts take numbers of tokens for which no formula exists.
    """
    name, ranks = record.case.short_name, record.world.size
    preset, definition = PRESETS.get(name), _DEFINITIONS.get(record.case.name)
    if preset is None or definition is None:
        raise UserError(f"{name} is not a training step of parbench")
    spec = preset(definition.complete(record.case.params), ranks)
    moe = spec.moe
    if moe is None:
        return spec
    if moe.routing != BALANCED:
        reason = "only balanced routing has a formula"
        raise UserError(f"{name}: routing = {moe.routing}: {reason}")
    if moe.variant != "all_to_all" or moe.capacity:
        options = f"variant = {moe.variant}, capacity = {moe.capacity:g}"
        reason = "only all_to_all without capacity has a formula"
        raise UserError(f"{name}: {options}: {reason}")
    return spec


def make_validation_document(validation: Validation) -> Document:
    """Return the printable document of a validation, whose table has a row per step and component.

    Its notes name the calls whose times are extrapolated from the fits, and the steps that were not
    compared, with the reason.
    """
    rows: list[Row] = []
    notes = [
        "Idle time of the host is not predicted. Activations are counted: the tensors that are "
        "saved for backward. The measured peak also has other tensors."
    ]
    for step in validation.rows:
        rows += [_make_row(step, component) for component in step.components]
        notes += [f"{step.label}: {note}." for note in step.notes]
    notes += [f"{label} is left out: {reason}." for label, reason in validation.left_out.items()]
    table = Table(
        "components",
        "Predictions and measurements",
        columns=[
            make_column("step"),
            make_column("component"),
            make_column("predicted", kind="number"),
            make_column("measured", kind="number"),
            make_column("error", description="predicted over measured, less 1"),
        ],
        rows=rows,
        notes=list(dict.fromkeys(notes)),
    )
    return Document(
        name=f"validation of {validation.run}",
        heading=f"{validation.run}, predicted from the fits of {validation.fits}",
        sections=[Section("validation", "Validation", tables=[table])],
        status="COMPARED",
    )


def _make_row(step: StepCheck, component: ComponentCheck) -> Row:
    """Return the table row of one component of a step, with the prediction's relative error."""
    unit = component.measured.unit
    predicted = format_quantity(component.predicted, unit)
    measured = format_quantity(component.measured.value, unit)
    return {
        "step": step.label,
        "component": component.name,
        "predicted": SortedText(predicted, component.predicted),
        "measured": SortedText(measured, component.measured.value),
        "error": component.error_text,
    }
