"""The facts from which findings are derived (evidence), read from the records of a run."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

from parbench.bench.results.details import PipelineDetails
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.steps import (
    find_details,
    get_axis_values,
    get_calls,
    get_profiled_seconds,
)
from parbench.reports.analysis.stragglers import (
    Straggler,
    find_last_arriving_rank,
    find_last_finishing_rank,
)
from parbench.reports.analysis.timelines import find_slow_computing_rank
from parbench.reports.findings.commands import build_step_command
from parbench.reports.findings.communication_evidence import collect_rates, compare_operations
from parbench.reports.findings.evidence import (
    CollectedEvidence,
    Communication,
    PipelineIdle,
    StepEvidence,
    StragglerEvidence,
)
from parbench.reports.run_data import RunData

UNEQUAL_WORK_DETAILS = {"pipeline", "crossover_ranks", "expert_load"}
"""The keys of details that only steps with unequal work on ranks have."""
MIN_READ_SHARE = 0.01
"""Traces of a step are searched for a slow rank from this fraction of waiting time."""

REDUCTIONS = ("all_reduce", "reduce_scatter")
"""The operations that sum gradients."""
PIPELINE_AXIS = "pp"
SHARDED_AXIS = "fsdp"


def collect_evidence(data: RunData) -> CollectedEvidence:
    """Collect the evidence for findings from the records and traces of a run."""
    steps = (_make_step_evidence(data, result) for result in data.steps)
    return CollectedEvidence(
        steps=[step for step in steps if step is not None],
        stragglers=list(_find_stragglers(data)),
        rates=list(collect_rates(data)),
        comparisons=list(compare_operations(data)),
        bus_bandwidths={
            data.labels[result.case.id]: result.value("busbw") or 0.0
            for result in data.communication
        },
        link_bytes_per_second=data.plan.link_bytes_per_second,
    )


def _find_stragglers(data: RunData) -> Iterator[StragglerEvidence]:
    """Yield the ranks that arrive last, finish last, or compute longest.

    Cases whose ranks have unequal work by design, such as pipelines, are left out.
    """
    results = [
        result for result in data.measured if not result.details.keys() & UNEQUAL_WORK_DETAILS
    ]
    late = find_last_arriving_rank(results)
    if late:
        yield _convert_straggler(data, late, "arrives last")
    slow = find_last_finishing_rank(data.run, results)
    if slow:
        yield _convert_straggler(data, slow, "finishes last")
    for result in results:
        if not result.is_communication:
            yield from _find_slow_rank(data, result)


def _convert_straggler(
    data: RunData, straggler: Straggler, observation: Literal["arrives last", "finishes last"]
) -> StragglerEvidence:
    """Return the facts on a late rank for findings, with the command that examines its host.

    ``observation`` is the reason for which the rank counts as slow.
    """
    return StragglerEvidence(
        rank=straggler.rank,
        observation=observation,
        occasions=f"in {straggler.describe_repetitions()}",
        waited_seconds=straggler.seconds,
        waited_share=straggler.time_share,
        command=_build_doctor_command(data, straggler.rank),
    )


def _find_slow_rank(data: RunData, step: CaseResult) -> Iterator[StragglerEvidence]:
    """Yield the rank that computes longest in the traces of a step, if other ranks wait for it."""
    wait_seconds = step.value("straggler_wait") or 0.0
    if not step.seconds or wait_seconds < MIN_READ_SHARE * step.seconds:
        return
    straggler = find_slow_computing_rank(data.run, step)
    if straggler:
        yield StragglerEvidence(
            rank=straggler.rank,
            observation="computes longest",
            occasions=f"in {straggler.describe_repetitions()} of {data.labels[step.case.id]}",
            waited_seconds=wait_seconds,
            waited_share=wait_seconds / step.seconds,
            compute_ratio=straggler.time_share,
            command=_build_doctor_command(data, straggler.rank),
        )


def _build_doctor_command(data: RunData, rank: int) -> str:
    """Return the ``parbench doctor`` command that examines the host of a rank."""
    if data.nodes is None:
        return "parbench doctor"
    return f"srun --nodelist {data.nodes.get_host(rank)} parbench doctor"


def _make_step_evidence(data: RunData, step: CaseResult) -> StepEvidence | None:
    """Return the facts on a training step from which findings are derived, None without its time.

    ``step`` is the result of its case. Communication and idle time of a pipeline are known only if
    a step was profiled.
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
    by_phase = {
        part: {phase: seconds or 0.0 for phase, seconds in get_axis_values(step, part).items()}
        for part in ("phase_time", "phase_exposed", "phase_idle")
    }
    return StepEvidence(
        name=label,
        id=step.case.id,
        seconds=seconds,
        num_observations=step.repetitions,
        command=partial(build_step_command, step.case, data.run),
        settings=params,
        communication=list(_list_communication(step, label)) if profiled_seconds else (),
        copy_seconds=step.value("exposed_copy") or 0.0,
        idle_seconds=(step.value("idle") or 0.0) if has_real_compute else 0.0,
        syncs=_count_syncs(step),
        pipeline=_read_pipeline_idle(step) if profiled_seconds else None,
        expert_imbalance_seconds=(1 - 1 / slowdown) * seconds,
        max_expert_load=step.value("imbalance.rank"),
        bytes_ratios={axis: ratio for axis, ratio in ratios.items() if ratio},
        phase_seconds=by_phase["phase_time"],
        exposed_by_phase=by_phase["phase_exposed"],
        idle_by_phase=by_phase["phase_idle"],
    )


def _list_communication(step: CaseResult, label: str) -> Iterator[Communication]:
    """Yield the exposed communication of a step on each mesh axis, without the pipeline axis.

    ``label`` is the label of the case.
    """
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
    """Return the number of times that a step sums all gradients: once, or once per microbatch."""
    params = step.case.all_params
    microbatches = params.get("microbatches")
    if params.get("no_sync") is False and isinstance(microbatches, int):
        return microbatches
    return 1


def _read_pipeline_idle(step: CaseResult) -> PipelineIdle | None:
    """Return the idle time of a pipeline step by cause, None if the step is not a pipeline."""
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
    """Return a metric whose 95 % interval is above a threshold, otherwise 0.

    ``threshold`` is the value without an effect. A metric without an interval counts as
    significant. An unknown metric is 0.
    """
    metric = step.metrics.get(name)
    if metric is None or metric.value is None:
        return 0.0
    is_significant = metric.low is None or metric.low > threshold
    return metric.value if is_significant else 0.0
