"""The bytes that a rank holds in a step: model state, activations, buffers. Pure.

**State** (arXiv 1910.02054): parameters, gradients and optimizer of a rank's shards.

**Activations** are what each module saves for backward (Korthikanti et al., arXiv 2205.05198,
section 4), with flash attention and without dropout. ``tp`` splits heads and the FFN's inner size.
Sequence parallelism also shards the inputs of the blocks. Kernels may save more: torch's composite
RMSNorm on the CPU saves float32 copies, and DTensor saves gathered inputs.

**Buffers** are parameters that FSDP has gathered, gradients that are not reduced yet, and the layer
that is being recomputed. The memory of collectives and of the allocator is not counted.
"""

from dataclasses import dataclass, replace

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import count_elements, count_shard, list_units
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.model.shapes import MIXED, Widths


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The bytes of model state of one rank. ``optimizer`` includes master weights."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def state(self) -> float:
        """All of it, which stays from step to step."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class RankMemory(StateBytes):
    """The bytes of one rank."""

    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """The sum of all components: an upper bound, because they need not peak together."""
        return self.state + self.activations + self.buffers


def rank_memory(view: RankView) -> RankMemory:
    """Return the memory of a rank."""
    state = state_memory(view)
    return RankMemory(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations_equation(view).value,
        buffers=buffers_equation(view).value,
    )


def state_bytes(elements: float, widths: Widths = MIXED) -> StateBytes:
    """Return the state of parameters that one rank trains (arXiv 1910.02054, section 3.1).

    Mixed precision takes 2 + 2 + 12 bytes per parameter, float32 takes 4 + 4 + 8.
    """
    return StateBytes(
        parameters=widths.parameters * elements,
        gradients=widths.gradients * elements,
        optimizer=widths.optimizer * elements,
    )


def state_memory(view: RankView) -> StateBytes:
    """Return the state of a rank, of which each stage of ZeRO shards more.

    FSDP keeps its shard next to gathered parameters, which are buffers. Simulated compute updates
    no parameters, so that the optimizer has no state.
    """
    spec = view.spec
    state = state_bytes(owned_elements(view), spec.widths)
    if spec.zero1:
        optimizer = state_bytes(updated_elements(view), spec.widths).optimizer
        state = replace(state, optimizer=optimizer)
    if spec.is_simulated:
        state = replace(state, optimizer=0.0)
    return state


def owned_elements(view: RankView) -> float:
    """Return the parameters of a rank's shard: over fsdp x cp, experts over ``efsdp``."""
    dense = count_shard(view, "replicated", "split")
    return dense + count_elements(view, "routed") / view.spec.dims.expert_shards


def updated_elements(view: RankView) -> float:
    """Return the parameters that a rank updates: its shard, or its share by ZeRO-1."""
    spec = view.spec
    if not spec.zero1:
        return owned_elements(view)
    dense = count_elements(view, "replicated", "split") / spec.dims.size("dp", "cp")
    return dense + count_elements(view, "routed") / spec.dims.expert_replicas


def state_equation(view: RankView) -> Equation:
    """Return the bytes of state: the widths that ZeRO shards and those that it does not."""
    spec, dims = view.spec, view.spec.dims
    optimizer = 0 if spec.is_simulated else spec.widths.optimizer
    widths = [str(spec.widths.parameters), str(spec.widths.gradients), str(optimizer)]
    num_unsharded = {0: 3, 1: 2}.get(spec.zero_stage, 0)
    unsharded, sharded = " + ".join(widths[:num_unsharded]), " + ".join(widths[num_unsharded:])
    symbols = {"parameters": float(count_elements(view, "replicated", "split"))}
    shards = {"parameters": dims.size("dp", "cp") if spec.zero1 else dims.shard_size}
    routed = count_elements(view, "routed")
    if routed:
        symbols["expert_parameters"] = float(routed)
        shards["expert_parameters"] = dims.expert_replicas if spec.zero1 else dims.expert_shards
    terms: list[str] = []
    for name, ranks in shards.items():
        if unsharded:
            terms.append(f"({unsharded}) * {name}")
        if sharded:
            terms.append(f"({sharded}) * {name} / {ranks}")
    return Equation(text=" + ".join(terms), symbols=symbols)


