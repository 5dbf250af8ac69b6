"""The memory of a step's numerical check, by arithmetic."""

from parbench.workloads.costs import strategies
from parbench.workloads.costs.check_memory import check_memory
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import StepSpec

GB = 1e9


def of(name: str, ranks: int = 8, **more: object) -> float:
    spec: StepSpec = getattr(strategies, name)(
        {"shape": "llama3-8b", "microbatch": 1, **more}, ranks, "cuda"
    )
    return max(check_memory(spec.at(rank)) for rank in range(ranks))


def test_check_memory_holds_two_single_process_models() -> None:
    spec = strategies.fsdp(
        {"shape": "llama3-8b", "microbatch": 1, "precision": "bfloat16"}, 8, "cuda"
    )
    elements = num_parameters(spec.shape)
    assert check_memory(spec.at(0)) > 16 * elements / 8 + elements * (2 + 2 + 2 + 12), (
        "and AdamW of one"
    )


def test_check_memory_grows_with_the_model_and_the_batch() -> None:
    assert check_memory(strategies.ddp({"shape": "tiny"}, 2, "cpu").at(0)) < 0.2 * GB
    few, many = (of("fsdp", precision="bfloat16", microbatch=count) for count in (1, 2))
    assert 80 * GB < few < many
