"""Evidence for findings from the traces of a job."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

from parbench.bench.results.formatting import format_case_size, format_percent
from parbench.bench.results.spans import difference, gaps, intersection, length
from parbench.reports.findings.commands import build_command
from parbench.reports.findings.evidence import (
    Communication,
    Evidence,
    PipelineIdle,
    StepEvidence,
    StragglerEvidence,
    TimeComparison,
)
from parbench.reports.traces.job import (
    Call,
    RankStep,
    RankSteps,
    SharedCall,
    TracedJob,
    compute_waits,
)

PredictSeconds = Callable[[SharedCall], float | None]
"""Returns the time of a collective by the fits of a run, None if there is no such fit."""

GATHERS = {"all_gather"}
MIN_HOST_GAP_SECONDS = 1e-3
"""Shorter gaps between operators on a host are the time of Python itself."""
PIPELINE_GROUP = re.compile(r"(^|[^a-z])(pp|pipe[a-z]*)([^a-z]|$)", re.IGNORECASE)
"""The names of process groups of pipelines: ``mesh_pp``, ``PIPELINE_MODEL_PARALLEL_GROUP``."""


def collect_evidence(
    job: TracedJob, predict: PredictSeconds | None = None, run_name: str = ""
) -> Evidence:
    """Return the evidence of a job, compared with the fits of a run if they are given."""
    exposed = compute_exposed_seconds(job)
    pipeline_labels = _find_pipeline_labels(job)
    idlest = min(job.ranks, key=_compute_idle_seconds)
    step = StepEvidence(
        name="the job",
        id="traces",
        seconds=job.step_seconds,
        num_observations=job.num_steps,
        communication=[
            _make_communication(label, rank, seconds)
            for label, (rank, seconds) in exposed.items()
            if label not in pipeline_labels
        ],
        overlap=idlest.steps[idlest.median_step].parts.overlap,
        copy_seconds=min(
            rank.compute_median(lambda parts: parts.copy_seconds) for rank in job.ranks
        ),
        idle_seconds=_compute_idle_seconds(idlest),
        longest_gap_seconds=max(_list_gaps(idlest, idlest.median_step), default=None),
        pipeline=_measure_pipeline(job, [exposed[label][1] for label in pipeline_labels]),
        straggler=_find_straggler(job),
    )
    fits = []
    if predict is not None:
        fits = list(_compare_with_fits(job, predict, run_name))
    return Evidence(steps=[step], fits=fits)


def compute_exposed_seconds(job: TracedJob) -> dict[str, tuple[RankSteps, float]]:
    """Return for each kind of call the rank on which it is exposed least, and the time per step.

    The least exposed rank is the one that waits least for the others.
    """
    exposed: dict[str, tuple[RankSteps, float]] = {}
    for rank in job.ranks:
        for label, by_step in _compute_exposed_of_rank(rank).items():
            seconds = median(by_step)
            if label not in exposed or seconds < exposed[label][1]:
                exposed[label] = rank, seconds
    return exposed


def _compute_exposed_of_rank(rank: RankSteps) -> dict[str, list[float]]:
    """Return the exposed seconds of each kind of call by step.

    Exposed time that a gathering shares with other calls counts for the gathering: computation
    continues as soon as the parameters are there, and would hide the other calls.
    """
    ops = {call.label: call.facts.op for call in rank.calls}
    exposed: dict[str, list[float]] = {label: [] for label in ops}
    for step in rank.steps:
        gathers = [call.span for call in step.calls if call.facts.op in GATHERS]
        for label, op in ops.items():
            spans = [call.span for call in step.calls if call.label == label]
            hiding = step.busy if op in GATHERS else [*step.busy, *gathers]
            visible = difference(intersection(spans, [step.window]), hiding)
            exposed[label].append(length(visible) / 1e9)
    return exposed


def _make_communication(label: str, rank: RankSteps, exposed_seconds: float) -> Communication:
    step = rank.steps[rank.median_step]
    calls = [call for call in step.calls if call.label == label]
    sizes = [call.facts.num_bytes for call in calls if call.facts.num_bytes is not None]
    ops = frozenset(call.facts.op for call in calls)
    return Communication(
        label=label,
        ops=ops,
        exposed_seconds=exposed_seconds,
        calls_per_sum=len(calls),
        largest_bytes=max(sizes, default=None),
        earlier_compute_seconds=_measure_earlier_compute(step, calls),
        is_prefetched=False if ops & GATHERS else None,
    )


def _measure_earlier_compute(step: RankStep, calls: Sequence[Call]) -> float:
    """Return the seconds of computation before calls in which no communication was running.

    Each call can use at most as much of it as the call is exposed.
    """
    unused = difference(step.busy, [call.span for call in step.calls])
    total_ns = 0
    previous_stop = step.window[0]
    for call in sorted(calls, key=lambda call: call.span):
        start, stop = call.span
        before = (previous_stop, max(start, previous_stop))
        exposed_ns = length(difference([call.span], step.busy))
        total_ns += min(length(intersection(unused, [before])), exposed_ns)
        previous_stop = max(previous_stop, stop)
    return total_ns / 1e9


def _list_gaps(rank: RankSteps, step_number: int) -> list[float]:
    """Return the seconds of each gap of a step in which nothing runs."""
    step = rank.steps[step_number]
    spans = gaps([*step.busy, *(call.span for call in step.calls)], step.window)
    seconds = [(stop - start) / 1e9 for start, stop in spans]
    min_seconds = 0.0 if rank.source.has_device else MIN_HOST_GAP_SECONDS
    return [gap for gap in seconds if gap >= min_seconds]


def _compute_idle_seconds(rank: RankSteps) -> float:
    """Return the median over steps of the time in which nothing runs."""
    return median(sum(_list_gaps(rank, step)) for step in range(len(rank.steps)))


def _compute_seconds(rank: RankSteps) -> float:
    return rank.compute_median(lambda parts: parts.compute_seconds)


def _find_pipeline_labels(job: TracedJob) -> list[str]:
    """Return the point-to-point calls between pipeline stages.

    Ring attention, halo exchange and expert dispatch send from rank to rank too. So the group must
    have the name of a pipeline, or torch's pipeline schedule must have recorded its ranges.
    """
    has_schedule = any(rank.source.has_pipeline_ranges for rank in job.ranks)
    labels = []
    for rank in job.ranks:
        for call in rank.calls:
            is_named = PIPELINE_GROUP.search(call.facts.group or "") is not None
            if call.is_point_to_point and (has_schedule or is_named):
                labels.append(call.label)
    return list(dict.fromkeys(labels))


def _measure_pipeline(job: TracedJob, message_seconds: Sequence[float]) -> PipelineIdle | None:
    """Return the idle time of a pipeline from the exposed time of the messages between stages."""
    if not message_seconds or len(job.ranks) < 2:
        return None
    slowest = max(job.ranks, key=_compute_seconds)
    mean_seconds = fmean(_compute_seconds(rank) for rank in job.ranks)
    return PipelineIdle(
        bubble_seconds=sum(message_seconds),
        uneven_seconds=_compute_seconds(slowest) - mean_seconds,
        ranks=len(job.ranks),
        slowest_rank=slowest.rank,
    )


def _find_straggler(job: TracedJob) -> StragglerEvidence | None:
    """Return the rank for which the others wait twice as long as for any other rank."""
    if len(job.ranks) < 2 or not job.collectives:
        return None
    waits = {rank: median(seconds) for rank, seconds in compute_waits(job).items()}
    late_rank, second_rank = sorted(waits, key=lambda rank: waits[rank], reverse=True)[:2]
    seconds = waits[late_rank]
    if seconds < 2 * waits[second_rank] or seconds <= (job.clock_error_ns or 0) / 1e9:
        return None
    [late] = [rank for rank in job.ranks if rank.rank == late_rank]
    others = [rank for rank in job.ranks if rank is not late]
    other_compute = median(_compute_seconds(rank) for rank in others)
    extra_compute = _compute_seconds(late) - other_compute
    extra_idle = _measure_idle(late) - median(_measure_idle(rank) for rank in others)
    share = fmean(shared.last_rank == late_rank for shared in job.collectives)
    has_more_compute = extra_compute >= seconds / 2 and other_compute > 0
    return StragglerEvidence(
        rank=late_rank,
        observation="arrives last",
        where=f"in {format_percent(share)} of collectives",
        waited_seconds=seconds,
        waited_share=seconds / job.step_seconds,
        compute_ratio=_compute_seconds(late) / other_compute if has_more_compute else None,
        host_idle_seconds=extra_idle if extra_idle >= seconds / 2 else None,
    )


def _measure_idle(rank: RankSteps) -> float:
    return rank.compute_median(lambda parts: parts.idle_seconds)


def _compare_with_fits(
    job: TracedJob, predict: PredictSeconds, run_name: str
) -> Iterator[TimeComparison]:
    """Compare the transfer times of each kind of collective with the fits of a run."""
    exposed = compute_exposed_seconds(job)
    times: dict[str, list[tuple[SharedCall, float, float]]] = defaultdict(list)
    for shared in job.collectives:
        fit_seconds = predict(shared)
        if fit_seconds and shared.transfer_ns > 0:
            seconds = shared.transfer_ns / 1e9
            times[shared.call.label].append((shared, seconds, fit_seconds))
    for label, calls in times.items():
        mean_seconds = fmean(seconds for _, seconds, _ in calls)
        mean_fit_seconds = fmean(fit_seconds for _, _, fit_seconds in calls)
        facts = calls[0][0].call.facts
        size = format_case_size(facts.num_bytes)
        yield TimeComparison(
            name=label,
            id=label,
            seconds=mean_seconds,
            reference=run_name,
            reference_seconds=mean_fit_seconds,
            ratios=[seconds / fit_seconds for _, seconds, fit_seconds in calls],
            lost_seconds=exposed[label][1] * (1 - mean_fit_seconds / mean_seconds),
            total_seconds=job.step_seconds,
            command=build_command(["--only", facts.op, "--sizes", size], {}),
        )