def buffers_equation(view: RankView) -> Equation:
    """Return the bytes that are held for a part of a step.

    FSDP holds two gathered units and the gradients of one. All parameters stay gathered in a
    pipeline, and with ``reshard=false``. Gradients that are not reduced in every microbatch stay
    unsharded.
    """
    spec = view.spec
    terms: list[str] = []
    symbols = dict(view.symbols)
    if spec.checkpointing != "none":
        terms.append(_format_recomputed_layer(view))
    if spec.dims.is_sharded:
        units = _list_gathered_units(view)
        symbols["parameters"] = float(sum(count * size for count, size in units))
        symbols["unit_parameters"] = float(max(size for count, size in units if count))
        is_gathered = spec.dims.pp > 1 or not spec.reshard
        gathered = "parameters" if is_gathered else "2 * unit_parameters"
        terms.append(f"{gathered} * bytes_per_element")
        reduces_late = spec.dims.pp > 1 or spec.gradient_syncs < spec.microbatches
        unreduced = "parameters" if reduces_late else "unit_parameters"
        terms.append(f"{unreduced} * reduce_bytes")
    return Equation(text=" + ".join(terms) or "0", symbols=symbols)


def _list_gathered_units(view: RankView) -> list[tuple[int, int]]:
    """Return the number of equal units and the elements of one, of those that FSDP gathers."""
    units = list_units(view)
    has_sharded_experts = view.spec.dims.expert_shards > 1
    sizes: list[tuple[int, int]] = []
    for count, parts in ((1, units.embeddings), *units.layers, (1, units.head)):
        gathered = [part for part in parts if has_sharded_experts or part.kind != "routed"]
        sizes.append((count, sum(part.numel for part in gathered)))
    return sizes


def _format_recomputed_layer(view: RankView) -> str:
    """Return what the layer that is being recomputed saves, of which its input is kept already."""
    return f"({layer_text(view.spec, 'none')}) - {layer_text(view.spec, 'full')}"


def activations_equation(view: RankView) -> Equation:
    """Return the bytes that all microbatches in flight save for backward.

    The maxima of layers and of logits are added up, although they need not coincide.
    """
    terms = [f"microbatches_in_flight * ({_layers_text(view, view.spec.checkpointing)})"]
    if view.has_embedding:
        terms.append(f"microbatches_in_flight * ({embedding_text(view.spec)})")
    if view.has_head:
        terms.append(f"logits_in_flight * ({head_text(view.spec)})")
    symbols = {
        **view.symbols,
        "microbatches_in_flight": view.microbatches_in_flight,
        "logits_in_flight": view.logits_in_flight,
    }
    return Equation(text=" + ".join(terms), symbols=symbols)


def layers_equation(view: RankView, checkpointing: str) -> Equation:
    """Return the bytes that a rank's layers save of one microbatch."""
    return Equation(text=_layers_text(view, checkpointing), symbols=view.symbols)


def _layers_text(view: RankView, checkpointing: str) -> str:
    """Return what the layers save. With ``full:K`` all but one layer in K save everything."""
    kinds = [("layers", view.spec)]
    if view.spec.moe is not None:
        kinds = [("moe_layers", view.spec)]
    if view.dense_layers:
        kinds.append(("dense_layers", replace(view.spec, moe=None)))
    terms: list[str] = []
    for layers, spec in kinds:
        text = layer_text(spec, checkpointing)
        if checkpointing == "full" and spec.checkpoint_every > 1:
            others = f"({layers} - recomputed_{layers}) * ({layer_text(spec, 'none')})"
            terms.append(f"recomputed_{layers} * {text} + {others}")
        else:
            terms.append(f"{layers} * ({text})")
    return " + ".join(terms)


INPUT = "sharded_tokens * hidden * bytes_per_element"
"""A tensor between blocks, and the input of a block, which ``tp`` gathers again for backward."""


