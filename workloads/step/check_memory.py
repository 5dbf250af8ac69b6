"""The memory of the numerical check on a rank, which decides how the check is done. Pure."""

from parbench.workloads.costs.memory import activations_equation, rank_memory
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import RankView, StepSpec

FRAGMENTATION_MARGIN = 0.9
"""The share of free memory that is used: blocks of an allocator leave gaps."""


def check_memory(view: RankView) -> float:
    """Return an upper bound in bytes of a rank's memory while its step is verified.

    It includes the step's own state and a single-process reference: the whole model with its first
    weights, gradients and AdamW state, and copies of the step's full weights and gradients.
    """
    spec = view.spec
    memory = rank_memory(view)
    parameters = num_parameters(spec.shape, spec.moe)
    optimizer = 12 if spec.has_master_weights else 8
    two_steps = parameters * (3 * spec.bytes_per_element + optimizer + 1)
    references = parameters * (2 * spec.bytes_per_element + 2 * 4 + 2 * spec.bytes_per_element)
    own_pass = memory.activations + memory.buffers + 8 * parameters
    return memory.state + max(two_steps, references, own_pass) + _single_pass(spec)


def _single_pass(spec: StepSpec) -> float:
    """Return the bytes of float32 activations of the global batch in one process.

    They include the gradients of the logits.
    """
    moe = spec.moe and spec.moe.on_one_rank()
    single = StepSpec(shape=spec.shape, moe=moe, microbatch=spec.global_batch, bytes_per_element=4)
    logits = 2.0 * spec.tokens * spec.shape.vocabulary * 4
    return activations_equation(single.rank_view(0)).value + logits
