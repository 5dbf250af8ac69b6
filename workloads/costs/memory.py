"""The bytes that a rank holds in a step: model state, activations, buffers. Pure.

**State** (arXiv 1910.02054): parameters, gradients and optimizer of a rank's shards.

**Activations** are what each module saves for backward (Korthikanti et al., arXiv 2205.05198,
section 4). A layer of a GPT saves 34 s b h / t bytes, of which 2 s b h / t are masks of dropout if
the model has it. Flash attention keeps statistics in place of their 5 a s^2 b / t of scores. ``tp``
splits heads, the FFN's inner size and, with sequence parallelism, the inputs of the blocks. Kernels
may save more: torch's composite RMSNorm on the CPU saves float32 copies, DTensor saves gathered
inputs.

**Buffers** are the gradients of logits, parameters that FSDP has gathered, gradients that are not
reduced yet, copies of gradients that a mesh reduces without FSDP, and the layer that is being
recomputed. The memory of collectives and of the allocator is not counted.
"""

from dataclasses import asdict, dataclass, replace

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import (
    Parts,
    count_elements,
    count_shard,
    list_units,
)
from parbench.workloads.costs.step_spec import RankView, StepSpec


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The bytes of parameters, gradients and optimizer state that one rank holds."""

    parameters: float
    """The bytes of this rank's weights in the precision of forward and backward."""
    gradients: float
    """The bytes of the gradients of these weights."""
    optimizer: float
    """The bytes of the optimizer state: Adam's moments and, if any, float32 master weights."""

    @property
    def state(self) -> float:
        """The bytes of parameters, gradients and optimizer state together.

        All three stay in memory from step to step.
        """
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class RankMemory(StateBytes):
    """The most bytes of state, activations and buffers that one rank holds during a step."""

    activations: float
    """The bytes of tensors that all microbatches in flight save for backward."""
    buffers: float
    """The bytes of tensors that are held for part of a step.

    They are gathered parameters, gradients that are not reduced yet, copies of gradients that are
    reduced without FSDP, and gradients of activations.
    """

    @property
    def total(self) -> float:
        """The bytes of model state, activations and buffers together.

        It is an upper bound of the rank's memory, because activations and buffers need not be
        largest at the same time.
        """
        return self.state + self.activations + self.buffers


def compute_rank_memory(view: RankView) -> RankMemory:
    """Return the analytical bytes of one rank's memory during a step, by component."""
    return RankMemory(
        **asdict(compute_state_memory(view)),
        activations=make_activations_equation(view).value,
        buffers=make_buffers_equation(view).value,
    )


def compute_state_memory(view: RankView) -> StateBytes:
    """Return the bytes of parameters, gradients and optimizer state that one rank holds.

    Of a component that ZeRO or FSDP shards, only the rank's shard counts. Parameters that FSDP
    gathers for a layer do not count, because they are buffers. With simulated compute the optimizer
    has no state, because parameters are not updated.
    """
    widths = view.spec.widths
    owned = count_owned_elements(view)
    return StateBytes(
        parameters=widths.parameters * owned,
        gradients=widths.gradients * owned,
        optimizer=widths.optimizer * count_updated_elements(view),
    )


def count_owned_elements(view: RankView) -> float:
    """Return the number of elements of model parameters that a rank keeps between steps.

    With FSDP they are the rank's shard, otherwise all parameters of the rank's pipeline stages.
    Routed experts are sharded only over the ranks that hold the same experts.
    """
    dense = count_shard(view, "replicated", "split")
    return dense + count_elements(view, "routed") / view.spec.dims.expert_shards


def count_updated_elements(view: RankView) -> float:
    """Return the number of elements of model parameters that one rank's optimizer updates.

    With ZeRO-1 they are the part whose optimizer state the rank has. Otherwise they are all
    parameters that the rank keeps between steps. With simulated compute there are none.
    """
    spec = view.spec
    if spec.is_simulated:
        return 0.0
    if not spec.zero1:
        return count_owned_elements(view)
    dense = count_elements(view, "replicated", "split") / spec.dims.size("dp", "cp")
    return dense + count_elements(view, "routed") / spec.dims.expert_replicas


def make_state_equation(view: RankView) -> Equation:
    """Return the equation of the bytes of parameters, gradients and optimizer state of one rank.

    In the equation, ``parameters`` is the number of parameter elements that the rank keeps between
    steps, and ``updated_parameters`` the number of those that its optimizer updates. ZeRO-1 shards
    only the second number, FSDP both.
    """
    widths = view.spec.widths
    return Equation(
        text=f"({widths.parameters} + {widths.gradients}) * parameters"
        f" + {widths.optimizer} * updated_parameters",
        symbols={
            "parameters": count_owned_elements(view),
            "updated_parameters": count_updated_elements(view),
        },
    )


