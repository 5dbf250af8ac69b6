"""Evidence about the training steps of a run."""

from collections.abc import Iterator

from parbench.bench.results.details import PipelineDetails
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.steps import (
    find_details,
    get_axis_values,
    get_calls,
    get_profiled_seconds,
)
from parbench.reports.findings.commands import CaseStepCommand
from parbench.reports.findings.evidence import Communication, PipelineIdle, StepEvidence
from parbench.reports.run_data import RunData

REDUCTIONS = ("all_reduce", "reduce_scatter")
PIPELINE_AXIS = "pp"
SHARDED_AXIS = "fsdp"


def make_step_evidence(data: RunData, step: CaseResult) -> StepEvidence | None:
    """Return the evidence about a step, None if its time is unknown.

    The parts of a step are known only if a step was profiled.
    """
    profiled_seconds = get_profiled_seconds(step)
    seconds = profiled_seconds or step.seconds
    if not seconds:
        return None
    params = step.case.all_params
    label = data.labels[step.case.id]
    has_real_compute = params.get("compute", "real") == "real"
    slowdown = _get_significant(step, "imbalance_slowdown", 1.0) or 1.0
    ratios = get_axis_values(step, "bytes_ratio")
    return StepEvidence(
        name=label,
        id=step.case.id,
        seconds=seconds,
        num_observations=step.repetitions,
        command=CaseStepCommand(step.case, data.run),
        settings=params,
        communication=list(_list_communication(step, label)) if profiled_seconds else (),
        copy_seconds=step.value("exposed_copy") or 0.0,
        idle_seconds=(step.value("idle") or 0.0) if has_real_compute else 0.0,
        syncs=_count_syncs(step),
        pipeline=_read_pipeline_idle(step) if profiled_seconds else None,
        expert_imbalance_seconds=(1 - 1 / slowdown) * seconds,
        max_expert_load=step.value("imbalance.rank"),
        bytes_ratios={axis: ratio for axis, ratio in ratios.items() if ratio},
    )


def _list_communication(step: CaseResult, label: str) -> Iterator[Communication]:
    """Yield the exposed communication of each axis except that of pipeline stages."""
    params = step.case.all_params
    calls = get_calls(step) or ()
    for axis, seconds in get_axis_values(step, "exposed_comm").items():
        if axis == PIPELINE_AXIS or seconds is None:
            continue
        reductions = [call for call in calls if call.axis == axis and call.op in REDUCTIONS]
        syncs = _count_syncs(step)
        yield Communication(
            label=f"{label} (axis {axis})",
            exposed_seconds=seconds,
            hideable_seconds=seconds,
            reductions=sum(call.count for call in reductions) / syncs,
            reduced_bytes=sum(call.count * call.num_bytes for call in reductions) / syncs,
            has_buckets=step.case.is_custom or "bucket_mb" in params,
            largest_bytes=max((call.num_bytes for call in reductions), default=0),
            is_on_demand=axis == SHARDED_AXIS and params.get("prefetch") == "default",
        )


def _count_syncs(step: CaseResult) -> int:
    """Return the number of gradient sums per step: one, or one per microbatch."""
    params = step.case.all_params
    microbatches = params.get("microbatches")
    if params.get("no_sync") is False and isinstance(microbatches, int):
        return microbatches
    return 1


def _read_pipeline_idle(step: CaseResult) -> PipelineIdle | None:
    _, details = find_details(step, PipelineDetails)
    if isinstance(details, str):
        return None
    return PipelineIdle(
        bubble_seconds=step.value("idle_schedule") or 0.0,
        uneven_seconds=_get_significant(step, "idle_imbalance", 0.0),
        message_seconds=step.value("idle_p2p") or 0.0,
        ranks=details.ranks,
        microbatches=details.microbatches,
        layers_by_stage=details.layers_by_stage or (),
    )


def _get_significant(step: CaseResult, name: str, threshold: float) -> float:
    """Return a metric, 0 if it is unknown or its 95 % interval reaches below the threshold."""
    metric = step.metrics.get(name)
    if metric is None or metric.value is None:
        return 0.0
    is_significant = metric.low is None or metric.low > threshold
    return metric.value if is_significant else 0.0
