"""What a rank holds in memory, by component, in bytes. Pure.

State is 2 + 2 + 12 bytes a parameter in mixed precision and 4 + 4 + 8 in float32 (arXiv 1910.02054); activations are
``workloads.costs``'s closed forms. Not counted: what a collective or an allocator takes, which ``Efficiency.memory``
leaves room for.
"""

from dataclasses import dataclass

from workloads.costs.communication_pattern import (
    LayerShape,
    gpt_activation_bytes,
    recompute_activation_bytes,
    state_bytes,
    swiglu_activation_bytes,
)
from workloads.planner.ask import Ask
from workloads.planner.models import Model, num_model_parameters
from workloads.planner.placement import expert_shards
from workloads.planner.stage_parts import Part, elements_of

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank; ``buffers`` are parameters gathered for a pass, and gradients not yet reduced."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def state(self) -> float:
        """What stays from step to step: parameters, gradients, optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All components at once: an upper bound, for their peaks need not meet."""
        return self.state + self.activations + self.buffers


def memory_of(ask: Ask, part: Part) -> RankMemory:
    """Return the memory of a rank of the pipeline; all ranks of the other axes are alike."""
    dense, experts = elements_of(ask, part)
    mixed = ask.element_bytes < 4
    states = [
        state_bytes("zero3", round(dense), ask.fsdp, mixed=mixed),
        state_bytes("zero3", round(experts), expert_shards(ask.mesh), mixed=mixed),
    ]
    return RankMemory(
        parameters=sum(each.parameters for each in states),
        gradients=sum(each.gradients for each in states),
        optimizer=sum(each.optimizer for each in states),
        activations=activation_bytes(ask, part),
        buffers=gathered_bytes(ask, part, dense, experts),
    )


def total_state_bytes(model: Model, element_bytes: int) -> float:
    """Return the state of the whole model, each parameter once."""
    return state_bytes("ddp", num_model_parameters(model), 1, mixed=element_bytes < 4).total


def gathered_bytes(ask: Ask, part: Part, dense: float, experts: float) -> float:
    """Return what FSDP holds whole for a while: two layers and one's gradients, or all of a stage in a pipeline.

    A pipeline's ranks keep their parameters gathered and their gradients unreduced through all microbatches, as torch's
    runtime does.
    """
    if ask.fsdp == 1:
        return 0.0
    of_experts = experts if expert_shards(ask.mesh) > 1 else 0.0
    if ask.pp > 1:
        return 2 * (dense + of_experts) * ask.element_bytes
    return 3 * (dense + of_experts) / max(1, part.layers) * ask.element_bytes


def activation_bytes(ask: Ask, part: Part) -> float:
    """Return what backward needs of the microbatches in flight: layers, a layer computed again, last norm, logits."""
    held = part.in_flight * part.layers * kept_bytes(ask)
    again = layer_bytes(ask) if ask.checkpointing != "none" else 0.0
    return held + again + (head_bytes(ask, part) if part.head else 0.0)


def layer_bytes(ask: Ask) -> float:
    """Return what backward needs of one layer and microbatch; an FFN of experts holds top-k rows, in and out, more."""
    shape = ask.model.shape
    layer = _layer_shape(ask, shape.ffn * max(1, ask.model.top_k))
    formula = swiglu_activation_bytes if shape.recipe == "llama" else gpt_activation_bytes
    moved = 2 * ask.model.top_k * ask.local_tokens * shape.hidden * ask.element_bytes / ask.tp
    held = formula(layer, ask.element_bytes, tp=ask.tp, sequence_parallel=ask.tp > 1) + moved
    if ask.fused_kernels or shape.recipe != "llama":
        return held
    return held + 2 * _composed_bytes(ask) + ask.local_tokens * shape.hidden * ask.element_bytes / ask.tp


def kept_bytes(ask: Ask) -> float:
    """Return what of a layer is kept from forward to backward.

    ``full`` keeps the layer's input, over tp with sequence parallelism. ``selective`` keeps that and the results of
    matrix products and attention: b s h e (1 + (4 + 2g + 2f/h) / t) for llama, f/h for gpt, g = a_kv / a.
    """
    if ask.checkpointing == "none":
        return layer_bytes(ask)
    shape = ask.model.shape
    entry = recompute_activation_bytes(_layer_shape(ask, shape.ffn), ask.element_bytes) / ask.tp
    if ask.checkpointing == "full":
        return entry
    matrices = 2 if shape.recipe == "llama" else 1
    ffn = matrices * shape.ffn / shape.hidden * max(1, ask.model.top_k)
    return entry * (1 + 4 + 2 * shape.kv_heads / shape.heads + ffn)


def _layer_shape(ask: Ask, ffn: int) -> LayerShape:
    shape = ask.model.shape
    return LayerShape(
        microbatch=ask.microbatch,
        sequence=shape.sequence // ask.cp,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=ffn,
    )


def head_bytes(ask: Ask, part: Part) -> float:
    """Return the last norm's input and output, b s h e (1/t + 1), and the loss of b s V logits.

    The loss keeps its log-softmax alone, or logits and a log-softmax in float32. A schedule that does backward at once
    holds those of one microbatch. Where the vocabulary is whole, ``tp`` has sequence parallelism split its tokens.
    """
    shape = ask.model.shape
    output = 1 if ask.sharded_vocabulary else 1 / ask.tp
    norm = ask.local_tokens * shape.hidden * ask.element_bytes * (1 / ask.tp + output)
    composed = 0.0 if ask.fused_kernels or shape.recipe != "llama" else _composed_bytes(ask)
    each = ask.element_bytes + (_FLOAT_BYTES if ask.float32_loss else 0)
    return held_logits(ask, part) * (norm + composed + ask.local_tokens * shape.vocabulary / ask.tp * each)


def held_logits(ask: Ask, part: Part) -> float:
    """Return the microbatches whose logits are kept at once."""
    return part.in_flight if ask.schedule in ("gpipe", "looped_bfs") else 1


def _composed_bytes(ask: Ask) -> float:
    """Return what an RMSNorm of elementary operations keeps more: input and normed input in float32."""
    return ask.local_tokens * ask.model.shape.hidden * (2 * _FLOAT_BYTES - ask.element_bytes) / ask.tp
