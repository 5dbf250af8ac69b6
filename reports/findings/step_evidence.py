"""Evidence about the training steps of a run."""

from parbench.bench.results.details import CountedCall, PipelineDetails, read_details
from parbench.reports.case_results import CaseResult
from parbench.reports.findings.commands import CaseStepCommand
from parbench.reports.findings.evidence import (
    Communication,
    ExpertLoad,
    PipelineIdle,
    StepEvidence,
    StragglerEvidence,
)
from parbench.reports.findings.step_rules import REDUCTIONS
from parbench.reports.run_data import RunData
from parbench.reports.tables.step_communication import get_calls
from parbench.reports.tables.step_parts import get_axis_values, get_profiled_seconds
from parbench.reports.timelines import find_slow_computing_rank

UNEQUAL_WORK_DETAILS = {"pipeline", "attention_bytes", "expert_load"}
"""The details of steps whose ranks have different work by design."""
MIN_READ_WAIT_SHARE = 0.01
"""The share of waiting from which the traces of a step are searched for a slow rank."""
PIPELINE_AXIS = "pp"
SHARDED_AXIS = "fsdp"


def make_step_evidence(data: RunData, result: CaseResult) -> StepEvidence | None:
    """Return the evidence about a step, None if its time is unknown.

    The parts of the step are known only if a step was profiled.
    """
    profiled_seconds = get_profiled_seconds(result)
    seconds = profiled_seconds or result.seconds
    if not seconds:
        return None
    params = result.case.all_params
    has_real_compute = params.get("compute", "real") == "real"
    name = data.labels[result.case.id]
    return StepEvidence(
        name=name,
        id=result.case.id,
        seconds=seconds,
        num_observations=result.repetitions,
        command=CaseStepCommand(result.case, data.run),
        settings=params,
        communication=_list_communication(result, name) if profiled_seconds else (),
        overlap=result.value("overlap"),
        copy_seconds=result.value("exposed_copy") or 0.0,
        idle_seconds=(result.value("idle") or 0.0) if has_real_compute else 0.0,
        syncs_per_step=_count_syncs(result),
        pipeline=_read_pipeline_idle(result) if profiled_seconds else None,
        experts=_read_expert_load(result),
        straggler=_find_slow_rank(data, result, name),
        bytes_ratios=_read_bytes_ratios(result),
    )


def has_equal_work(result: CaseResult) -> bool:
    """Return whether all ranks of a case have the same work by design."""
    return not result.details.keys() & UNEQUAL_WORK_DETAILS


def build_doctor_command(data: RunData, rank: int) -> str:
    """Return the command that examines the host of a rank."""
    if data.nodes is None:
        return "parbench doctor"
    return f"srun --nodelist {data.nodes.get_host(rank)} parbench doctor"


def _list_communication(result: CaseResult, name: str) -> list[Communication]:
    """Return the exposed communication of each axis except that of pipeline stages."""
    params = result.case.all_params
    calls = get_calls(result) or ()
    communication = []
    for axis, seconds in get_axis_values(result, "exposed_comm").items():
        if axis == PIPELINE_AXIS or seconds is None:
            continue
        own_calls = [call for call in calls if call.axis == axis]
        reductions = [call for call in own_calls if call.op in REDUCTIONS]
        calls_per_sum = None
        if reductions and (result.case.is_custom or "bucket_mb" in params):
            calls_per_sum = _count(reductions) / _count_syncs(result)
        is_prefetched = None
        if axis == SHARDED_AXIS and "prefetch" in params:
            is_prefetched = params["prefetch"] != "default"
        part = Communication(
            label=f"{name} (axis {axis})",
            ops=frozenset(call.op for call in own_calls),
            exposed_seconds=seconds,
            calls_per_sum=calls_per_sum,
            largest_bytes=max((call.num_bytes for call in reductions), default=None),
            is_prefetched=is_prefetched,
        )
        communication.append(part)
    return communication


def _count(calls: list[CountedCall]) -> int:
    return sum(call.count for call in calls)


def _count_syncs(result: CaseResult) -> int:
    """Return how often a step sums gradients: once, or for every microbatch."""
    params = result.case.all_params
    microbatches = params.get("microbatches")
    if params.get("no_sync") is False and isinstance(microbatches, int):
        return microbatches
    return 1


def _read_pipeline_idle(result: CaseResult) -> PipelineIdle | None:
    details = [read_details(record, PipelineDetails) for record in result.measured]
    pipelines = [detail for detail in details if isinstance(detail, PipelineDetails)]
    if not pipelines:
        return None
    imbalance = result.metrics.get("idle_imbalance")
    uneven_seconds = 0.0
    if imbalance and imbalance.value and (imbalance.low is None or imbalance.low > 0):
        uneven_seconds = imbalance.value
    return PipelineIdle(
        bubble_seconds=result.value("idle_schedule") or 0.0,
        uneven_seconds=uneven_seconds,
        message_seconds=result.value("idle_p2p") or 0.0,
        ranks=pipelines[0].ranks,
        microbatches=pipelines[0].microbatches,
        layers_by_stage=pipelines[0].layers_by_stage or (),
    )


def _read_expert_load(result: CaseResult) -> ExpertLoad | None:
    slowdown = result.metrics.get("imbalance_slowdown")
    if slowdown is None or not slowdown.value:
        return None
    is_significant = slowdown.low is None or slowdown.low > 1
    return ExpertLoad(
        slowdown=slowdown.value if is_significant else 1.0,
        max_rank_load=result.value("imbalance.rank"),
        has_capacity=result.case.all_params.get("capacity") != 0,
    )


def _find_slow_rank(data: RunData, result: CaseResult, name: str) -> StragglerEvidence | None:
    """Return the rank that computes longest in the traces of a step for which ranks wait."""
    wait_seconds = result.value("straggler_wait") or 0.0
    seconds = result.seconds
    if not seconds or wait_seconds < MIN_READ_WAIT_SHARE * seconds or not has_equal_work(result):
        return None
    straggler = find_slow_computing_rank(data.run, result)
    if straggler is None:
        return None
    return StragglerEvidence(
        rank=straggler.rank,
        observation="computes longest",
        where=f"in {straggler.repetition_share} of {name}",
        waited_seconds=wait_seconds,
        waited_share=wait_seconds / seconds,
        compute_ratio=straggler.time_share,
        command=build_doctor_command(data, straggler.rank),
    )


def _read_bytes_ratios(result: CaseResult) -> dict[str, float]:
    """Return the sent bytes over the expected bytes of each axis."""
    ratios = get_axis_values(result, "bytes_ratio")
    return {axis: ratio for axis, ratio in ratios.items() if ratio}
