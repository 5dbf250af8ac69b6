"""Rules about the time and the bytes of a training step."""

import math
from collections.abc import Callable, Iterator

from parbench.bench.results.formatting import format_bytes, format_percent, format_seconds
from parbench.reports.findings.evidence import Communication, StepEvidence
from parbench.reports.findings.finding import (
    MIN_GENERAL_SHARE,
    MIN_SHARE,
    Finding,
    get_confidence,
)
from parbench.reports.messages import describe_exposed

MIN_BUCKET_BYTES = 256 << 10  # Smaller gradients are not worth several buckets.
MIN_LATENT_OVERLAP = 0.5
"""The share of exposed communication from which earlier computation could hide it."""
MAX_BYTES_ERROR = 0.01
DEFAULT_BUCKET_BYTES = 25 << 20
"""The bucket size of DDP."""
SUGGESTED_BUCKETS = 4
TRIED_FACTOR = 4
"""The factor by which suggested settings are larger."""
REDUCTIONS = {"all_reduce", "reduce_scatter"}

StepRule = Callable[[StepEvidence], Iterator[Finding]]


def find_sync_per_microbatch(step: StepEvidence) -> Iterator[Finding]:
    """Gradients are reduced after every microbatch although once per step is enough."""
    count = step.syncs_per_step
    if count < 2:
        return
    for part in step.communication:
        share = part.exposed_seconds / step.seconds
        if not part.ops & REDUCTIONS or share < MIN_SHARE:
            continue
        observation = describe_exposed(part.label, share)
        yield _build_finding(
            "sync-per-microbatch",
            step,
            time_share=share * (count - 1) / count,
            subject=part.label,
            message=f"{observation} Gradients are reduced after each of {count} microbatches.",
            command=step.command("ddp", microbatches=count, no_sync=(False, True)),
            evidence={"exposed_share": share, "syncs_per_step": count},
        )


def find_one_bucket(step: StepEvidence) -> Iterator[Finding]:
    """All gradients are reduced in one call, which starts when nothing is left to hide it."""
    for part in step.communication:
        share = _compute_hideable_share(step, part)
        num_bytes = part.largest_bytes or DEFAULT_BUCKET_BYTES
        is_single = part.calls_per_sum == 1 and bool(part.ops & REDUCTIONS)
        if not is_single or share < MIN_SHARE or num_bytes < MIN_BUCKET_BYTES:
            continue
        size = f" ({format_bytes(part.largest_bytes)})" if part.largest_bytes else ""
        bucket_mb = _suggest_bucket_mb(num_bytes)
        current_mb = step.settings.get("bucket_mb", 25)
        observation = describe_exposed(part.label, part.exposed_seconds / step.seconds)
        yield _build_finding(
            "one-bucket",
            step,
            time_share=share,
            subject=part.label,
            message=f"{observation} All gradients{size} are in one bucket, which probably starts "
            f"after the backward pass. DDP with bucket_cap_mb={bucket_mb:g} makes several.",
            command=step.command("ddp", bucket_mb=(bucket_mb, current_mb)),
            evidence={"exposed_share": share, "num_bytes": part.largest_bytes},
        )


def find_no_prefetch(step: StepEvidence) -> Iterator[Finding]:
    """Parameters are gathered only when they are needed."""
    for part in step.communication:
        share = _compute_hideable_share(step, part)
        if part.is_prefetched is not False or share < MIN_SHARE:
            continue
        observation = describe_exposed(part.label, part.exposed_seconds / step.seconds)
        yield _build_finding(
            "no-prefetch",
            step,
            time_share=share,
            subject=part.label,
            message=f"{observation} Parameters are probably gathered only when they are needed.",
            command=step.command("fsdp", prefetch=("default", "explicit")),
            evidence={"exposed_share": share},
        )


