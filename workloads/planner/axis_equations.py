"""What a rank sends over each axis, as equations of the step that was asked for: the counterpart of ``calls``. Pure.

b s h are microbatch, a cp rank's tokens of a sequence and hidden size, e the bytes of an element, L layers of the rank,
M microbatches, t the ranks of tp; forward passes count twice where ``full`` checkpointing repeats them.
"""

from collections.abc import Callable, Mapping

from workloads.costs.equation import Equation
from workloads.planner.ask import Ask
from workloads.planner.calls import ended_scatters, forwards_of, split_blocks
from workloads.planner.placement import expert_shards
from workloads.planner.stage_parts import Part, elements_of, sends_of, summed_elements


def axis_equation(ask: Ask, part: Part, axis: str) -> Equation:
    """Return the bytes that a rank sends over an axis of several ranks in a step."""
    text, own = _EQUATIONS[axis](ask, part)
    shape = ask.model.shape
    shared = {
        "b": ask.microbatch,
        "s": shape.sequence // ask.cp,
        "h": shape.hidden,
        "e": ask.element_bytes,
        "L": part.layers,
        "M": ask.microbatches,
        "t": ask.tp,
    }
    return Equation(text=text, symbols={**shared, **own})


def _tensor(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    """A gather and a scatter before and after each block that is split, each way; the ends' own; norms' gradients."""
    ends = 2 * (part.embedding + part.head) if ask.sharded_vocabulary else 0
    flights = f"{2 * split_blocks(ask) * (forwards_of(ask) + 1) - ended_scatters(ask)} L" + (
        f" + {ends}" if ends else ""
    )
    summed = summed_elements(ask, part) / ask.fsdp
    return f"({flights}) M b s h e (t - 1) / t + 2 norms e (t - 1) / t", {"norms": summed}


def _context(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    """Keys and values of X elements each: rings pass them on and their sums in float32, or all are gathered at once."""
    shape, forwards = ask.model.shape, forwards_of(ask)
    keys = ask.local_tokens * (shape.kv_heads // ask.tp) * shape.head_size
    symbols = {"c": ask.cp, "X": keys}
    if ask.cp_method == "ulysses":
        heads = {"g": shape.kv_heads / shape.heads}
        return f"{forwards + 1} L M b s h e (2 + 2 g) (c - 1) / (c t)", {**symbols, **heads}
    if ask.cp_method == "allgather_kv":
        return f"{forwards + 2} L M 2 X e (c - 1)", symbols
    return f"L M 2 X ({forwards} e + e + 4) (c - 1)", symbols


def _experts(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    flights = 2 * (forwards_of(ask) + 1)
    return f"{flights} L M b s k h e (EP - 1) / (EP t)", {"k": ask.model.top_k, "EP": ask.ep}


def _pipeline(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    return "boundaries M b s h e / t", {"boundaries": sends_of(ask, part)}


def _shards(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    """Gathers for each pass, or once a step in a pipeline, and scatters once or for each microbatch."""
    dense, experts = elements_of(ask, part)
    shards = expert_shards(ask.mesh)
    each = "M" if ask.reduces_each_microbatch else "1"
    rounds = "(1 + 1)" if ask.pp > 1 else f"(2 M + {each})"
    text, symbols = f"{rounds} Psi e (n - 1) / n", {"Psi": dense, "n": float(ask.fsdp)}
    if not experts or shards == 1:
        return text, symbols
    return f"{text} + {rounds} experts e (x - 1) / x", {**symbols, "experts": experts, "x": shards}


def _replicas(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    symbols = {"Psi": elements_of(ask, part)[0], "fsdp": ask.fsdp, "n": ask.dp * ask.cp}
    return "2 Psi e (n - 1) / (n fsdp)", symbols


def _expert_replicas(ask: Ask, part: Part) -> tuple[str, Mapping[str, float]]:
    shards = expert_shards(ask.mesh)
    symbols = {"experts": elements_of(ask, part)[1], "x": shards, "n": ask.world // ask.pp // (ask.ep * shards)}
    return "2 experts e (n - 1) / (n x)", symbols


_EQUATIONS: Mapping[str, Callable[[Ask, Part], tuple[str, Mapping[str, float]]]] = {
    "tp": _tensor,
    "cp": _context,
    "ep": _experts,
    "pp": _pipeline,
    "fsdp": _shards,
    "dp": _replicas,
    "edp": _expert_replicas,
}
SOURCES = {
    "tp": "arXiv 1909.08053; workloads.costs",
    "cp": "workloads.costs.cp_costs",
    "ep": "workloads.costs.moe_costs.even_dispatch_bytes",
    "pp": "arXiv 2104.04473",
    "fsdp": "arXiv 1910.02054; workloads.costs",
    "dp": "workloads.costs",
    "edp": "workloads.costs",
}
