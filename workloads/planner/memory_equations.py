"""What a rank holds, as equations of the step that was asked for: the counterpart of ``rank_memory``. Pure.

b s h V are microbatch, a cp rank's tokens of a sequence, hidden size and vocabulary, e the bytes of an element, t the
ranks of tp, a heads, g = a_kv / a, f the inner size of an FFN or an expert, k the experts of a token; L layers of the
rank, n of whose microbatches are in flight.
"""

from workloads.costs.equation import Equation
from workloads.planner.ask import Ask
from workloads.planner.placement import expert_shards
from workloads.planner.rank_memory import held_logits
from workloads.planner.stage_parts import Part, elements_of, end_elements, whole_of_layer


def dense_equation(ask: Ask, part: Part) -> Equation:
    """Return the parameters of a rank that no ``ep`` deals out, in elements, before ``fsdp`` shards them."""
    whole = whole_of_layer(ask.model)
    symbols = {
        "L": part.layers,
        "whole": whole,
        "split": ask.model.dense_layer_parameters - whole,
        "t": ask.tp,
        "ends": end_elements(ask, part),
    }
    return Equation(text="L (whole + split / t) + ends", symbols=symbols)


def experts_equation(ask: Ask, part: Part) -> Equation:
    """Return the parameters of a rank's experts, in elements, before ``fsdp`` shards them."""
    symbols = {"L": part.layers, "E": ask.model.num_experts, "EP": ask.ep, "expert": ask.model.expert_parameters}
    return Equation(text="L E expert / EP", symbols=symbols)


def state_equation(ask: Ask, part: Part) -> Equation:
    """Return the bytes of parameters, gradients and Adam's state, of which ``fsdp`` leaves a shard."""
    widths = "(2 + 2 + 12)" if ask.element_bytes < 4 else "(4 + 4 + 8)"
    dense, experts = elements_of(ask, part)
    symbols = {"Psi": dense, "fsdp": ask.fsdp}
    if not experts:
        return Equation(text=f"{widths} Psi / fsdp", symbols=symbols)
    return Equation(
        text=f"{widths} (Psi / fsdp + experts / shards)",
        symbols={**symbols, "experts": experts, "shards": expert_shards(ask.mesh)},
    )


def buffers_equation(ask: Ask, part: Part) -> Equation:
    """Return the bytes that ``fsdp`` holds whole: two layers and one's gradients, or a stage and its own."""
    dense, experts = elements_of(ask, part)
    held = "Psi"
    symbols = {"Psi": dense, "e": float(ask.element_bytes), "L": float(max(1, part.layers))}
    if experts and expert_shards(ask.mesh) > 1:
        held, symbols["experts"] = "(Psi + experts)", experts
    return Equation(text=f"2 {held} e" if ask.pp > 1 else f"3 {held} e / L", symbols=symbols)


def activations_equation(ask: Ask, part: Part) -> Equation:
    """Return the bytes that backward needs: layers in flight, one that is computed again, the head."""
    kept = _layer(ask) if ask.checkpointing == "none" else _kept(ask)
    again = "" if ask.checkpointing == "none" else f" + {_layer(ask)}"
    head = f" + {_head(ask)}" if part.head else ""
    shape = ask.model.shape
    symbols = {
        "n": part.in_flight,
        "L": part.layers,
        "b": ask.microbatch,
        "s": shape.sequence // ask.cp,
        "h": shape.hidden,
        "V": shape.vocabulary,
        "e": ask.element_bytes,
        "t": ask.tp,
        "a": shape.heads,
        "g": shape.kv_heads / shape.heads,
        "f": shape.ffn,
        "k": ask.model.top_k,
        "r": held_logits(ask, part),
    }
    return Equation(text=f"n L {kept}{again}{head}", symbols=symbols)


def _layer(ask: Ask) -> str:
    """Return a layer's terms: norms in and out, attention and FFN, rows of experts, log-sum-exps, composed norms."""
    llama, mixture = ask.model.shape.recipe == "llama", ask.model.top_k > 0
    heads, ffn = ("2 + 2 g", 4) if llama else ("4", 2)
    inner = f"{heads} + {ffn} {'k ' if mixture else ''}f / h{' + 2 k' if mixture else ''}"
    composed = " + 2 b s h (8 - e) / t + b s h e / t" if llama and not ask.fused_kernels else ""
    return f"(b s h e (2 / t + 2 + ({inner}) / t) + 4 a b s / t{composed})"


def _kept(ask: Ask) -> str:
    if ask.checkpointing == "full":
        return "b s h e / t"
    ffn = 2 if ask.model.shape.recipe == "llama" else 1
    return f"b s h e (5 + 2 g + {ffn} {'k ' if ask.model.top_k else ''}f / h) / t"


def _head(ask: Ask) -> str:
    output = "1" if ask.sharded_vocabulary else "1 / t"
    loss = "(e + 4)" if ask.float32_loss else "e"
    composed = "" if ask.fused_kernels or ask.model.shape.recipe != "llama" else " + b s h (8 - e) / t"
    return f"r (b s h e (1 / t + {output}) + b s V {loss} / t{composed})"
