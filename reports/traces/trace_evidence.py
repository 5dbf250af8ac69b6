"""Derives the facts from which findings follow (evidence) from the traces of a job.

A finding is a problem with its likely cause. Evidence is, for example, the exposed seconds of a
kind of call.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from parbench.bench.results.formatting import format_case_size, format_percent
from parbench.bench.results.spans import difference
from parbench.bench.text import pluralize
from parbench.reports.findings.commands import build_command, build_preset_command
from parbench.reports.findings.rules import (
    CollectedEvidence,
    FitComparison,
    StragglerEvidence,
    compare_with_fit,
)
from parbench.reports.findings.step_rules import (
    REDUCTIONS,
    Communication,
    PipelineIdle,
    StepEvidence,
)
from parbench.reports.traces.job import SharedCall, TracedJob, compute_waits
from parbench.reports.traces.rank_trace import TracedRank

PredictSeconds = Callable[[SharedCall], float | None]
"""Predicts the time of a collective in seconds by the fits of a run, None without a suitable fit.

A fit is the latency-bandwidth model of an operation that ``parbench run`` measured.
"""

MIN_HOST_GAP_NS = 1_000_000
"""Without a GPU, a shorter gap between operators counts as work of Python, a longer one as idle."""
MIN_PREDICTED_CALLS = 3
"""The least number of calls of one kind that are compared with predictions."""
PIPELINE_GROUP = re.compile(r"(^|[^a-z])(pp|pipe[a-z]*)([^a-z]|$)", re.IGNORECASE)
"""The names of process groups of pipelines: ``mesh_pp``, ``PIPELINE_MODEL_PARALLEL_GROUP``."""


def collect_evidence(job: TracedJob, predict: PredictSeconds | None = None) -> CollectedEvidence:
    """Return the measured times of a job from which findings (likely causes of lost time) follow.

    They are exposed communication, copies, idle time, late ranks and, with ``predict``, collectives
    that are slower than predicted. ``predict`` returns the time of a collective by the
    latency-bandwidth model of a run, None for no such comparison.
    """
    exposed = compute_exposed_seconds(job)
    pipeline_labels = _find_pipeline_labels(job)
    step = StepEvidence(
        name="",
        seconds=job.step_seconds,
        command=build_preset_command,
        communication=[
            _make_communication(label, rank, seconds)
            for label, (rank, seconds) in exposed.items()
            if label not in pipeline_labels
        ],
        copy_seconds=min(rank.compute_mean(lambda parts: parts.copy_seconds) for rank in job.ranks),
        idle_seconds=min(map(_measure_idle, job.ranks)),
        pipeline=_measure_pipeline(job, [exposed[label][1] for label in pipeline_labels]),
    )
    return CollectedEvidence(
        steps=[step],
        stragglers=list(_find_stragglers(job)),
        comparisons=list(_compare_with_fits(job, exposed, predict)) if predict else (),
    )


def compute_exposed_seconds(job: TracedJob) -> dict[str, tuple[TracedRank, float]]:
    """Return the exposed seconds per step of each kind of call, on the rank where they are least.

    A key is the label of a kind of call: operation and process group. A value is (rank, seconds).
    Exposed time is communication that neither computation nor copies hide. It is a mean over the
    steps of a rank, then the minimum over ranks. The rank with the minimum waits least for other
    ranks, so its time is nearest to the time of the communication itself.
    """
    exposed: dict[str, tuple[TracedRank, float]] = {}
    for rank in job.ranks:
        for label in dict.fromkeys(call.label for call in rank.calls):
            by_step = [step.parts.exposed_comm_seconds.get(label, 0.0) for step in rank.steps]
            seconds = fmean(by_step)
            if label not in exposed or seconds < exposed[label][1]:
                exposed[label] = rank, seconds
    return exposed


def _measure_idle(rank: TracedRank) -> float:
    """Return the seconds per step in which nothing runs, without a GPU only gaps of 1 ms or more.

    The result is a mean over steps.
    """
    spans = [call.span for call in rank.calls]
    for step in rank.steps:
        spans += step.busy
    gaps = difference([step.step for step in rank.steps], spans)
    min_ns = 0 if rank.has_device else MIN_HOST_GAP_NS
    return (
        sum(stop - start for start, stop in gaps if stop - start >= min_ns) / 1e9 / len(rank.steps)
    )


def _make_communication(label: str, rank: TracedRank, exposed_seconds: float) -> Communication:
    """Return the facts about one kind of communication call: exposed time, number of calls, bytes.

    The number of calls and the bytes are those of the last step of ``rank``.

    Args:
        label: the operation and the process group of the calls.
        rank: the rank on which these calls are least exposed.
        exposed_seconds: the exposed seconds of these calls per step on this rank.
    """
    calls = [call for call in rank.steps[-1].calls if call.label == label]
    ops = {call.facts.op for call in calls}
    sizes = [call.facts.num_bytes or 0 for call in calls]
    return Communication(
        label=label,
        exposed_seconds=exposed_seconds,
        reductions=len(calls) if ops.intersection(REDUCTIONS) and all(sizes) else 0,
        largest_bytes=max(sizes, default=0),
        reduced_bytes=sum(sizes),
        is_on_demand="all_gather" in ops,
    )


def _find_pipeline_labels(job: TracedJob) -> list[str]:
    """Return the labels of sends and receives between pipeline stages, each once.

    Ring attention and expert dispatch also send from rank to rank, so the process group must have
    the name of a pipeline.
    """
    calls = [call for rank in job.ranks for call in rank.calls if call.is_point_to_point]
    groups = {call.label: call.facts.group or "" for call in calls}
    return [label for label, group in groups.items() if PIPELINE_GROUP.search(group)]


def _measure_pipeline(job: TracedJob, message_seconds: Sequence[float]) -> PipelineIdle | None:
    """Return the idle seconds per step of a pipeline by cause: bubble and uneven stages.

    None without messages between stages or with one rank. ``message_seconds`` has the exposed
    seconds per step of each kind of message between stages. Their sum counts as the bubble, because
    a stage waits in its receives. Uneven stages cost the compute time of the slowest rank minus the
    mean over ranks.
    """
    if not message_seconds or len(job.ranks) < 2:
        return None
    compute_seconds = [rank.compute_mean(lambda parts: parts.compute_seconds) for rank in job.ranks]
    return PipelineIdle(
        bubble_seconds=sum(message_seconds),
        uneven_seconds=max(compute_seconds) - fmean(compute_seconds),
    )


def _find_stragglers(job: TracedJob) -> Iterator[StragglerEvidence]:
    """Yield the rank for which the other ranks wait at least twice as long as for any other rank.

    At most one rank is yielded. The time per step that the other ranks wait must also exceed the
    error of the common clock of the job.
    """
    waits = compute_waits(job)
    if len(waits) < 2:
        return
    late_rank, second_rank = sorted(waits, key=lambda rank: waits[rank], reverse=True)[:2]
    seconds = waits[late_rank]
    if seconds < 2 * waits[second_rank] or seconds <= (job.clock_error_ns or 0) / 1e9:
        return
    share = fmean(shared.last_rank == late_rank for shared in job.shared_calls)
    yield StragglerEvidence(
        rank=late_rank,
        observation=f"arrives last in {format_percent(share)} of collectives of "
        f"{pluralize(job.num_steps, 'step')}",
        waited_seconds=seconds,
        waited_share=seconds / job.step_seconds,
    )


def _compare_with_fits(
    job: TracedJob, exposed: Mapping[str, tuple[TracedRank, float]], predict: PredictSeconds
) -> Iterator[FitComparison]:
    """Yield a comparison of measured and predicted transfer times for each kind of collective.

    A kind is an operation in a process group, with at least ``MIN_PREDICTED_CALLS`` calls.

    Args:
        job: the job with its collectives.
        exposed: the exposed seconds per step, keyed by label, as ``compute_exposed_seconds``
            returns them.
        predict: returns the seconds of a collective by the latency-bandwidth model of a run.
    """
    calls: dict[str, list[tuple[SharedCall, float]]] = defaultdict(list)
    for shared in job.shared_calls:
        fit_seconds = predict(shared)
        if fit_seconds and shared.transfer_ns > 0:
            calls[shared.call.label].append((shared, fit_seconds))
    for label, pairs in calls.items():
        if len(pairs) < MIN_PREDICTED_CALLS:
            continue
        facts = pairs[0][0].call.facts
        yield from compare_with_fit(
            label,
            [fit_seconds for _, fit_seconds in pairs],
            [shared.transfer_ns / 1e9 for shared, _ in pairs],
            affected_seconds=exposed[label][1],
            total_seconds=job.step_seconds,
            command=build_command([facts.op, "--sizes", format_case_size(facts.num_bytes)], {}),
        )
