"""Rules that derive findings about the time and the bytes of a training step from evidence.

A rule returns the findings for one cause. To add a rule, write it here and add it to RULES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from parbench.bench.results.formatting import format_bytes
from parbench.reports.findings.evidence import Communication, StepEvidence
from parbench.reports.findings.finding import MIN_GENERAL_SHARE, MIN_SHARE, Finding

MIN_BUCKET_BYTES = 256 << 10  # Smaller gradients are not worth several buckets.
MIN_BUCKET_SHARE = 0.9
"""A gradient bucket with this fraction of the bytes counts as the only one."""
DEFAULT_BUCKET_BYTES = 25 << 20
"""The default bucket size of torch's DDP."""
SUGGESTED_BUCKETS = 4
"""The number of gradient buckets that a finding suggests."""
TRIED_FACTOR = 4
"""The factor by which a suggested setting exceeds the current one."""
MAX_BYTES_ERROR = 0.01
"""The largest relative difference of counted and analytical bytes that is not reported."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A likely cause of the exposed communication of a step on one axis or of one kind of call."""

    kind: str
    """The kind of finding, such as ``one-bucket``."""
    explanation: str
    """The cause as sentences of the finding."""
    seconds: float
    """The seconds per step that the cause costs."""
    command: str = ""
    """The command that compares settings, empty if there is none."""
    min_share: float = MIN_SHARE
    """The cause is reported if it costs at least this fraction of the step."""


def explain_sync_per_microbatch(step: StepEvidence, part: Communication) -> Cause | None:
    """Return the cause that gradients are reduced after each microbatch, not once per step.

    None if they are reduced once per step. ``part`` is the communication to explain.
    """
    if not part.reductions or step.syncs < 2:
        return None
    return Cause(
        kind="sync-per-microbatch",
        explanation=f"Gradients are reduced after each of {step.syncs} microbatches.",
        seconds=part.exposed_seconds * (step.syncs - 1) / step.syncs,
        command=step.command("ddp", microbatches=step.syncs, no_sync=(False, True)),
    )


def explain_one_bucket(step: StepEvidence, part: Communication) -> Cause | None:
    """Return the cause that one call reduces nearly all gradients of a step.

    Such a call starts when no computation is left that could hide it. ``part`` is the communication
    to explain. None if several calls share the gradients, if they are smaller than 256 KiB, or if
    the step has no bucket size to set.
    """
    num_bytes = part.largest_bytes or DEFAULT_BUCKET_BYTES
    has_most = part.largest_bytes > MIN_BUCKET_SHARE * part.reduced_bytes
    is_single = part.reductions == 1 or (part.reductions > 1 and has_most)
    if not part.has_buckets or not is_single or num_bytes < MIN_BUCKET_BYTES:
        return None
    bucket_bytes = min(num_bytes / SUGGESTED_BUCKETS, DEFAULT_BUCKET_BYTES)
    bucket_mb = 2.0 ** round(math.log2(bucket_bytes / 2**20))
    return Cause(
        kind="one-bucket",
        explanation=f"The gradients ({format_bytes(num_bytes)}) are in one bucket, which probably "
        f"starts after the backward pass. DDP makes several with bucket_cap_mb={bucket_mb:g}.",
        seconds=part.hideable_seconds,
        command=step.command("ddp", bucket_mb=(bucket_mb, step.settings.get("bucket_mb", 25))),
    )


def explain_no_prefetch(step: StepEvidence, part: Communication) -> Cause | None:
    """Return the cause that parameters are gathered on demand, without prefetch.

    None if they are prefetched. ``part`` is the communication to explain.
    """
    if not part.is_on_demand:
        return None
    return Cause(
        kind="no-prefetch",
        explanation="Parameters are probably gathered only when they are needed.",
        seconds=part.hideable_seconds,
        command=step.command("fsdp", prefetch=("default", "explicit")),
    )


