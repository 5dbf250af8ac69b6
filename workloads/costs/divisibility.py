"""The equations that a step must satisfy: what each axis divides. Pure.

Each rule returns its equation with numbers if it is broken, and None otherwise.
"""

from typing import TYPE_CHECKING

from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import find_context_method
from parbench.workloads.model.shapes import Shape
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.pipeline_parallel.pipeline_case import format_checkpointing_refusal

if TYPE_CHECKING:
    from parbench.workloads.costs.step_spec import StepSpec

MAX_GATHERED_STAGES = 3
"""The stages per rank that torch's pipeline runtime keeps gathered under FSDP."""


def find_broken_rule(spec: "StepSpec", ranks: int) -> str | None:
    """Return the first equation that a step on so many ranks does not satisfy."""
    has_experts = spec.moe is not None
    return (
        spec.dims.find_broken_rule(ranks, spec.moe.experts if spec.moe else 0)
        or find_indivisible_heads(spec.shape, spec.dims.tp, has_experts=has_experts)
        or find_indivisible_sequence(spec.shape, spec.dims, spec.cp_method, spec.ulysses)
        or _find_broken_batch(spec)
        or find_broken_pipeline(spec)
        or _find_broken_experts(spec)
        or _find_broken_split_backward(spec)
    )


def find_indivisible_heads(shape: Shape, tp: int, *, has_experts: bool = False) -> str | None:
    """Return the size of a layer that ``tp`` does not divide. It does not split experts."""
    names = (
        ["heads", "kv_heads", "hidden"] if has_experts else ["heads", "kv_heads", "hidden", "ffn"]
    )
    for name in names:
        if getattr(shape, name) % tp:
            return f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    return None


def find_indivisible_sequence(
    shape: Shape, dims: ParallelDims, cp_method: str, ulysses: int = 0
) -> str | None:
    """Return the equation by which ``cp`` or ``tp`` do not divide tokens, or ``cp`` heads."""
    cp, tp = dims.cp, dims.tp
    method = find_context_method(cp_method)
    if cp > 1:
        rule = method.find_broken_rule(shape, ranks=cp, ulysses=ulysses, tp=tp)
        if rule:
            return rule
    if shape.sequence // cp % tp:
        divisor = f"(cp({cp}) * tp({tp}))" if cp > 1 else f"tp({tp})"
        return f"sequence({shape.sequence}) % {divisor} != 0"
    return None


def _find_broken_batch(spec: "StepSpec") -> str | None:
    for name in ("microbatch", "microbatches"):
        if getattr(spec, name) < 1:
            return f"{name}({getattr(spec, name)}) < 1"
    return None


def find_broken_pipeline(spec: "StepSpec") -> str | None:
    """Return the rule of the schedule or of torch's runtime that a pipeline breaks."""
    try:
        pipeline = spec.pipeline
    except UserError as error:
        return str(error)
    if pipeline is None:
        return None
    stages_per_rank, fsdp = pipeline.size.stages_per_rank, spec.dims.fsdp
    if fsdp > 1 and stages_per_rank > MAX_GATHERED_STAGES:
        reason = "torch's runtime keeps so many stages gathered and would gather the others again"
        return f"chunks({stages_per_rank}) > {MAX_GATHERED_STAGES} with fsdp({fsdp}): {reason}"
    return None


def _find_broken_experts(spec: "StepSpec") -> str | None:
    if spec.moe is None:
        return None
    tp, etp = spec.dims.tp, spec.dims.etp
    if spec.moe.expert_ffn % etp:
        return f"expert_ffn({spec.moe.expert_ffn}) % etp({etp}) != 0"
    if spec.moe.dense_layers and spec.shape.ffn % tp:
        return f"ffn({spec.shape.ffn}) % tp({tp}) != 0"
    if tp > 1 and not spec.sequence_parallel:
        return "experts need sequence_parallel = true with tp > 1: each rank routes its own tokens"
    return None


def _find_broken_split_backward(spec: "StepSpec") -> str | None:
    """Return why a schedule cannot split the backward pass of this step."""
    if spec.pipeline is None or not spec.pipeline.schedule.splits_backward:
        return None
    schedule = spec.pipeline.schedule.name
    if spec.checkpointing != "none":
        return format_checkpointing_refusal(schedule, spec.checkpointing)
    if spec.dims.is_sharded:
        reason = (
            f"fsdp({spec.dims.fsdp}): torch's FSDP reduces gradients after a full backward pass"
        )
    elif spec.moe is not None:
        reason = f"experts({spec.moe.experts}): a backward pass combines their tokens only once"
    else:
        return None
    return f"schedule = {schedule} splits the backward pass, which is not allowed with {reason}"
