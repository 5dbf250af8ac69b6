"""The memory that the numerical check takes on a rank, to decide whether a single process fits next to a step. Pure."""

from dataclasses import replace

from parbench.workloads.costs.memory import activations_equation, memory_of
from parbench.workloads.costs.parameter_table import elements_of
from parbench.workloads.costs.step_spec import Position, StepSpec

FRAGMENTATION_MARGIN = 0.9
"""Share of the free memory that is planned for: blocks of an allocator leave gaps."""


def check_memory(at: Position) -> float:
    """Return an upper bound of the bytes that a rank holds while its step is compared with a single process."""
    spec, memory = at.spec, memory_of(at)
    parameters = elements_of(_single_process(spec))
    own = spec.element_bytes
    reduced = spec.reduced_bytes or own
    # Two steps of a single process: its first weights, its weights, gradients, AdamW, and which elements are compared.
    optimizer = 12 if spec.mixed else 8
    two_steps = parameters * (3 * own + optimizer + 1) + _pass_bytes(spec, own)
    # The references: the layout's whole weights and gradients, models and gradients in float32 and in low precision.
    low_precision = 0 if reduced == 4 else reduced
    references = parameters * (2 * own + 2 * 4 + 2 * low_precision) + _pass_bytes(spec, 4)
    # The layout's own backward pass, while the gradients of the references are kept.
    own_pass = memory.activations + memory.buffers + parameters * (4 + low_precision)
    return memory.state + max(two_steps, references, own_pass)


def _single_process(spec: StepSpec, width: int = 4) -> Position:
    """Return a single process that trains the same model on the global batch, in elements of ``width`` bytes."""
    moe = spec.moe and replace(spec.moe, ep=1, etp=1)
    alone = StepSpec(shape=spec.shape, mesh={"dp": 1}, moe=moe, device=spec.device, ends="whole")
    return replace(alone, microbatch=spec.global_batch, element_bytes=width).at(0)


def _pass_bytes(spec: StepSpec, width: int) -> float:
    """Return the bytes of activations of the global batch at once, and of its logits' gradients."""
    logits = spec.tokens * spec.shape.vocabulary * width
    return activations_equation(_single_process(spec, width)).value + 2.0 * logits
