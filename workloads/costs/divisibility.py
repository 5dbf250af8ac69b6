"""The equations by which axes divide a model. Pure.

Each rule returns its equation with numbers if it is broken, and None otherwise.
"""

from parbench.workloads.context_parallel.context_methods import find_context_method
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import Shape


def find_indivisible_heads(shape: Shape, tp: int, *, has_ffn: bool = True) -> str | None:
    """Return the violation for the first size of a layer that ``tp`` does not divide, or None.

    For example, ``heads(6) % tp(4) != 0`` means that 4 ranks cannot share 6 heads. None means that
    ``tp`` divides all sizes. The sizes are heads, kv_heads, hidden and, with ``has_ffn``, the FFN's
    inner size. ``has_ffn`` is False for a MoE model without dense layers.
    """
    names = ["heads", "kv_heads", "hidden"]
    if has_ffn:
        names.append("ffn")
    for name in names:
        if getattr(shape, name) % tp:
            return f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    return None


def find_indivisible_sequence(
    shape: Shape, dims: ParallelDims, cp_method: str, ulysses: int = 0
) -> str | None:
    """Return the first reason why ``cp`` and ``tp`` cannot split a sequence, None if they can.

    The text is the violation: ``sequence(100) % (cp(2) * tp(4)) != 0`` means that 8 ranks cannot
    share 100 tokens. Each method of context parallelism, such as ``zigzag``, has its own rules.
    ``ulysses`` is the number of ranks that exchange tokens for heads, 0 for the method's default.
    """
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
