"""The facts from which findings are derived (evidence), read from the records of a run."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from statistics import fmean

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.formatting import format_case_size
from parbench.reports.analysis.case_results import CaseResult, group_results
from parbench.reports.analysis.fits import OperationCurve
from parbench.reports.analysis.labels import label_communication, label_operation
from parbench.reports.analysis.steps import (
    find_details,
    get_axis_values,
    get_calls,
    get_profiled_seconds,
)
from parbench.reports.analysis.stragglers import find_delaying_rank, find_last_arriving_rank
from parbench.reports.findings.commands import build_case_command, build_step_command
from parbench.reports.findings.rules import (
    CollectedEvidence,
    FitComparison,
    Rates,
    StragglerEvidence,
    compare_with_fit,
)
from parbench.reports.findings.step_rules import (
    REDUCTIONS,
    Communication,
    PipelineIdle,
    StepEvidence,
)
from parbench.reports.run_data import RunData

UNEQUAL_WORK_DETAILS = {"pipeline", "tokens_per_rank", "rank_load"}
"""The keys in ``CaseResult.details`` that only steps with unequal work on ranks have."""
LINK_PARAMS = ("source", "target")
"""The parameters of ``p2p.matrix`` that name the sending and the receiving rank."""
PIPELINE_AXIS = "pp"
SHARDED_AXIS = "fsdp"


def collect_evidence(data: RunData) -> CollectedEvidence:
    """Collect the evidence for findings from the records and traces of a run."""
    steps = (_make_step_evidence(data, result) for result in data.steps)
    comparisons = [item for curve in data.curves for item in _compare_outliers(data, curve)]
    return CollectedEvidence(
        steps=[step for step in steps if step is not None],
        stragglers=list(_find_stragglers(data)),
        rates=[*_collect_link_rates(data), *_collect_group_rates(data)],
        comparisons=comparisons,
    )


def _find_stragglers(data: RunData) -> Iterator[StragglerEvidence]:
    """Yield the rank of a run that arrives last, then the rank that delays each step.

    Cases whose ranks have unequal work by design, such as pipelines, are left out.
    """
    results = [
        result for result in data.measured if not result.details.keys() & UNEQUAL_WORK_DETAILS
    ]
    late = find_last_arriving_rank(results)
    if late:
        yield StragglerEvidence(
            rank=late.rank,
            observation=f"arrives last in {late.describe_repetitions()}",
            waited_seconds=late.seconds,
            waited_share=late.time_share,
            command=_build_doctor_command(data, late.rank),
        )
    for result in results:
        wait_seconds = result.value("straggler_wait") or 0.0
        straggler = find_delaying_rank(data.run, result) if wait_seconds else None
        if straggler and result.seconds:
            yield StragglerEvidence(
                rank=straggler.rank,
                observation=f"computes or is idle {straggler.time_share:.2f} times as long as the "
                f"others in {straggler.describe_repetitions()} of {data.labels[result.case.id]}",
                waited_seconds=wait_seconds,
                waited_share=wait_seconds / result.seconds,
                command=_build_doctor_command(data, straggler.rank),
            )


def _build_doctor_command(data: RunData, rank: int) -> str:
    """Return the ``parbench doctor`` command that examines the host of a rank."""
    if data.nodes is None:
        return "parbench doctor"
    return f"srun --nodelist {data.nodes.get_host(rank)} parbench doctor"


def _collect_link_rates(data: RunData) -> Iterator[Rates]:
    """Yield sets of bus bandwidths of links (``p2p.matrix``) that are equal if no link is slow.

    Each network distance, such as ``same host``, gives two sets. In one, bandwidths are grouped by
    pair of ranks (``link from rank 0 to 1``). In the other, they are grouped by rank (``links of
    rank 0``).
    """
    known = [result for result in data.measured if result.value("busbw")]
    links = [result for result in known if result.case.name == "p2p.matrix"]
    for results in group_results(links, *LINK_PARAMS):
        sizes = format_case_size(results[0].size_bytes)
        command = "parbench slurm screen"
        if data.nodes is None:
            case = results[0].case
            command = build_case_command(
                case, data.run, sizes=sizes, without=LINK_PARAMS, repetitions=5
            )
        ranks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        pairs: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for result in results:
            source, target = (int(result.case.params[name]) for name in LINK_PARAMS)
            distance = data.nodes.get_distance(source, target) if data.nodes else "same host"
            rates = _list_bandwidths(result)
            pairs[distance][f"link from rank {source} to {target}"] = rates
            for rank in (source, target):
                ranks[distance][f"links of rank {rank}"] += rates
        for distance, by_name in (*ranks.items(), *pairs.items()):
            yield Rates(kind="slow-link", scope=distance, by_name=by_name, command=command)


def _collect_group_rates(data: RunData) -> Iterator[Rates]:
    """Yield sets of bus bandwidths of process groups that are equal if no group is slow.

    A set has the bandwidths of the groups that ran one operation at one size, one group after the
    other. Groups that ran at the same time are left out.
    """
    groups = [
        result
        for result in data.measured
        if result.value("busbw")
        and "group" in result.case.params
        and not result.case.params.get("concurrent")
    ]
    for results in group_results(groups, "group_index"):
        case = results[0].case
        sizes = format_case_size(results[0].size_bytes)
        by_name = {}
        for result in results:
            params = result.case.params
            ranks = result.details.get("group_ranks") or [params.get("group_index", 0)]
            name = f"group {params['group']} {','.join(map(str, ranks))}"
            by_name[name] = _list_bandwidths(result)
        yield Rates(
            kind="slow-group",
            scope=f"{label_operation(case, ('group', 'group_index'))} {sizes}",
            by_name=by_name,
            command=build_case_command(case, data.run, sizes=sizes, without=("group_index",)),
        )


def _list_bandwidths(result: CaseResult) -> list[float]:
    """Return the bus bandwidth of a case in each repetition in B/s, in repetition order."""
    return list(result.by_repetition("busbw").values())


def _compare_outliers(data: RunData, curve: OperationCurve) -> Iterator[FitComparison]:
    """Yield the comparison of measured and fitted time for each size that is an outlier of a fit.

    ``curve`` is the fit of one operation's time over size, with the results of its cases.
    """
    outliers = {size for size, _ in curve.fit.outliers}
    for result in curve.rows:
        size = result.size_bytes
        times = list(result.by_repetition("time").values())
        if size in outliers and times:
            sizes = f"{format_case_size(size // 4)}:{format_case_size(4 * size)}:x2"
            yield from compare_with_fit(
                label_communication(result.case),
                [curve.fit.predict(size)] * len(times),
                times,
                total_seconds=sum(row.seconds or 0.0 for row in curve.rows),
                affected_seconds=fmean(times),
                command=build_case_command(result.case, data.run, sizes=sizes),
            )


def _make_step_evidence(data: RunData, step: CaseResult) -> StepEvidence | None:
    """Return the facts on a training step from which findings are derived.

    None if the time of the step is unknown. ``step`` is the result of its case. Communication and
    idle time of a pipeline are known only if a step was profiled.
    """
    profiled_seconds = get_profiled_seconds(step)
    seconds = profiled_seconds or step.seconds
    if not seconds:
        return None
    params = step.case.all_params
    label = data.labels[step.case.id]
    has_real_compute = params.get("compute", "real") == "real"
    ratios = get_axis_values(step, "bytes_ratio")
    return StepEvidence(
        name=label,
        seconds=seconds,
        command=partial(build_step_command, step.case, data.run),
        settings=params,
        communication=list(_list_communication(step, label)) if profiled_seconds else (),
        copy_seconds=step.value("exposed_copy") or 0.0,
        idle_seconds=(step.value("idle") or 0.0) if has_real_compute else 0.0,
        syncs=_count_syncs(step),
        pipeline=_read_pipeline_idle(step) if profiled_seconds else None,
        expert_imbalance=step.value("imbalance.rank") or 1.0,
        bytes_ratios={axis: ratio for axis, ratio in ratios.items() if ratio},
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
        transfer_seconds = step.value(f"comm_transfer.{axis}") or seconds
        yield Communication(
            label=f"{label} (axis {axis})",
            exposed_seconds=seconds,
            is_waiting=transfer_seconds < seconds / 2,
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
    """Return the idle time of a pipeline step by cause, None if the step is not a pipeline.

    The bubble includes the time of messages. If ranks share cores, it is the exposed time of
    messages, because causes are unknown.
    """
    _, details = find_details(step, PipelineDetails)
    if details is None:
        return None
    bubble_seconds = step.value("idle_schedule")
    if bubble_seconds is None:
        bubble_seconds = step.value(f"exposed_comm.{PIPELINE_AXIS}") or 0.0
    else:
        bubble_seconds += step.value("idle_rest") or 0.0
    return PipelineIdle(
        bubble_seconds=bubble_seconds,
        uneven_seconds=_get_significant(step, "idle_imbalance"),
        microbatches=details.microbatches,
        layers_by_stage=details.layers_by_stage or (),
    )


def _get_significant(step: CaseResult, name: str) -> float:
    """Return the value of a step's metric if its 95 % interval is above 0, otherwise 0.

    The interval is over repetitions, or over the steps of the repetition if there is only one. The
    value of a metric without an interval is returned, and 0 for an unknown metric. ``name`` is the
    name of the metric.
    """
    metrics = step.measured[0].metrics if len(step.measured) == 1 else step.metrics
    metric = metrics.get(name)
    if metric is None or metric.value is None:
        return 0.0
    is_significant = metric.low is None or metric.low > 0
    return metric.value if is_significant else 0.0