def make_buffers_equation(view: RankView) -> Equation:
    """Return the equation of the peak bytes of buffers on one rank during a step.

    Buffers are tensors that exist for a part of a step. The result is for the largest of four
    moments:

    * At the loss, FSDP holds the gathered head, and autograd two float32 gradients of the logits.
    * Before a layer's backward pass, FSDP holds two gathered layers. Checkpointing holds the
      activations of the recomputed layer. Without it, autograd holds gradients inside the FFN.
    * After that backward pass, FSDP holds the layer's full gradients. The activations of the layer
      are free again and are subtracted.
    * At the end of backward, ``GradientReducer`` holds copies of all gradients that it reduces. All
      activations are free again and are subtracted.

    FSDP keeps all parameters gathered in a pipeline, and also with ``reshard=false``. Gradients that are
    not reduced in every microbatch stay unsharded and count. The gradients of the rank's shard are
    subtracted, because they already count as model state.
    """
    spec, symbols = view.spec, view.symbols
    layer = format_layer_bytes(spec, spec.checkpointing)
    at_loss = "2 * 4 * tokens * vocabulary / tp"
    before_layer = f"({format_layer_bytes(spec, 'none')}) - {INPUT}"
    if spec.checkpointing == "none":
        before_layer = _format_inner_gradients_bytes(spec)
    texts = []
    if spec.dims.is_sharded:
        symbols = symbols | _count_gathered_parameters(view)
        is_always_gathered = spec.dims.pp > 1 or not spec.reshard
        layers = "parameters" if is_always_gathered else "2 * layer_parameters"
        head = "parameters" if is_always_gathered else "head_parameters"
        before_layer += f" + {layers} * bytes_per_element"
        at_loss += f" + {head} * bytes_per_element"
        if spec.dims.pp > 1 or spec.gradient_syncs < spec.microbatches:
            unreduced = " + parameters * reduce_bytes - shard_gradients"
            before_layer += unreduced
            at_loss += unreduced
        else:
            gradients = "layer_parameters * reduce_bytes"
            texts.append(f"{layers} * bytes_per_element + {gradients} - ({layer})")
            if spec.microbatches == 1:
                at_loss += " - shard_gradients"  # They do not exist yet.
    copied = _count_copied_gradients(view)
    if copied:
        activations = make_activations_equation(view)
        symbols = {**symbols, **activations.symbols, "copied_gradients": copied}
        texts.append(f"copied_gradients * reduce_bytes - ({activations.text})")
    texts.append(before_layer)
    if view.has_head:
        texts.append(at_loss)
    moments = [Equation(text=text, symbols=symbols) for text in texts]
    return max(moments, key=lambda moment: moment.value)


def _count_copied_gradients(view: RankView) -> int:
    """Return the number of elements of gradients that ``GradientReducer`` copies to reduce them.

    They are all gradients of the rank without FSDP, and those of experts that FSDP does not shard.
    There are none if DDP or ZeRO-1 reduces the gradients.
    """
    spec = view.spec
    dims = spec.dims
    is_ddp = dims.tp == dims.pp == 1 and not spec.moe
    if is_ddp or dims.data_ranks == 1 or spec.zero1 == "distributed":
        return 0
    if not dims.is_sharded:
        return count_elements(view)
    return count_elements(view, "routed") if dims.expert_shards == 1 else 0


