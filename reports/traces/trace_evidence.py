"""Derives the facts from which findings follow (evidence) from the traces of a job.

A finding is a problem with its likely cause. Evidence is, for example, the exposed seconds of a
kind of call.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median

from parbench.bench.results.formatting import format_case_size, format_percent
from parbench.bench.results.spans import difference, gaps, intersection, length
from parbench.bench.text import pluralize
from parbench.reports.findings.commands import build_command, build_preset_command
from parbench.reports.findings.evidence import (
    CollectedEvidence,
    Communication,
    FitComparison,
    PipelineIdle,
    StepEvidence,
    StragglerEvidence,
    compare_with_fit,
)
from parbench.reports.traces.job import SharedCall, TracedJob, compute_waits
from parbench.reports.traces.rank_trace import TracedCall, TracedRank, TracedStep

PredictSeconds = Callable[[SharedCall], float | None]
"""Predicts the time of a collective in seconds by the fits of a run, None without a suitable fit.

A fit is the latency-bandwidth model of an operation that ``parbench run`` measured.
"""

GATHERS = {"all_gather"}
"""The operations that fetch parameters before computation needs them."""
REDUCTIONS = {"all_reduce", "reduce_scatter"}
"""The operations that sum gradients."""
MIN_HIDEABLE_SHARE = 0.5
"""The fraction of exposed time that an earlier start must be able to hide to be worth a finding."""
MIN_HOST_GAP_NS = 1_000_000
"""Shorter gaps between operators on a host are not idle time, but the time of Python itself."""
PIPELINE_GROUP = re.compile(r"(^|[^a-z])(pp|pipe[a-z]*)([^a-z]|$)", re.IGNORECASE)
"""The names of process groups of pipelines: ``mesh_pp``, ``PIPELINE_MODEL_PARALLEL_GROUP``."""


def collect_evidence(job: TracedJob, predict: PredictSeconds | None = None) -> CollectedEvidence:
    """Return the measured times of a job from which findings (likely causes of lost time) follow.

    They are exposed communication, copies, idle time, late ranks and, with ``predict``, collectives
    that are slower than predicted. ``predict`` gives the time of a collective by the
    latency-bandwidth model of a run.
    """
    exposed = compute_exposed_seconds(job)
    pipeline_labels = _find_pipeline_labels(job)
    copy_seconds = [rank.compute_median(lambda parts: parts.copy_seconds) for rank in job.ranks]
    step = StepEvidence(
        name="",
        seconds=job.step_seconds,
        command=build_preset_command,
        communication=[
            _make_communication(label, rank, seconds)
            for label, (rank, seconds) in exposed.items()
            if label not in pipeline_labels
        ],
        copy_seconds=min(copy_seconds),
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
    Exposed time is communication that neither computation nor copies hide. It is a median over the
    steps of a rank, then the minimum over ranks. The rank with the minimum waits least for other
    ranks, so its time is nearest to the time of the communication itself.
    """
    exposed: dict[str, tuple[TracedRank, float]] = {}
    for rank in job.ranks:
        for label, by_step in _compute_exposed_of_rank(rank).items():
            seconds = median(by_step)
            if label not in exposed or seconds < exposed[label][1]:
                exposed[label] = rank, seconds
    return exposed


def _compute_exposed_of_rank(rank: TracedRank) -> dict[str, list[float]]:
    """Return the exposed seconds of a rank in each step in order, keyed by the label of the calls.

    Exposed time is communication that neither computation nor copies hide. Time that an all_gather
    shares with other calls counts only for the all_gather: computation continues as soon as the
    parameters are there, and would hide the other calls.
    """
    ops = {call.label: call.facts.op for call in rank.calls}
    exposed: dict[str, list[float]] = {label: [] for label in ops}
    for step in rank.steps:
        gathers = [call.span for call in step.calls if call.facts.op in GATHERS]
        for label, op in ops.items():
            spans = [call.span for call in step.calls if call.label == label]
            hiding = step.busy if op in GATHERS else [*step.busy, *gathers]
            visible = difference(intersection(spans, [step.step]), hiding)
            exposed[label].append(length(visible) / 1e9)
    return exposed


def _make_communication(label: str, rank: TracedRank, exposed_seconds: float) -> Communication:
    """Return the facts about one kind of call: exposed time, bytes, and time that could be hidden.

    The bytes and the time that an earlier start could hide are from the rank's step of median
    duration.

    Args:
        label: the operation and the process group of the calls.
        rank: the rank on which these calls are least exposed.
        exposed_seconds: the exposed seconds of these calls per step on this rank.
    """
    step = rank.steps[rank.median_step]
    calls = [call for call in step.calls if call.label == label]
    ops = {call.facts.op for call in calls}
    sizes = [call.facts.num_bytes or 0 for call in calls]
    hideable_seconds = _measure_earlier_compute(step, calls)
    if hideable_seconds < MIN_HIDEABLE_SHARE * exposed_seconds:
        hideable_seconds = 0.0
    return Communication(
        label=label,
        exposed_seconds=exposed_seconds,
        hideable_seconds=min(hideable_seconds, exposed_seconds),
        reductions=len(calls) if ops & REDUCTIONS and all(sizes) else 0,
        largest_bytes=max(sizes, default=0),
        reduced_bytes=sum(sizes),
        is_on_demand=bool(ops & GATHERS),
    )


