"""The memory of a step's numerical check."""

from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.step.check_memory import check_memory
from tests.support.workloads.planner_asks import make_spec


def test_check_memory_contains_single_process_reference() -> None:
    """Two models in bfloat16, gradients, and the states of an optimizer."""
    spec = make_spec("fsdp=8", "llama3-8b")
    elements = num_parameters(spec.shape)
    reference = elements * (2 + 2 + 2 + 12)
    assert check_memory(spec.rank_view(0)) > 16 * elements / 8 + reference