def layer_text(spec: StepSpec, checkpointing: str) -> str:
    """Return the bytes that a layer saves of one microbatch.

    ``full`` saves its input, ``selective`` its input and the outputs of GEMMs and attention.
    """
    if checkpointing == "full" or (checkpointing == "selective" and spec.is_simulated):
        return INPUT
    if checkpointing == "selective":
        return f"3 * {INPUT} + {_attention_output_text(spec)} + {_ffn_gemm_text(spec)}"
    norms = f"2 * ({norm_text(spec)})"
    ffn = _moe_text(spec) if spec.moe else _ffn_text(spec)
    return f"{norms} + {_attention_text(spec)} + {ffn}"


def norm_text(spec: StepSpec) -> str:
    """Return a norm's input, and float32 statistics: LayerNorm's two per token, RMSNorm's one."""
    statistics = 8 if spec.shape.recipe == "gpt" else 4
    return f"{INPUT} + {statistics} * sharded_tokens"


def _attention_text(spec: StepSpec) -> str:
    """Return the input of the projections, and what attention and its output projection save.

    Latent attention also saves its compressions before and after their norms.
    """
    if spec.is_simulated:
        return f"{INPUT} + tokens * hidden / tp * bytes_per_element"
    terms = [INPUT, _attention_output_text(spec)]
    latent = spec.shape.latent
    if latent is not None:
        ranks = latent.q_lora_rank + latent.kv_lora_rank
        terms.append(f"2 * sharded_tokens * {ranks} * bytes_per_element")
    if spec.shape.qk_norm:
        heads = "tokens * (heads + kv_heads) / tp"
        terms.append(f"{heads} * (head_size * bytes_per_element + 4)")
    return " + ".join(terms)


def _attention_output_text(spec: StepSpec) -> str:
    """Return queries, keys, values, flash attention's result and its float32 log-sum-exps."""
    keys = "kv_heads * (head_size + value_size)"
    if spec.shape.latent is not None:
        keys = "heads * (head_size + value_size)"
    if spec.dims.cp > 1 and spec.ulysses_ranks > 1:
        # The output projection saves the result after the all_to_all.
        keys += " + heads * value_size"
    elements = f"(heads * (head_size + value_size) + {keys})"
    return f"tokens / tp * ({elements} * bytes_per_element + 4 * heads)"


def _count_inner_tensors(spec: StepSpec) -> int:
    """Return the saved tensors of the FFN's inner size.

    They are before and after GELU; for SwiGLU the gate, its SiLU, the up projection, the product.
    """
    return 4 if spec.shape.recipe == "llama" else 2


def _ffn_text(spec: StepSpec) -> str:
    inner = f"{_count_inner_tensors(spec)} * tokens * ffn / tp * bytes_per_element"
    return f"{INPUT} + {inner}"


def _ffn_gemm_text(spec: StepSpec) -> str:
    gates = 2 if spec.shape.recipe == "llama" else 1
    if spec.moe is None:
        return f"{gates} * tokens * ffn / tp * bytes_per_element"
    return f"sharded_tokens * top_k * ({gates} * expert_ffn + hidden) * bytes_per_element"


def _moe_text(spec: StepSpec) -> str:
    """Return what a MoE layer saves with balanced routing.

    The router saves its input and scores in float32. Each of a token's k rows saves its input, the
    inner tensors, its output, its weighted output, its weight and its 8-byte indices.
    """
    inner = f"{_count_inner_tensors(spec)} * expert_ffn"
    router = "sharded_tokens * 4 * (hidden + experts)"
    rows = f"sharded_tokens * top_k * ((3 * hidden + {inner} + 1) * bytes_per_element + 32)"
    shared = f"{INPUT} + sharded_tokens * shared * {inner} * bytes_per_element"
    return f"{router} + {rows} + {shared}"


def embedding_text(spec: StepSpec) -> str:
    """Return the token ids, and the positions of a sequence if they are learned."""
    if spec.shape.has_learned_positions:
        return "8 * sharded_tokens + 8 * sharded_tokens / microbatch"
    return "8 * sharded_tokens"


def head_text(spec: StepSpec) -> str:
    """Return the final norm, the head's input, the log-softmax, the targets and their number.

    ``tp`` splits logits by vocabulary. The loss and its log-softmax are in float32.
    """
    logits = "tokens * vocabulary / tp * 4"
    return f"{norm_text(spec)} + {INPUT} + {logits} + 8 * tokens + 4"