def explain_otherwise(step: StepEvidence, part: Communication) -> Cause:
    """Return a general cause for exposed communication that no other function explains.

    ``part`` is the communication to explain.
    """
    explanation = "Larger microbatches may hide more."
    if part.reductions > 1 and part.reduced_bytes:
        size = format_bytes(part.reduced_bytes)
        explanation = f"{part.reductions:g} calls sum {size}. {explanation}"
    return Cause(
        kind="exposed-communication",
        explanation=explanation,
        seconds=part.exposed_seconds,
        min_share=MIN_GENERAL_SHARE,
    )


EXPLANATIONS = (
    explain_sync_per_microbatch,
    explain_one_bucket,
    explain_no_prefetch,
    explain_otherwise,
)
"""The functions that explain exposed communication, the most specific first."""


def find_exposed_communication(step: StepEvidence) -> list[Finding]:
    """Return a finding for each mesh axis or kind of call with exposed communication.

    Each finding has the first likely cause that costs enough time. The list is empty if uneven
    expert load explains the waiting.
    """
    if find_hot_experts(step):
        return []  # Ranks wait for the one with most tokens.
    findings: list[Finding] = []
    for part in step.communication:
        exposed = step.format_share(part.exposed_seconds)
        phase = ""
        if len(step.communication) == 1:  # phases have the communication of all axes
            phase = step.name_phase(step.exposed_by_phase, part.exposed_seconds)
        for explain in EXPLANATIONS:
            cause = explain(step, part)
            if cause is None or cause.seconds < cause.min_share * step.seconds:
                continue
            findings += _report(
                cause.kind,
                step,
                cause.seconds,
                f"{part.label}: {exposed} of the step is exposed communication{phase}. "
                f"{cause.explanation}",
                cause.command,
                subject=part.label,
            )
            break
    return findings


def find_host_bound(step: StepEvidence) -> list[Finding]:
    """Return a finding if nothing runs on the device for 10 % of the step or more.

    The list is empty for pipelines and for uneven expert load, which explain idle time.
    """
    if step.pipeline or find_hot_experts(step):
        return []
    return _report(
        "host-bound",
        step,
        step.idle_seconds,
        f"Nothing runs for {step.format_share(step.idle_seconds)} of {step.full_name}"
        f"{step.name_phase(step.idle_by_phase, step.idle_seconds)}. The host probably does not keep "
        "up: many small kernels, synchronization or input.",
        _suggest_larger(step, "microbatch"),
        min_share=MIN_GENERAL_SHARE,
    )


def find_exposed_copies(step: StepEvidence) -> list[Finding]:
    """Return a finding if exposed copies between host and device take 5 % of the step or more."""
    return _report(
        "exposed-copies",
        step,
        step.copy_seconds,
        f"Copies between host and device take {step.format_share(step.copy_seconds)} of "
        f"{step.full_name}. Pinned memory and non_blocking=True may hide them.",
    )


