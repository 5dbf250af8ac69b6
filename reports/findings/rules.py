"""Rules that derive findings (problems with likely causes) from the evidence of a run or of traces.

A rule is a function that yields the findings of one kind. To add a rule, write it here and add it
to ``RUN_RULES`` or, if it examines one training step, to ``STEP_RULES``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from parbench.bench.results.formatting import (
    format_bytes,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.bench.results.stats import median
from parbench.bench.text import name_first
from parbench.reports.findings.evidence import CollectedEvidence, Communication, StepEvidence
from parbench.reports.findings.finding import MIN_GENERAL_SHARE, MIN_SHARE, Finding

MAX_FINDINGS = 6
"""The largest number of findings in a report."""
MAX_NAMED_SUBJECTS = 3
"""A finding also names at most this number of steps, links or ranks with the same problem."""
MAX_SLOW_RATE = 0.75
"""A link or group is slow below this fraction of the median bandwidth of the others."""
MIN_AGREEMENT = 0.75
"""A link or group is reported if it is slow in at least this fraction of repetitions."""
MIN_TIME_RATIO = 1.2
"""An operation is slow above this ratio of its time to the time that its fit predicts."""
MIN_BUCKET_BYTES = 256 << 10  # Smaller gradients are not worth several buckets.
MIN_BUCKET_SHARE = 0.9
"""A gradient bucket with more than this fraction of the gradient bytes counts as the only one."""
DEFAULT_BUCKET_BYTES = 25 << 20
"""The default bucket size of torch's DDP."""
SUGGESTED_BUCKETS = 4
"""The number of gradient buckets that a finding suggests."""
TRIED_FACTOR = 4
"""The factor by which a suggested setting exceeds the current one."""
MAX_BYTES_ERROR = 0.01
"""The largest relative difference of counted and analytical bytes that is not reported."""