def _format_inner_gradients_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes of gradients inside one FFN for one microbatch, as text.

    Backward holds these gradients at the same time. They are those of the tensors that have the
    FFN's inner size: gate, up and their product for llama, input and output of GELU for gpt.
    """
    gradients = 3 if spec.shape.recipe == "llama" else 2
    if spec.moe is not None:
        return f"{gradients} * sharded_tokens * top_k * expert_ffn * bytes_per_element"
    return f"{gradients} * tokens * ffn / tp * bytes_per_element"


def _count_gathered_parameters(view: RankView) -> dict[str, float]:
    """Return the values of the symbols in equations of FSDP's buffers, keyed by symbol.

    ``parameters``, ``layer_parameters`` and ``head_parameters`` are the numbers of elements after
    FSDP has gathered all of the rank's stages, the largest layer, or the final norm and the head.
    ``shard_gradients`` is the number of bytes of the gradients of this rank's shard.
    """
    units = list_units(view)
    layers = [(count, _count_gathered(view, parts)) for count, parts in units.layers]
    head = _count_gathered(view, units.head)
    layer_sum = sum(count * size for count, size in layers)
    return {
        "parameters": float(layer_sum + _count_gathered(view, units.embeddings) + head),
        "layer_parameters": float(max(size for _, size in layers)),
        "head_parameters": float(head),
        "shard_gradients": compute_state_memory(view).gradients,
    }


def _count_gathered(view: RankView, parts: Parts) -> int:
    """Return the number of parameter elements that FSDP gathers for one unit, such as a layer.

    ``parts`` are the parameters of the unit. Routed experts count only if FSDP shards them.
    """
    has_sharded_experts = view.spec.dims.expert_shards > 1
    return sum(part.numel for part in parts if has_sharded_experts or part.kind != "routed")


def make_activations_equation(view: RankView) -> Equation:
    """Return the equation of the bytes of activations that one rank saves for backward.

    It covers all microbatches in flight: those whose forward pass has run and whose backward pass
    has not. The maximum for layers and the maximum for logits are added, although they may occur at
    different times.
    """
    terms = [f"microbatches_in_flight * ({make_layers_equation(view).text})"]
    if view.has_embedding:
        embeddings = "8 * sharded_tokens"  # token ids
        if view.spec.shape.recipe == "gpt":
            embeddings += " + 8 * sharded_tokens / microbatch"  # positions, which are learned
        terms.append(f"microbatches_in_flight * ({embeddings})")
    if view.has_head:
        # The inputs of the norm and of the head, the log-softmax, the targets and their number.
        logits = "tokens * vocabulary / tp * 4"
        head = f"{format_norm_bytes(view.spec)} + {INPUT} + {logits} + 8 * tokens + 4"
        terms.append(f"logits_in_flight * ({head})")
    symbols = {
        **view.symbols,
        "microbatches_in_flight": view.microbatches_in_flight,
        "logits_in_flight": view.logits_in_flight,
    }
    return Equation(text=" + ".join(terms), symbols=symbols)


def make_layers_equation(view: RankView) -> Equation:
    """Return the equation of the bytes that all layers of a rank save for one microbatch.

    With the checkpointing ``full:K``, one layer in K saves only its input, and the others save all
    that backward needs.
    """
    terms: list[str] = []
    for layers, _, moe in view.layer_kinds:
        spec = replace(view.spec, moe=moe)
        text = format_layer_bytes(spec, spec.checkpointing)
        if spec.checkpoint_every > 1:
            others = f"({layers} - recomputed_{layers}) * ({format_layer_bytes(spec, 'none')})"
            terms.append(f"recomputed_{layers} * {text} + {others}")
        else:
            terms.append(f"{layers} * ({text})")
    return Equation(text=" + ".join(terms), symbols=view.symbols)


INPUT = "sharded_tokens * hidden * bytes_per_element"
"""The equation of the bytes of one activation (b, s, hidden) between blocks, on one rank.

The input of a block has this size as well: ``tp`` gathers it again in backward. With sequence
parallelism ``sharded_tokens`` is divided by ``tp``.
"""


def format_layer_bytes(spec: StepSpec, checkpointing: str) -> str:
    """Return the equation of the bytes that one layer saves for one microbatch, as text.

    The bytes are those of one rank. With ``checkpointing="none"`` the layer saves all that backward
    needs, including masks of dropout. With ``full`` it saves only its input. With ``selective`` it
    saves its input, the results of attention and the outputs of every second GEMM, as torchtitan
    does. Megatron's selective recomputation equals ``none``, because flash attention keeps no
    scores.
    """
    if checkpointing == "full":
        return INPUT
    if checkpointing == "selective":
        return f"{INPUT} + {_format_attention_gemm_bytes(spec)} + {_format_ffn_gemm_bytes(spec)}"
    norms = f"2 * ({format_norm_bytes(spec)})"
    inner = f"{_count_inner_tensors(spec)} * tokens * ffn / tp * bytes_per_element"
    ffn = _format_moe_bytes(spec) if spec.moe else f"{_format_block_input_bytes(spec)} + {inner}"
    text = f"{norms} + {_format_attention_bytes(spec)} + {ffn}"
    return f"{text} + 2 * sharded_tokens * hidden" if spec.shape.dropout else text


def format_norm_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes that a norm saves for one microbatch, as text.

    On one rank, the norm saves its input and float32 statistics: two per token for LayerNorm, one
    for RMSNorm.
    """
    statistics = 8 if spec.shape.recipe == "gpt" else 4
    return f"{INPUT} + {statistics} * sharded_tokens"