def find_exposed_communication(step: StepEvidence) -> Iterator[Finding]:
    """Communication is exposed, and no rule above explains it."""
    if any(find_hot_experts(step)):
        return  # Ranks wait for the one with most tokens.
    specific = (find_sync_per_microbatch, find_one_bucket, find_no_prefetch)
    explained = {finding.subject for rule in specific for finding in rule(step)}
    for part in step.communication:
        share = part.exposed_seconds / step.seconds
        if part.label in explained or share < MIN_GENERAL_SHARE:
            continue
        hidden = ""
        if step.overlap is not None:
            hidden = f" {format_percent(step.overlap)} of all communication is hidden."
        yield _build_finding(
            "exposed-communication",
            step,
            time_share=share,
            subject=part.label,
            message=f"{describe_exposed(part.label, share)}{hidden} "
            "Larger microbatches may hide more.",
            evidence={"exposed_share": share},
        )


def find_host_bound(step: StepEvidence) -> Iterator[Finding]:
    """Nothing runs for a part of the step."""
    share = step.idle_seconds / step.seconds
    if share < MIN_GENERAL_SHARE or step.pipeline or any(find_hot_experts(step)):
        return
    gap = ""
    if step.longest_gap_seconds:
        gap = f" (longest gap {format_seconds(step.longest_gap_seconds)})"
    yield _build_finding(
        "host-bound",
        step,
        time_share=share,
        message=f"Nothing runs for {format_percent(share)} of the step of {step.name}{gap}. "
        "The host probably does not keep up: many small kernels, synchronization or input.",
        command=_suggest_larger(step, "microbatch"),
        evidence={"idle_share": share},
    )


def find_exposed_copies(step: StepEvidence) -> Iterator[Finding]:
    """Copies between host and device are not hidden."""
    share = step.copy_seconds / step.seconds
    if share < MIN_SHARE:
        return
    yield _build_finding(
        "exposed-copies",
        step,
        time_share=share,
        message=f"Copies between host and device take {format_percent(share)} of the step of "
        f"{step.name}. Pinned memory and non_blocking=True may hide them.",
        evidence={"copy_share": share},
    )