def find_uneven_stages(step: StepEvidence) -> list[Finding]:
    """Return a finding if equal pipeline stages would save 5 % of the step or more."""
    if step.pipeline is None:
        return []
    layers = step.pipeline.layers_by_stage
    stages = f"{'+'.join(map(str, layers))} layers"
    if not layers:
        stages = f"rank {step.pipeline.slowest_rank} computes longest"
    command = ""
    if len(set(layers)) > 1 and sum(layers) % len(layers) == 0:
        equal = [sum(layers) // len(layers)] * len(layers)
        splits = tuple("+".join(map(str, split)) for split in (layers, equal))
        command = step.command("pp", split=splits)
    return _report(
        "uneven-stages",
        step,
        step.pipeline.uneven_seconds,
        f"Uneven stages ({stages}) cost {step.format_share(step.pipeline.uneven_seconds)} of "
        f"{step.full_name}. The longest stage may have too many layers.",
        command,
    )


def find_pipeline_bubble(step: StepEvidence) -> list[Finding]:
    """Return a finding if the bubble of the pipeline schedule takes 10 % of the step or more."""
    if step.pipeline is None:
        return []
    count = step.pipeline.microbatches
    if count is None:
        command = step.command("pp", schedule=("1f1b", "interleaved", "zb_h1"))
    else:
        command = step.command("pp", microbatches=(count, TRIED_FACTOR * count))
    return _report(
        "pipeline-bubble",
        step,
        step.pipeline.bubble_seconds,
        f"Stages wait for each other for {step.format_share(step.pipeline.bubble_seconds)} of "
        f"{step.full_name} ({count or 'unknown'} microbatches on {step.pipeline.ranks} ranks). "
        "More microbatches may shorten the bubble.",
        command,
        min_share=MIN_GENERAL_SHARE,
    )


def find_slow_messages(step: StepEvidence) -> list[Finding]:
    """Return a finding if messages between pipeline stages cost 5 % of the step or more."""
    if step.pipeline is None:
        return []
    return _report(
        "slow-messages",
        step,
        step.pipeline.message_seconds,
        f"Messages between stages cost {step.format_share(step.pipeline.message_seconds)} of "
        f"{step.full_name}. The microbatches may be too small.",
        _suggest_larger(step, "microbatch"),
    )


def find_hot_experts(step: StepEvidence) -> list[Finding]:
    """Return a finding if balanced expert load would save 5 % of the step or more."""
    seconds = step.expert_imbalance_seconds
    load = ""
    if step.max_expert_load:
        load = f" A rank gets up to {step.max_expert_load:.2f} times the mean of tokens."
    command = ""
    if step.settings.get("capacity") == 0:
        command = step.command("ep_step", capacity=(0, 1.25))
    return _report(
        "hot-experts",
        step,
        seconds,
        f"Balanced experts would probably save {step.format_share(seconds)} of "
        f"{step.full_name}.{load}",
        command,
    )


def find_unexpected_bytes(step: StepEvidence) -> list[Finding]:
    """Return a finding for each mesh axis whose counted bytes differ from the analytical ones.

    A relative difference of at most 1 % is not reported.
    """
    return [
        Finding(
            kind="unexpected-bytes",
            subject=f"{step.name} {ratio:.3f} times on {axis}",
            message=f"{step.name} sends {ratio:.3f} times the expected bytes on {axis}. "
            "It may communicate other data than its formula assumes.",
            time_share=None,
            evidence={"case": step.id, "axis": axis, "ratio": ratio},
        )
        for axis, ratio in step.bytes_ratios.items()
        if abs(ratio - 1) > MAX_BYTES_ERROR
    ]


RULES: tuple[Callable[[StepEvidence], list[Finding]], ...] = (
    find_exposed_communication,
    find_host_bound,
    find_exposed_copies,
    find_uneven_stages,
    find_pipeline_bubble,
    find_slow_messages,
    find_hot_experts,
    find_unexpected_bytes,
)
"""The rules that ``apply_rules`` applies to each training step."""


def _report(
    kind: str,
    step: StepEvidence,
    seconds: float,
    message: str,
    command: str = "",
    *,
    subject: str = "",
    min_share: float = MIN_SHARE,
) -> list[Finding]:
    """Return a list with one finding if it costs enough of the step, otherwise an empty list.

    ``seconds`` is the cost per step and ``min_share`` the fraction of the step from which it is
    reported. ``subject`` is by default the name of the step.
    """
    share = seconds / step.seconds
    if share < min_share:
        return []
    return [
        Finding(
            kind=kind,
            subject=subject or step.name or "the step",
            message=message,
            command=command,
            time_share=share,
            confidence=1.0 if step.num_observations > 1 else 0.5,
            evidence={"case": step.id, "seconds": seconds},
        )
    ]


def _suggest_larger(step: StepEvidence, name: str) -> str:
    """Return the command that compares a setting of a step with a value four times as large.

    It is empty if the step has no such integer setting.
    """
    value = step.settings.get(name)
    if not isinstance(value, int):
        return ""
    return step.command("", **{name: (value, TRIED_FACTOR * value)})