def _measure_earlier_compute(step: TracedStep, calls: Sequence[TracedCall]) -> float:
    """Return the seconds of calls in a step that would be hidden if the calls started earlier.

    For each call, it is the computation since the previous call during which no communication was
    running, at most the exposed time of the call. ``calls`` are some of the calls of the step.
    """
    unused = difference(step.busy, [call.span for call in step.calls])
    total_ns = 0
    previous_stop = step.step[0]
    for call in sorted(calls, key=lambda call: call.span):
        start, stop = call.span
        before = (previous_stop, max(start, previous_stop))
        exposed_ns = length(difference([call.span], step.busy))
        total_ns += min(length(intersection(unused, [before])), exposed_ns)
        previous_stop = max(previous_stop, stop)
    return total_ns / 1e9


def _measure_idle(rank: TracedRank) -> float:
    """Return the idle seconds per step of a rank, the median over steps.

    Nothing runs in idle time. On a host, gaps shorter than ``MIN_HOST_GAP_NS`` do not count.
    """
    min_ns = 0 if rank.has_device else MIN_HOST_GAP_NS
    idle_ns = []
    for step in rank.steps:
        spans = gaps([*step.busy, *(call.span for call in step.calls)], step.step)
        lengths = [stop - start for start, stop in spans]
        idle_ns.append(sum(length for length in lengths if length >= min_ns))
    return median(idle_ns) / 1e9


def _compute_seconds(rank: TracedRank) -> float:
    """Return the seconds per step in which a rank computes, the median over steps."""
    return rank.compute_median(lambda parts: parts.compute_seconds)


def _find_pipeline_labels(job: TracedJob) -> list[str]:
    """Return the labels of sends and receives between pipeline stages, each once.

    Ring attention, halo exchange and expert dispatch also send from rank to rank. So the group must
    have the name of a pipeline, or torch's pipeline schedule must have recorded its ranges.
    """
    has_schedule = any(rank.has_pipeline_ranges for rank in job.ranks)
    labels = []
    for rank in job.ranks:
        for call in rank.calls:
            is_named = PIPELINE_GROUP.search(call.facts.group or "") is not None
            if call.is_point_to_point and (has_schedule or is_named):
                labels.append(call.label)
    return list(dict.fromkeys(labels))


def _measure_pipeline(job: TracedJob, message_seconds: Sequence[float]) -> PipelineIdle | None:
    """Return the idle seconds per step of a pipeline by cause: bubble and uneven stages.

    None without messages between stages or with one rank. ``message_seconds`` has the exposed
    seconds per step of each kind of message between stages. Their sum counts as the bubble, because
    a stage waits in its receives.
    """
    if not message_seconds or len(job.ranks) < 2:
        return None
    compute_seconds = [_compute_seconds(rank) for rank in job.ranks]
    return PipelineIdle(
        bubble_seconds=sum(message_seconds),
        uneven_seconds=max(compute_seconds) - fmean(compute_seconds),
    )


def _find_stragglers(job: TracedJob) -> Iterator[StragglerEvidence]:
    """Yield the rank for which the others wait at least twice as long as for any other rank.

    There is at most one. The wait is the median over steps of the seconds per step
    (``compute_waits``). It must also exceed the error of the common clock. The result states
    whether the rank computes longer or its host is idle.
    """
    waits = {rank: median(seconds) for rank, seconds in compute_waits(job).items()}
    if len(waits) < 2:
        return
    late_rank, second_rank = sorted(waits, key=lambda rank: waits[rank], reverse=True)[:2]
    seconds = waits[late_rank]
    if seconds < 2 * waits[second_rank] or seconds <= (job.clock_error_ns or 0) / 1e9:
        return
    share = fmean(shared.last_rank == late_rank for shared in job.shared_calls)
    steps = pluralize(job.num_steps, "step")
    observation = f"arrives last in {format_percent(share)} of collectives of {steps}"
    compute_seconds, other_compute_seconds = _compare_rank(job, late_rank, _compute_seconds)
    idle_seconds, other_idle_seconds = _compare_rank(job, late_rank, _measure_idle)
    if compute_seconds - other_compute_seconds >= seconds / 2:
        ratio = compute_seconds / max(other_compute_seconds, 1e-9)
        observation += f", and computes {ratio:.2f} times as long as the others"
    elif idle_seconds - other_idle_seconds >= seconds / 2:
        observation += ", and its host probably does not keep up"
    yield StragglerEvidence(
        rank=late_rank,
        observation=observation,
        waited_seconds=seconds,
        waited_share=seconds / job.step_seconds,
    )


def _compare_rank(
    job: TracedJob, rank_number: int, measure: Callable[[TracedRank], float]
) -> tuple[float, float]:
    """Return (seconds of one rank, median of the seconds of the other ranks).

    ``measure`` returns the seconds of a rank, such as its compute time per step.
    """
    values = {rank.rank: measure(rank) for rank in job.ranks}
    own_value = values.pop(rank_number)
    return own_value, median(values.values())


def _compare_with_fits(
    job: TracedJob, exposed: Mapping[str, tuple[TracedRank, float]], predict: PredictSeconds
) -> Iterator[FitComparison]:
    """Yield a comparison of measured and predicted transfer times for each kind of collective.

    Args:
        job: the job with its collectives.
        exposed: the exposed seconds per step, keyed by label, as ``compute_exposed_seconds``
            returns them.
        predict: gives the time of a collective by the latency-bandwidth model of a run.
    """
    calls: dict[str, list[SharedCall]] = defaultdict(list)
    for shared in job.shared_calls:
        if shared.transfer_ns > 0 and predict(shared):
            calls[shared.call.label].append(shared)
    for label, shared_calls in calls.items():
        facts = shared_calls[0].call.facts
        size = format_case_size(facts.num_bytes)
        yield from compare_with_fit(
            label,
            [predict(shared) or 0.0 for shared in shared_calls],
            [shared.transfer_ns / 1e9 for shared in shared_calls],
            affected_seconds=exposed[label][1],
            total_seconds=job.step_seconds,
            command=build_command([facts.op, "--sizes", size], {}),
        )
