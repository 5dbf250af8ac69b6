"""Rules that derive findings (problems with likely causes) from the facts on one training step.

`reports/findings/run_evidence.py` reads the facts from a run, `reports/traces/trace_evidence.py`
from traces. To add a rule, write it here and add it to ``STEP_RULES``. A new fact is a field of
``StepEvidence``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parbench.bench.results.formatting import format_bytes, format_percent
from parbench.reports.findings.finding import MIN_GENERAL_SHARE, MIN_SHARE, Finding

MIN_BUCKET_BYTES = 256 << 10  # Smaller gradients are not worth several buckets.
MAX_SMALL_BYTES = 512 << 10
"""Reductions with a smaller mean size are reported as many small ones."""
MIN_SMALL_CALLS = 8
"""Fewer reductions than this number are not reported as many small ones."""
REDUCTIONS = ("all_reduce", "reduce_scatter")
"""The operations that sum gradients."""
MIN_BUCKET_SHARE = 0.9
"""A gradient bucket with more than this fraction of the gradient bytes counts as the only one."""
SUGGESTED_BUCKETS = 4
"""The number of gradient buckets that a finding suggests."""
TRIED_FACTOR = 4
"""The factor by which a suggested setting exceeds the current one."""
MIN_EXPERT_IMBALANCE = 1.2
"""The smallest ratio of a rank's tokens to the mean over ranks that is reported."""
MAX_BYTES_ERROR = 0.01
"""The largest relative difference of counted and analytical bytes that is not reported."""

StepCommand = Callable[..., str]
"""A function that returns the ``parbench run`` command to measure a step again, empty for none.

Its argument is a preset, for a step that cannot be measured again itself. Settings follow by name.
"""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The exposed communication of one profiled step, on one mesh axis or of one kind of call.

    In a run it is the communication on an axis. In traces it is the communication by one operation
    in one process group.
    """

    label: str
    """The name for messages, such as ``fsdp (axis dp)``."""
    exposed_seconds: float
    """The seconds per step that neither compute nor copies hide."""
    reductions: float = 0
    """The calls of all_reduce and reduce_scatter in one synchronization of all gradients.

    A step may synchronize gradients several times, such as once for each microbatch.
    """
    is_waiting: bool = False
    """True if ranks wait for late ranks in more than half of the exposed time."""
    has_buckets: bool = True
    """False if the step has no parameter for the size of gradient buckets."""
    largest_bytes: int = 0
    """The bytes of the largest reduction call, 0 if unknown."""
    reduced_bytes: float = 0
    """The bytes of all ``reductions`` together."""
    is_on_demand: bool = False
    """True if parameters are probably gathered only when they are needed, without prefetch."""


@dataclass(frozen=True, kw_only=True)
class PipelineIdle:
    """The idle time of a pipeline step by cause in seconds per step, and facts on the pipeline."""

    bubble_seconds: float
    """The idle time due to the schedule and to messages between stages.

    In traces it is the exposed time of these messages.
    """
    uneven_seconds: float
    """The idle time that stages of equal duration would save. 0 if it is not significant."""
    microbatches: int | None = None
    """The number of microbatches per step, None if unknown."""
    layers_by_stage: tuple[int, ...] = ()
    """The number of layers of each stage, empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """The times, bytes and settings of one training step of a run or of a job's traces.

    All times are seconds per step, from a profiled step where there is one. In traces, copies and
    idle time are minimums over ranks.
    """

    name: str
    """The label of the case, empty for the step of a trace."""
    seconds: float
    """The wall time of the step."""
    command: StepCommand
    """A function that returns the command that measures the step with other settings."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The parameters of the step's case, keyed by name. Empty for the step of a trace."""
    communication: Sequence[Communication] = ()
    """The exposed communication, one item for each axis or kind of call."""
    copy_seconds: float = 0.0
    """The time of copies that compute does not hide."""
    idle_seconds: float = 0.0
    """The time in which nothing runs on the device."""
    syncs: int = 1
    """The number of times per step that all gradients are summed: 1, or once per microbatch."""
    pipeline: PipelineIdle | None = None
    """The idle time by cause if the step is a pipeline, otherwise None."""
    expert_imbalance: float = 1.0
    """The tokens of the busiest rank's experts relative to the mean over ranks, 1 if unknown."""
    bytes_ratios: Mapping[str, float] = field(default_factory=dict)
    """The ratio of sent bytes to the bytes that the formula of the step gives, keyed by mesh axis.

    The sent bytes were counted at the process groups.
    """

    def format_share(self, seconds: float) -> str:
        """Return a time as a percentage of the wall time of the step."""
        return format_percent(seconds / self.seconds)