def apply_rules(evidence: CollectedEvidence) -> tuple[Finding, ...]:
    """Return the findings (problems with likely causes) from the facts of a run or of traces.

    There is one finding for each kind of problem: the one that costs most time. Its message also
    names the other steps, links or ranks with this problem. At most six findings are returned, the
    ones that cost most time first. Findings whose cost is not a time come last.
    """
    findings = [finding for rule in RUN_RULES for finding in rule(evidence)]
    for step in evidence.steps:
        findings += [finding for rule in STEP_RULES for finding in rule(step)]
    by_kind: dict[str, dict[str, Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.time_share or 0.0, reverse=True):
        by_kind.setdefault(finding.kind, {}).setdefault(finding.subject, finding)
    joined = []
    for by_subject in by_kind.values():
        worst, *others = by_subject.values()
        if others:
            names = name_first([finding.subject for finding in others], MAX_NAMED_SUBJECTS)
            worst = replace(worst, message=f"{worst.message} Also: {', '.join(names)}.")
        joined.append(worst)
    return tuple(joined[:MAX_FINDINGS])


def find_slow_ranks(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each rank for which others wait at least 5 % of an operation or step."""
    for straggler in evidence.stragglers:
        share = min(straggler.waited_share, 1.0)
        if share >= MIN_SHARE:
            yield Finding(
                kind="slow-rank",
                subject=f"rank {straggler.rank}",
                message=f"Rank {straggler.rank} {straggler.observation}. The others wait "
                f"{format_seconds(straggler.waited_seconds)} ({format_percent(share)}).",
                command=straggler.command,
                time_share=share,
            )


def find_slow_rates(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for the slowest link or process group of each set, if it is clearly slow.

    A set has links or groups whose bandwidths are equal if none is slow. The slowest one has the
    smallest median bandwidth over repetitions. It is clearly slow if at least 75 % of its
    repetitions are below 75 % of the median of the other links' or groups' medians.
    """
    for rates in evidence.rates:
        medians = {name: median(values) for name, values in rates.by_name.items()}
        slowest = min(medians, key=lambda name: medians[name])
        rate = medians.pop(slowest)
        if not medians:
            continue
        median_rate = median(list(medians.values()))
        values = rates.by_name[slowest]
        num_slow = sum(value < MAX_SLOW_RATE * median_rate for value in values)
        if num_slow >= MIN_AGREEMENT * len(values):
            yield Finding(
                kind=rates.kind,
                subject=slowest,
                message=f"{slowest[0].upper()}{slowest[1:]} reached {format_quantity(rate, 'B/s')} "
                f"({rates.scope}). The median of the others is "
                f"{format_quantity(median_rate, 'B/s')}. A NIC, cable or rank may be slow.",
                command=rates.command,
                time_share=1 - rate / median_rate,
            )


def find_slow_operations(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each operation that takes clearly longer than its fit over size predicts.

    The ratio of measured to fitted time must be at least 1.2 at the lower end of its 95 % interval.
    The excess must also cost at least 5 % of the total time (``FitComparison.lost_share``).
    """
    for comparison in evidence.comparisons:
        if comparison.low_ratio >= MIN_TIME_RATIO and comparison.lost_share >= MIN_SHARE:
            yield Finding(
                kind="off-fit",
                subject=comparison.name,
                message=f"{comparison.name} takes {format_seconds(comparison.seconds)}, "
                f"{comparison.ratio:.2f} times as long as its fit. The link may be slow or shared, "
                "or the algorithm may change at this size.",
                command=comparison.command,
                time_share=comparison.lost_share,
            )


def find_exposed_communication(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding for each mesh axis or kind of call with exposed communication.

    A finding names the first of these likely causes that costs at least 5 % of the step: gradients
    are reduced after each microbatch, all gradients are in one bucket, or parameters are gathered
    without prefetch. Without such a cause, communication is reported from 10 % of the step. Nothing
    is yielded if uneven expert load explains the waiting.
    """
    if any(find_hot_experts(step)):
        return  # Ranks wait for the one with most tokens.
    for part in step.communication:
        num_bytes = part.largest_bytes or DEFAULT_BUCKET_BYTES
        sync_seconds = part.exposed_seconds * (step.syncs - 1) / step.syncs
        min_seconds = MIN_SHARE * step.seconds
        command = ""
        if part.reductions and sync_seconds >= min_seconds:
            kind, seconds = "sync-per-microbatch", sync_seconds
            cause = f"Gradients are reduced after each of {step.syncs} microbatches."
            command = step.command("ddp", microbatches=step.syncs, no_sync=(False, True))
        elif _has_one_bucket(part, num_bytes) and part.exposed_seconds >= min_seconds:
            kind, seconds = "one-bucket", part.exposed_seconds
            bucket_mb = 2.0 ** round(math.log2(num_bytes / SUGGESTED_BUCKETS / 2**20))
            cause = (
                f"The gradients ({format_bytes(num_bytes)}) are in one bucket, which probably "
                f"starts after the backward pass. DDP makes several with bucket_cap_mb={bucket_mb:g}."
            )
            sizes = (bucket_mb, step.settings.get("bucket_mb", 25))
            command = step.command("ddp", bucket_mb=sizes)
        elif part.is_on_demand and part.exposed_seconds >= min_seconds:
            kind, seconds = "no-prefetch", part.exposed_seconds
            cause = "Parameters are probably gathered only when they are needed."
            command = step.command("fsdp", prefetch=("default", "explicit"))
        elif part.exposed_seconds >= MIN_GENERAL_SHARE * step.seconds:
            kind, seconds = "exposed-communication", part.exposed_seconds
            cause = "Larger microbatches may hide more."
        else:
            continue
        exposed = step.format_share(part.exposed_seconds)
        yield Finding(
            kind=kind,
            subject=part.label,
            message=f"{part.label}: {exposed} of the step is exposed communication. {cause}",
            command=command,
            time_share=seconds / step.seconds,
        )


def _has_one_bucket(part: Communication, num_bytes: int) -> bool:
    """Return True if one call reduces nearly all gradients, of at least 256 KiB, of a step.

    Such a call starts when no computation is left that could hide it. ``num_bytes`` are the bytes
    of the largest call, or torch's default bucket size if these are unknown. The result is False if
    the step has no parameter for the bucket size.
    """
    has_most = part.largest_bytes > MIN_BUCKET_SHARE * part.reduced_bytes
    is_single = part.reductions == 1 or (part.reductions > 1 and has_most)
    return part.has_buckets and is_single and num_bytes >= MIN_BUCKET_BYTES


def find_host_bound(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding if nothing runs on the device for 10 % of the step or more.

    Nothing is yielded for pipelines and for uneven expert load, which explain idle time.
    """
    if step.pipeline is None and not any(find_hot_experts(step)):
        yield from _report(
            step,
            "host-bound",
            step.idle_seconds,
            "Nothing runs for {share} of {step}. The host probably does not keep up: many small "
            "kernels, synchronization or input.",
            _suggest_larger(step, "microbatch"),
            min_share=MIN_GENERAL_SHARE,
        )


def find_exposed_copies(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding if exposed copies between host and device take 5 % of the step or more."""
    yield from _report(
        step,
        "exposed-copies",
        step.copy_seconds,
        "Copies between host and device take {share} of {step}. Pinned memory and "
        "non_blocking=True may hide them.",
    )


def find_pipeline_idle_time(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding for each cause of idle time in a pipeline: uneven stages and the bubble.

    Uneven stages are reported from 5 % of the step, the bubble of the schedule from 10 %.
    """
    pipeline = step.pipeline
    if pipeline is None:
        return
    layers = pipeline.layers_by_stage
    command = ""
    if len(set(layers)) > 1 and sum(layers) % len(layers) == 0:
        equal = [sum(layers) // len(layers)] * len(layers)
        splits = tuple("+".join(map(str, split)) for split in (layers, equal))
        command = step.command("pp", split=splits)
    yield from _report(
        step,
        "uneven-stages",
        pipeline.uneven_seconds,
        "Uneven stages cost {share} of {step}. The longest stage may have too many layers.",
        command,
    )
    if pipeline.microbatches is None:
        command = step.command("pp", schedule=("1f1b", "interleaved", "zb_h1"))
    else:
        command = _suggest_larger(step, "microbatches")
    yield from _report(
        step,
        "pipeline-bubble",
        pipeline.bubble_seconds,
        "Stages wait for each other for {share} of {step}. "
        "More microbatches may shorten the bubble.",
        command,
        min_share=MIN_GENERAL_SHARE,
    )


def find_hot_experts(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding if balanced expert load would save 5 % of the step or more."""
    command = ""
    if step.settings.get("capacity") == 0:
        command = step.command("ep_step", capacity=(0, 1.25))
    yield from _report(
        step,
        "hot-experts",
        step.expert_imbalance_seconds,
        "Balanced experts would probably save {share} of {step}.",
        command,
    )


def find_unexpected_bytes(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding for each mesh axis on which a step sends other bytes than its formula gives.

    The bytes that are sent were counted at the process groups. A relative difference of at most 1 %
    from the analytical bytes of the formula is not reported.
    """
    for axis, ratio in step.bytes_ratios.items():
        if abs(ratio - 1) > MAX_BYTES_ERROR:
            yield Finding(
                kind="unexpected-bytes",
                subject=f"{step.name} {ratio:.3f} times on {axis}",
                message=f"{step.name} sends {ratio:.3f} times the expected bytes on {axis}. "
                "It may communicate other data than its formula assumes.",
                time_share=None,
            )


RUN_RULES: tuple[Callable[[CollectedEvidence], Iterator[Finding]], ...] = (
    find_slow_ranks,
    find_slow_rates,
    find_slow_operations,
)
"""The rules that ``apply_rules`` applies to all evidence of a run or of traces."""
STEP_RULES: tuple[Callable[[StepEvidence], Iterator[Finding]], ...] = (
    find_exposed_communication,
    find_host_bound,
    find_exposed_copies,
    find_pipeline_idle_time,
    find_hot_experts,
    find_unexpected_bytes,
)
"""The rules that ``apply_rules`` applies to each training step."""


def _report(
    step: StepEvidence,
    kind: str,
    seconds: float,
    message: str,
    command: str = "",
    *,
    min_share: float = MIN_SHARE,
) -> Iterator[Finding]:
    """Yield one finding on a step if a problem costs at least ``min_share`` of the step's time.

    Args:
        step: the step.
        kind: the kind of problem, such as ``host-bound``.
        seconds: the cost of the problem in seconds per step.
        message: the message, in which ``{share}`` is the cost in percent and ``{step}`` the step.
        command: the command to run next, empty if there is none.
        min_share: the smallest reported cost as a fraction of the time of the step.
    """
    if seconds >= min_share * step.seconds:
        full_name = f"the step of {step.name}" if step.name else "the step"
        yield Finding(
            kind=kind,
            subject=step.name or "the step",
            message=message.format(share=step.format_share(seconds), step=full_name),
            command=command,
            time_share=seconds / step.seconds,
        )


def _suggest_larger(step: StepEvidence, name: str) -> str:
    """Return the command that compares a setting of a step with a value four times as large.

    The command is empty if the step has no integer setting ``name``.
    """
    value = step.settings.get(name)
    if not isinstance(value, int):
        return ""
    return step.command("", **{name: (value, TRIED_FACTOR * value)})