def _format_block_input_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes of a block's saved normalized input, as text.

    The bytes are those of one rank and microbatch. The normalized input is the input of the first
    GEMMs of attention or of the FFN. With fused kernels (``spec.fused``) the result is "0": they do
    not save the normalized input, because backward computes it again from the input of the norm.
    """
    return "0" if spec.fused else INPUT


def _format_attention_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes that an attention block saves for one microbatch, as text.

    It saves the input of the projections, and what attention and its output projection save. Latent
    attention also saves its compressions before and after their norms.
    """
    terms = [_format_block_input_bytes(spec), _format_attention_output_bytes(spec)]
    latent = spec.shape.latent
    if latent is not None:
        ranks = latent.q_lora_rank + latent.kv_lora_rank
        terms.append(f"2 * sharded_tokens * {ranks} * bytes_per_element")
    if spec.shape.qk_norm:
        heads = "tokens * (heads + kv_heads) / tp"
        terms.append(f"{heads} * (head_size * bytes_per_element + 4)")
    return " + ".join(terms)


def _format_attention_output_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes that attention without its projections saves, as text.

    For one microbatch of a rank, attention saves queries, keys, values, its output and float32
    log-sum-exps.
    """
    keys = "kv_heads * (head_size + value_size)"
    if spec.shape.latent is not None:
        keys = "heads * (head_size + value_size)"
    if spec.dims.cp > 1 and spec.ulysses_ranks > 1:
        # The output projection saves the result after the all_to_all.
        keys += " + heads * value_size"
    elements = f"(heads * (head_size + value_size) + {keys})"
    return f"tokens / tp * ({elements} * bytes_per_element + 4 * heads)"


def _format_attention_gemm_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes that selective checkpointing keeps of attention, as text.

    For one layer and microbatch, it keeps the output of attention and the outputs of every second
    GEMM before attention: the queries and the values, or both compressions of latent attention.
    """
    attended = "tokens / tp * heads * (value_size * bytes_per_element + 4)"
    latent = spec.shape.latent
    if latent is not None:
        ranks = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
        return f"{attended} + sharded_tokens * {ranks} * bytes_per_element"
    projections = "(heads * head_size + kv_heads * value_size)"
    return f"{attended} + tokens / tp * {projections} * bytes_per_element"


def _format_ffn_gemm_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes that selective checkpointing keeps of an FFN, as text.

    The bytes are those of one layer and microbatch. Selective checkpointing keeps the output of
    every second GEMM of a layer, in the order q, k, v, out, gate, up, down. Of the FFN these are
    gate and down for llama, and up for gpt, which has no gate. Of routed experts, the outputs of
    gate and up are kept. A further tensor of the hidden size is kept for each pair of a token and
    its expert, because tokens are not sent to experts again.
    """
    is_llama = spec.shape.recipe == "llama"
    if spec.moe is not None:
        inner = f"{2 if is_llama else 1} * expert_ffn"
        return f"sharded_tokens * top_k * ({inner} + hidden) * bytes_per_element"
    inner = "tokens * ffn / tp * bytes_per_element"
    return f"{inner} + {INPUT}" if is_llama else inner


def _count_inner_tensors(spec: StepSpec) -> int:
    """Return the number of tensors with the FFN's inner size that one FFN saves for backward.

    For GELU they are its input and its output. For SwiGLU they are the gate, the SiLU of the gate,
    the up projection, and the product of SiLU and up projection. Fused kernels save only the
    outputs of GEMMs, which are half of these tensors.
    """
    tensors = 4 if spec.shape.recipe == "llama" else 2
    return tensors // 2 if spec.fused else tensors


def _format_moe_bytes(spec: StepSpec) -> str:
    """Return the equation of the bytes that a MoE block saves for one microbatch, as text.

    Routing is balanced. The router saves its input and scores in float32. Each pair of a token and
    one of its ``top_k`` experts saves the expert's input, the inner tensors, the output, the
    weighted output, the weight and 8-byte indices. Shared experts save their input and inner
    tensors.
    """
    inner = f"{_count_inner_tensors(spec)} * expert_ffn"
    router = "sharded_tokens * 4 * (hidden + experts)"
    rows = f"sharded_tokens * top_k * ((3 * hidden + {inner} + 1) * bytes_per_element + 32)"
    shared = f"{INPUT} + sharded_tokens * shared * {inner} * bytes_per_element"
    return f"{router} + {rows} + {shared}"