def find_exposed_communication(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding for each mesh axis or kind of call with exposed communication.

    A finding names the first of these likely causes that costs at least 5 % of the step: gradients
    are reduced after each microbatch, by many small calls or in one bucket, or parameters are
    gathered without prefetch. Other communication is reported from 10 % of the step.
    """
    for part in step.communication:
        seconds = part.exposed_seconds
        sync_seconds = seconds * (step.syncs - 1) / step.syncs
        min_seconds = MIN_SHARE * step.seconds
        is_costly = seconds >= min_seconds and not part.is_waiting
        command = ""
        if part.reductions and sync_seconds >= min_seconds:
            kind, seconds = "sync-per-microbatch", sync_seconds
            cause = f"Gradients are reduced after each of {step.syncs} microbatches."
            command = step.command("ddp", microbatches=step.syncs, no_sync=(False, True))
        elif is_costly and _is_latency_bound(part):
            kind = "small-calls"
            cause = (
                f"Its {part.reductions:g} reductions of "
                f"{format_bytes(part.reduced_bytes / part.reductions)} on average probably cost "
                "latency. Combine them, in DDP by a larger bucket_cap_mb."
            )
        elif is_costly and _has_one_bucket(part):
            kind = "one-bucket"
            bucket_mb = 2.0 ** round(math.log2(part.largest_bytes / SUGGESTED_BUCKETS / 2**20))
            cause = (
                f"The gradients ({format_bytes(part.largest_bytes)}) are in one bucket, which "
                "probably starts after the backward pass. DDP makes several with "
                f"bucket_cap_mb={bucket_mb:g}."
            )
            sizes = (bucket_mb, step.settings.get("bucket_mb", 25))
            command = step.command("ddp", bucket_mb=sizes)
        elif is_costly and part.is_on_demand:
            kind = "no-prefetch"
            cause = "Parameters are probably gathered only when they are needed."
            command = step.command("fsdp", prefetch=("default", "explicit"))
        elif seconds >= MIN_GENERAL_SHARE * step.seconds:
            kind = "exposed-communication"
            cause = "Larger microbatches may hide more."
            if part.is_waiting:
                kind = "waiting"
                cause = "Most of it is waiting for late ranks."
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


def _is_latency_bound(part: Communication) -> bool:
    """Return True if a step with gradient buckets makes many small reductions."""
    has_many = part.has_buckets and part.reductions >= MIN_SMALL_CALLS
    return has_many and part.reduced_bytes < MAX_SMALL_BYTES * part.reductions


def _has_one_bucket(part: Communication) -> bool:
    """Return True if one call sums nearly all gradients of a step, and they have 256 KiB or more.

    Such a call starts when no computation is left that could hide it. The result is False if the
    step has no parameter for the bucket size.
    """
    has_most = part.reductions > 0 and part.largest_bytes > MIN_BUCKET_SHARE * part.reduced_bytes
    return part.has_buckets and has_most and part.largest_bytes >= MIN_BUCKET_BYTES


def find_host_bound(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding if nothing runs on the device for 10 % of the step or more.

    Nothing is yielded for pipelines, whose schedule explains idle time.
    """
    if step.pipeline is None:
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

    Uneven stages are reported from 5 % of the step, the bubble with messages from 10 %.
    """
    pipeline = step.pipeline
    if pipeline is None:
        return
    layers = pipeline.layers_by_stage
    command = ""
    if len(set(layers)) > 1 and sum(layers) % len(layers) == 0:
        equal = [sum(layers) // len(layers)] * len(layers)
        splits = tuple("+".join(map(str, split)) for split in (layers, equal))
        command = step.command("pp", layers_per_stage=splits)
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
        "Stages wait for each other or for messages for {share} of {step}. "
        "More microbatches may shorten the bubble.",
        command,
        min_share=MIN_GENERAL_SHARE,
    )


def find_hot_experts(step: StepEvidence) -> Iterator[Finding]:
    """Yield a finding if the experts of a rank take far more tokens than the mean over ranks."""
    if step.expert_imbalance < MIN_EXPERT_IMBALANCE:
        return
    command = ""
    if step.settings.get("capacity") == 0:
        command = step.command("ep_step", capacity=(0, 1.25))
    yield Finding(
        kind="hot-experts",
        subject=f"{step.name} ({step.expert_imbalance:.2f} times)",
        message=f"The busiest rank of {step.name} takes {step.expert_imbalance:.2f} times as many "
        "tokens as the mean. Other ranks probably wait for it.",
        time_share=None,
        command=command,
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
                subject=f"{step.name} ({ratio:.3f} times on {axis})",
                message=f"{step.name} sends {ratio:.3f} times the expected bytes on {axis}. "
                "It may communicate other data than its formula assumes.",
                time_share=None,
            )


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
