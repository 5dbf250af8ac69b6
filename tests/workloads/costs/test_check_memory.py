"""Real models fit on real devices with their check, by arithmetic; what one process would take beside them does not."""

from parbench.workloads.costs import strategies
from parbench.workloads.costs.check_memory import CheckMemory, check_memory
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import StepSpec

GB = 1e9


def of(name: str, ranks: int = 8, device: str = "cuda", **more: object) -> CheckMemory:
    spec: StepSpec = getattr(strategies, name)({"shape": "llama3-8b", "microbatch": 1, **more}, ranks, device)
    return max((check_memory(spec.at(rank)) for rank in range(ranks)), key=lambda found: found.sampled)


def test_llama3_8b_in_bfloat16_on_8_ranks_of_fsdp_stays_under_80_gb_checked_and_ddp_in_float32_does_not() -> None:
    sharded = of("fsdp", precision="bfloat16")
    assert sharded.step <= sharded.sampled < 70 * GB < 80 * GB < sharded.whole
    forgetful = of("fsdp", precision="bfloat16", checkpointing="full")
    assert forgetful.sampled < 40 * GB
    replicated = of("ddp", precision="float32")
    assert min(replicated.step, replicated.sampled) > 80 * GB


def test_what_each_gate_holds_is_at_least_what_it_names() -> None:
    spec = strategies.fsdp({"shape": "llama3-8b", "microbatch": 1, "precision": "bfloat16"}, 8, "cuda")
    elements = num_parameters(spec.shape)
    found = check_memory(spec.at(0))
    state = 16 * elements / 8
    assert found.whole > state + elements * (2 + 2 + 2 + 12), "two models and AdamW of one process"
    layer = (elements - 2 * spec.shape.vocabulary * spec.shape.hidden) / spec.shape.layers
    chosen = 2 * layer + 2 * spec.shape.vocabulary * spec.shape.hidden
    inputs = spec.shape.layers * spec.shape.sequence * spec.shape.hidden * 4
    assert found.sampled > state + 4 * chosen + inputs, "gradients in float32, and every layer's input"
    on_host = of("fsdp", device="cpu", precision="bfloat16").sampled
    assert on_host > found.sampled, "on CUDA the gradients to compare lie on the host"


def test_a_toy_is_checked_whole_in_little_memory_and_a_gate_holds_no_less_with_more_sequences() -> None:
    toy = strategies.ddp({"shape": "tiny"}, 2, "cpu")
    assert check_memory(toy.at(0)).whole < 0.2 * GB
    few, many = (of("fsdp", precision="bfloat16", microbatch=count) for count in (1, 2))
    assert few.sampled < many.sampled
    assert few.whole < many.whole
