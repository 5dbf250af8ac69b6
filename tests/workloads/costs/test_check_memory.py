"""The memory of a step's numerical check."""

from typing import Any

from parbench.workloads.costs import strategies
from parbench.workloads.costs.check_memory import check_memory
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import StepSpec


def make_step(microbatch: int = 1) -> StepSpec:
    params: dict[str, Any] = {"shape": "llama3-8b", "precision": "bfloat16"}
    return strategies.fsdp({**params, "microbatch": microbatch}, 8, "cuda")


def test_check_memory_contains_single_process_reference() -> None:
    """Two models in bfloat16, gradients, and the states of an optimizer."""
    spec = make_step()
    elements = num_parameters(spec.shape)
    assert check_memory(spec.at(0)) > 16 * elements / 8 + elements * (2 + 2 + 2 + 12)


def test_check_memory_grows_with_the_batch() -> None:
    assert 80e9 < check_memory(make_step(1).at(0)) < check_memory(make_step(2).at(0))
