"""What a rank of a step holds, by component, in bytes: state, activations that backward needs, buffers. Pure.

Letters are those of ``Position.symbols``; k E X are a token's experts, all of them, and the ranks that split each, r an
expert's inner size, x the experts of a rank. Not counted: what a collective or an allocator takes.
"""

from dataclasses import dataclass, replace

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import Kind, elements_of, ends_elements
from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.model.shapes import MIXED, Widths


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model state that one rank holds; ``optimizer`` counts the master weights of mixed precision."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def state(self) -> float:
        """All of it: what stays from step to step."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class RankMemory(StateBytes):
    """Bytes of one rank; ``buffers`` are parameters gathered for a pass, and gradients not yet reduced."""

    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All components at once: an upper bound, for their peaks need not meet."""
        return self.state + self.activations + self.buffers


def memory_of(at: Position) -> RankMemory:
    return RankMemory(
        **vars(state_of(at)), activations=activations_of(at), buffers=buffers_equation(at).value
    )


def state_bytes(elements: float, widths: Widths = MIXED) -> StateBytes:
    """Return bytes of parameters, gradients and Adam's state (arXiv 1910.02054): 16 a parameter.

    Mixed precision holds 2 + 2 + 12 (16-bit weights and gradients; float32 weights and two moments), float32 4 + 4 + 8.
    """
    return StateBytes(
        parameters=widths.parameters * elements,
        gradients=widths.gradients * elements,
        optimizer=widths.optimizer * elements,
    )


def state_of(at: Position) -> StateBytes:
    """Return the state of a rank: what its axes leave of the parameters (arXiv 1910.02054, figure 1).

    ZeRO-1 shards the optimizer alone; what FSDP does not reshard is held whole, gathered, between forward and backward.
    A step of timed compute updates no parameters, so that its optimizer has no state.
    """
    state = _trained_state_of(at)
    return replace(state, optimizer=0.0) if at.spec.timed else state


def _trained_state_of(at: Position) -> StateBytes:
    spec = at.spec
    held = state_bytes(owned_elements(at), spec.widths)
    if spec.zero1:
        return replace(held, optimizer=state_bytes(updated_elements(at), spec.widths).optimizer)
    if spec.reshard and not spec.keeps_root:
        return held
    gathered: float = elements_of(at) * spec.element_bytes
    if spec.keeps_root:  # of layers the shard
        root = ends_elements(at) * spec.element_bytes
        gathered = root + held.parameters - root / spec.size("fsdp")
    return replace(held, parameters=gathered)


def owned_elements(at: Position) -> float:
    """Return the parameters whose state a rank holds: its shard of what the other axes leave it."""
    spec = at.spec
    dense: tuple[Kind, ...] = ("whole", "split")
    sharded = elements_of(at, *dense, ranks=spec.size("fsdp"), rank=at.coordinate["fsdp"])
    return sharded + elements_of(at, "routed") / (spec.expert_shards if spec.planned else 1)


def updated_elements(at: Position) -> float:
    """Return the parameters that a rank updates: what it owns, or of that its share by ZeRO-1."""
    spec = at.spec
    if not spec.zero1:
        return owned_elements(at)
    dense = elements_of(at, "whole", "split") / spec.ranks_of(("dp", "cp"))
    return dense + elements_of(at, "routed") / spec.ranks_of(("edp",))


def state_equation(at: Position) -> Equation:
    """Return the bytes of parameters, gradients and Adam's state, of which ZeRO leaves a share."""
    spec, routed = at.spec, elements_of(at, "routed")
    widths = [
        str(width)
        for width in (spec.widths.parameters, spec.widths.gradients, spec.widths.optimizer)
    ]
    whole = {1: 2, 2: 1}.get(spec.zero, 0)  # of the widths, those that are not shared
    ranks = {"fsdp": spec.size("fsdp"), "shards": spec.expert_shards}
    if spec.zero1:
        ranks = {"N": spec.ranks_of(("dp", "cp")), "copies": spec.ranks_of(("edp",))}
    names = ("Psi", "experts") if routed else ("Psi",)
    held = [f"({' + '.join(widths[:whole])}) {name}" for name in names if whole]
    held += [
        f"({' + '.join(widths[whole:])}) {name} / {of}"
        for name, of in zip(names, ranks, strict=False)
    ]
    symbols = {"Psi": elements_of(at, "whole", "split"), "experts": routed, **ranks}
    return Equation(text=" + ".join(held), symbols=symbols)