def find_uneven_stages(step: StepEvidence) -> Iterator[Finding]:
    """The stages of a pipeline take different times."""
    pipeline = step.pipeline
    if pipeline is None or pipeline.uneven_seconds < MIN_SHARE * step.seconds:
        return
    share = pipeline.uneven_seconds / step.seconds
    layers = pipeline.layers_by_stage
    details = []
    command = ""
    if layers:
        split = "+".join(map(str, layers))
        details.append(f"{split} layers")
        if len(set(layers)) > 1 and sum(layers) % len(layers) == 0:
            even = "+".join([str(sum(layers) // len(layers))] * len(layers))
            command = step.command("pp", split=(split, even))
    if pipeline.slowest_rank is not None:
        details.append(f"rank {pipeline.slowest_rank} computes longest")
    yield _build_finding(
        "uneven-stages",
        step,
        time_share=share,
        message=f"Uneven stages ({', '.join(details) or 'unknown layers'}) probably cost "
        f"{format_percent(share)} of the step of {step.name}. "
        "The longest stage may have too many layers.",
        command=command,
        evidence={"uneven_share": share},
    )


def find_pipeline_bubble(step: StepEvidence) -> Iterator[Finding]:
    """The schedule of a pipeline leaves ranks without work."""
    pipeline = step.pipeline
    if pipeline is None or pipeline.bubble_seconds < MIN_GENERAL_SHARE * step.seconds:
        return
    share = pipeline.bubble_seconds / step.seconds
    count = pipeline.microbatches
    if count is None:
        size = f"{pipeline.ranks} ranks"
        command = step.command("pp", schedule=("1f1b", "interleaved", "zb_h1"))
    else:
        size = f"{count} microbatches on {pipeline.ranks} ranks"
        command = step.command("pp", microbatches=(count, TRIED_FACTOR * count))
    yield _build_finding(
        "pipeline-bubble",
        step,
        time_share=share,
        message=f"Ranks of {step.name} wait for their neighbors for {format_percent(share)} of "
        f"the step ({size}). More microbatches may shorten the bubble.",
        command=command,
        evidence={"bubble_share": share},
    )


def find_slow_stage_messages(step: StepEvidence) -> Iterator[Finding]:
    """The messages between stages delay a pipeline."""
    pipeline = step.pipeline
    if pipeline is None or pipeline.message_seconds < MIN_SHARE * step.seconds:
        return
    share = pipeline.message_seconds / step.seconds
    yield _build_finding(
        "slow-stage-messages",
        step,
        time_share=share,
        message=f"Messages between stages cost {format_percent(share)} of the step of "
        f"{step.name}. The microbatches may be too small.",
        command=_suggest_larger(step, "microbatch"),
        evidence={"message_share": share},
    )


def find_hot_experts(step: StepEvidence) -> Iterator[Finding]:
    """Some experts get more tokens than others."""
    experts = step.experts
    if experts is None or experts.slowdown <= 0 or 1 - 1 / experts.slowdown < MIN_SHARE:
        return
    share = 1 - 1 / experts.slowdown
    load = ""
    if experts.max_rank_load:
        load = f" A rank gets up to {experts.max_rank_load:.2f} times the mean of tokens."
    yield _build_finding(
        "hot-experts",
        step,
        time_share=share,
        message=f"Balanced experts would probably save {format_percent(share)} of the step of "
        f"{step.name}.{load}",
        command="" if experts.has_capacity else step.command("ep_step", capacity=(0, 1.25)),
        evidence={"slowdown": experts.slowdown},
    )


def find_unexpected_bytes(step: StepEvidence) -> Iterator[Finding]:
    """A step sends other bytes than the formula of its parallelism expects."""
    if not step.bytes_ratios:
        return
    axis, ratio = max(step.bytes_ratios.items(), key=lambda item: abs(item[1] - 1))
    if abs(ratio - 1) <= MAX_BYTES_ERROR:
        return
    yield _build_finding(
        "unexpected-bytes",
        step,
        time_share=None,
        message=f"{step.name} sends {ratio:.3f} times the expected bytes on {axis}. "
        "The step may communicate other data than its formula assumes.",
        amount=f"{ratio:.3f} times",
        evidence={"axis": axis, "ratio": ratio},
    )


RULES: tuple[StepRule, ...] = (
    find_sync_per_microbatch,
    find_one_bucket,
    find_no_prefetch,
    find_exposed_communication,
    find_host_bound,
    find_exposed_copies,
    find_uneven_stages,
    find_pipeline_bubble,
    find_slow_stage_messages,
    find_hot_experts,
    find_unexpected_bytes,
)


def _build_finding(
    kind: str,
    step: StepEvidence,
    *,
    time_share: float | None,
    message: str,
    evidence: dict[str, object],
    subject: str = "",
    amount: str = "",
    command: str = "",
) -> Finding:
    return Finding(
        kind=kind,
        subject=subject or step.name,
        message=message,
        command=command,
        amount=amount or format_percent(time_share),
        time_share=time_share,
        confidence=get_confidence(step.num_observations),
        evidence={"step": step.id, **evidence},
    )


def _compute_hideable_share(step: StepEvidence, part: Communication) -> float:
    """Return the share of the step that communication is exposed although it could be hidden."""
    if part.earlier_compute_seconds is None:
        return part.exposed_seconds / step.seconds
    if part.earlier_compute_seconds < MIN_LATENT_OVERLAP * part.exposed_seconds:
        return 0.0
    return min(part.exposed_seconds, part.earlier_compute_seconds) / step.seconds


def _suggest_bucket_mb(num_bytes: int) -> float:
    """Return the bucket size in MiB, a power of two, that divides gradients into several buckets."""
    bucket_bytes = min(num_bytes / SUGGESTED_BUCKETS, DEFAULT_BUCKET_BYTES)
    return 2.0 ** round(math.log2(bucket_bytes / 2**20))


def _suggest_larger(step: StepEvidence, name: str) -> str:
    """Return the command that tries a larger value of a setting, empty if the step has none."""
    value = step.settings.get(name)
    if not isinstance(value, int):
        return ""
    return step.command("", **{name: (value, TRIED_FACTOR * value)})
