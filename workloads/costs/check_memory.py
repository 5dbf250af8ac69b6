"""What the parity gate takes beside a step, and so which gate a step can have. Pure.

``whole`` compares with one process's whole model; ``sampled`` holds one layer of it at a time, and the gradients of the
embeddings, the head and two layers, which on CUDA are kept on the host. Both are upper bounds, as ``RankMemory.total``.
"""

from dataclasses import dataclass, replace

from parbench.workloads.costs.memory import activations_equation, layer_equation, memory_of
from parbench.workloads.costs.parameter_table import elements_of, ends_elements, layer_elements
from parbench.workloads.costs.step_spec import Position, StepSpec

LOGITS = 1 << 28
"""Elements of logits that a sampled reference makes at once."""
SCORES = 1 << 28
"""Bytes of attention's scores above which it takes heads that share keys one after the other."""
SAMPLED_LAYERS = 2
ROOM = 0.9
"""Of the free memory: an allocator's blocks do not fit each other without a rest."""
_SCORES_HELD = 4  # scores, their softmax, and the gradients of both
_LOGITS_HELD = 4  # likewise


@dataclass(frozen=True, kw_only=True)
class CheckMemory:
    """Bytes of one rank at its peak: of a step alone, and while each gate checks it."""

    step: float
    whole: float
    sampled: float


def check_memory(at: Position) -> CheckMemory:
    """Return what a rank of a step holds at most, unchecked and checked."""
    memory, alone, widths = memory_of(at), _alone(at.spec), 4 + _widths(at.spec)[0]  # of both references' gradients
    one_pass = memory.activations + memory.buffers
    on_host = 0 if at.spec.device == "cuda" else alone.chosen * (widths + at.spec.element_bytes)
    return CheckMemory(
        step=memory.total,
        whole=memory.state + max(_whole(at.spec), one_pass + alone.elements * widths),
        sampled=memory.state + on_host + max(_sampled(at.spec), one_pass),
    )


@dataclass(frozen=True, kw_only=True)
class _Alone:
    """Elements of one process's model: of all, of the largest part, and of what is sampled."""

    at: Position
    elements: int
    largest: int
    chosen: int


def _alone(spec: StepSpec, width: int = 4, sequences: int = 1) -> _Alone:
    """Return one process's model, in elements of ``width`` bytes, on so many sequences at once."""
    moe = spec.moe and replace(spec.moe, ep=1, etp=1, tp=1)
    alone = StepSpec(shape=spec.shape, mesh={"dp": 1}, moe=moe, device=spec.device, ends="whole")
    at = replace(alone, microbatch=sequences, element_bytes=width).at(0)
    layer, most = layer_elements(at), spec.shape.vocabulary * spec.shape.hidden
    chosen = ends_elements(at) + min(SAMPLED_LAYERS, spec.shape.layers) * layer
    return _Alone(at=at, elements=elements_of(at), largest=max(layer, most), chosen=chosen)


def _widths(spec: StepSpec) -> tuple[int, int]:
    """Return the bytes of an element of the second reference, and of the widest of both.

    That is one in the narrow type, of a step in float32 one in float64.
    """
    own = spec.reduced_bytes or spec.element_bytes
    second = 8 if own == 4 else own
    return second, max(4, second)


def _whole(spec: StepSpec) -> float:
    """Return the larger of what two steps of one process take, and both of its references beside all weights."""
    own, (second, widest) = spec.element_bytes, _widths(spec)
    psi, optimizer = _alone(spec).elements, 12 if spec.mixed else 8
    steps = psi * (own + own + own + optimizer + 1.0) + _pass(spec, own)
    references = psi * (own + own + 2.0 * 4 + 2.0 * second) + _pass(spec, widest)
    return max(steps, references)


def _pass(spec: StepSpec, width: int) -> float:
    """Return what one process keeps for the backward pass of the global batch at once, and its logits' gradients."""
    alone = _alone(spec, width, spec.global_batch)
    logits = spec.tokens * spec.shape.vocabulary * width
    return activations_equation(alone.at).value + 2.0 * logits


def _sampled(spec: StepSpec) -> float:
    """Return the bytes of a microbatch's pass with one layer at a time whole; to compare a tensor takes less."""
    width = _widths(spec)[1]
    shape, alone = spec.shape, _alone(spec, width, spec.microbatch)
    tokens = spec.microbatch * shape.sequence
    inputs = (shape.layers + 2.0) * tokens * shape.hidden * width
    heads, keys = shape.heads, shape.kv_heads
    scores = float(spec.microbatch * shape.sequence**2 * width)
    scores *= heads // keys if scores * heads > SCORES else heads
    layer = layer_equation(alone.at, "none").value + _SCORES_HELD * scores
    logits = _LOGITS_HELD * width * float(min(max(LOGITS, shape.vocabulary), tokens * shape.vocabulary))
    part = alone.largest * (spec.element_bytes + 2.0 * width)  # as it is gathered, as it is used, its gradients
    return alone.chosen * width + inputs + part + max(layer, logits)