def buffers_equation(at: Position) -> Equation:
    """Return the bytes that FSDP holds whole for a while: two layers and one's gradients, or a stage and its own.

    A pipeline's ranks keep their parameters gathered and their gradients unreduced through all microbatches, as torch's
    runtime does.
    """
    spec = at.spec
    if spec.size("fsdp") == 1:
        return Equation(text="0", symbols={})
    routed = elements_of(at, "routed") if spec.expert_shards > 1 else 0
    psi = elements_of(at, "whole", "split") + routed
    symbols = {"Psi": psi, "e": float(spec.element_bytes), "L": float(max(1, at.layers))}
    return Equation(text="2 Psi e" if spec.size("pp") > 1 else "3 Psi e / L", symbols=symbols)


def activations_of(at: Position) -> float:
    """Return the bytes that a rank keeps for backward at most, of all its microbatches in flight.

    A planned pipeline adds up the maxima of its layers and of its logits, which need not coincide.
    """
    spec = at.spec
    if spec.size("pp") > 1 and not spec.planned:
        return spec.order.peak_held(at.pp_rank, lambda stage: stage_equation(at, stage).value)
    return activations_equation(at).value


def activations_equation(at: Position) -> Equation:
    """Return the bytes that backward needs: layers in flight, one that is computed again, and the ends.

    The order of the schedule gives the microbatches in flight, and those whose logits are held.
    """
    spec = at.spec
    held = spec.microbatches_in_flight(at.pp_rank)
    logits = spec.logits_in_flight(at.pp_rank)
    text = _layers_text(at, spec.checkpointing, "m ")
    if spec.checkpointing != "none" and spec.planned:
        text += f" + {layer_text(spec, 'none')}"
    text += f" + m ({embedding_text(spec)})" if at.embedding else ""
    text += f" + w ({head_text(spec)})" if at.head else ""
    return Equation(text=text, symbols={**_symbols(at), "m": held, "w": logits})


def stage_equation(at: Position, stage: int) -> Equation:
    spec, layers = at.spec, at.layers_by_stage
    text = _layers_text(at, spec.checkpointing)
    text += f" + {embedding_text(spec)}" if stage == 0 else ""
    text += f" + {head_text(spec)}" if stage == len(layers) - 1 else ""
    return Equation(
        text=text, symbols={**_symbols(at), "L": layers[stage], "D": at.dense_of(stage)}
    )


def layer_equation(at: Position, checkpointing: str) -> Equation:
    return Equation(text=layer_text(at.spec, checkpointing), symbols=_symbols(at))


def layers_equation(at: Position, checkpointing: str) -> Equation:
    return Equation(text=_layers_text(at, checkpointing), symbols=_symbols(at))


def _layers_text(at: Position, checkpointing: str, times: str = "") -> str:
    """Return what all layers keep, ``times`` over; where one in K is computed again, the others keep all."""
    kinds = [("L", at.spec)]
    if at.dense_layers:
        kinds = [("(L - D)", at.spec), ("D", replace(at.spec, moe=None))]
    terms = []
    for layers, spec in kinds:
        again = layer_text(spec, checkpointing)
        if checkpointing == "full" and spec.every > 1:
            terms.append(f"{times}{layers} (({again}) + (K - 1) ({layer_text(spec, 'none')})) / K")
        else:
            terms.append(f"{times}{layers} ({again})")
    return " + ".join(terms)


def _symbols(at: Position) -> dict[str, float]:
    spec, moe = at.spec, at.spec.moe
    own: dict[str, float] = {"y": 4.0 if spec.device != "cpu" else float(spec.element_bytes)}
    own |= {"drawn": spec.drawn, "K": spec.every}
    if moe is not None:
        own |= {
            "k": moe.top_k,
            "E": moe.experts,
            "X": moe.etp,
            "r": moe.expert_ffn,
            "x": moe.experts_per_rank,
        }
        own |= {"shared": moe.shared}
    if (latent := at.spec.shape.latent) is not None:
        own |= {"latent": latent.q_lora_rank + latent.kv_lora_rank}
    return {**at.symbols, **own}


def layer_text(spec: StepSpec, checkpointing: str) -> str:
    """Return what a layer keeps: all, its input alone (``full``), or its input, products and attention (``selective``).

    Of the products the two that ``tp`` splits by rows are partial sums, whole on every rank.
    """
    if checkpointing == "full" or (
        checkpointing == "selective" and spec.timed
    ):  # waits have no products to keep
        return "n h e"
    if checkpointing == "selective":
        gates = 2 if spec.shape.recipe == "llama" else 1
        ffn = f"n k e ({gates} r + h) + G h e" if spec.moe else f"{gates} G f e / t + 2 G h e"
        blocks = _kept_blocks(spec)
        products = f"G {_wide(spec)} e ({1 + blocks} + 2 g) / t"
        if spec.shape.latent is not None:
            products = f"G latent e + G a e (2 d + {1 + blocks} u) / t"
        return f"n h e + {products} + {ffn} + {4 * blocks} G a / t"
    ffn = _mixture_text(spec) if spec.moe else f"G h e + {_inner(spec)} G f e / t"
    return f"2 ({_norm_text(spec)}) + {_attention_text(spec)} + {ffn}"


def _kept_blocks(spec: StepSpec) -> int:
    """Results of attention that ``selective`` keeps: one, or of each block of keys the fullest rank's own."""
    if spec.planned or spec.size("cp") == 1 or spec.cp_method == "ulysses":
        return 1
    return 2 if spec.cp_method == "allgather_kv" else spec.size("cp") // spec.ulysses


def _inner(spec: StepSpec) -> int:
    """Values of an FFN's inner size: before and after GELU, or gate, its SiLU, up and their product."""
    return 4 if spec.shape.recipe == "llama" else 2


def _norm_text(spec: StepSpec) -> str:
    """A norm's input, and y bytes for each of two values a token, or llama's one of float32.

    An RMSNorm of elementary operations, as on the CPU, keeps in float32 what it makes of its input, too.
    """
    if spec.shape.recipe == "gpt":
        return "n (h e + 2 y)"
    return "n (8 h + 4)" if spec.device == "cpu" else "n (h e + 4)"


def _attention_text(spec: StepSpec) -> str:
    """The input, q, k, v, the result and its log-sum-exps; llama's angles, which this suite's layers do not share.

    Turned queries (llama), or c > 1, are laid out by head, and so is the result of several: the next product's copy of
    it is kept. CUDA's kernel for float32 lays it out by token. Latent attention keeps also what it compresses to,
    before and after its norms; heads that have norms, what these take.
    """
    if spec.timed:
        return "G h e + G h e / t"
    shape, shared, llama = spec.shape, spec.size("cp") > 1, spec.shape.recipe == "llama"
    by_token = spec.device not in ("", "cpu") and spec.element_bytes == 4
    turned = not spec.planned and (shared or (llama and not by_token))
    results = 2 if turned and shape.heads > spec.size("tp") else 1
    angles = " + 8 s d" if llama and not spec.planned else ""
    if shape.latent is not None:
        return f"G h e + 2 G latent e + G a e (2 d + {1 + results} u) / t + 4 G a / t"
    normed = " + G a d e (1 + g) / t + 4 G a (1 + g) / t" if shape.qk_norm else ""
    return f"G h e + G {_wide(spec)} e ({1 + results} + 2 g) / t + 4 G a / t{angles}{normed}"


def _wide(spec: StepSpec) -> str:
    return "h" if spec.shape.heads * spec.shape.head_size == spec.shape.hidden else "a d"


def _mixture_text(spec: StepSpec) -> str:
    """Router and scores in float32, rows of the k experts, their indices; where elements are narrow, copies of both."""
    assert spec.moe is not None
    inner = _inner(spec)
    copies = f" + 4 E h{' + n h e' if spec.moe.shared else ''}" if spec.element_bytes < 4 else ""
    indices = 32 if spec.moe.ep > 1 else 16
    rows = f"n X k ((3 h + {inner} r / X + 1) e + {indices}) + 4 x"
    shared = f" + {inner} n shared r e" if spec.moe.shared else ""
    weights = " + 4 n (k + 1)" if spec.moe.renormalize and spec.moe.top_k > 1 else ""
    return f"4 n (h + E) + 8 n k{weights}{copies} + {rows}{shared}"


def embedding_text(spec: StepSpec) -> str:
    """Tokens, and gpt's positions; tokens that are views of those drawn keep these, with their targets."""
    positions = "" if not spec.shape.positions else " + 8 s" if spec.drawn else " + 8 n / b"
    return ("8 drawn (s + 1)" if spec.drawn else "8 n") + positions


def head_text(spec: StepSpec) -> str:
    """The last norm, its output, the logits' log-softmax and the targets.

    The log-softmax is in float32. ``vocabulary`` keeps b s V / t of it and of logits, ``whole`` all of it, ``tokens``
    a rank's own.
    """
    norm = _norm_text(spec)
    if spec.ends == "vocabulary":
        return f"{norm} + G h e + G V (e + 4) / t + 8 G + e"
    tokens = "n" if spec.ends == "tokens" or spec.own_tokens else "G"
    return f"{norm} + {tokens} h e + 4 {tokens} V + 8 {tokens} + 4"
