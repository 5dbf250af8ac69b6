"""A step's memory is the analytical one, as counted and as measured."""

from collections.abc import Sequence

import pytest
import torch

from parbench.bench.results.details import STATE_COMPONENTS
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.memory import make_buffers_equation
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.presets import PRESETS
from parbench.workloads.probes.memory_probe import peak_during
from parbench.workloads.probes.probe import run_probes
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import SMALL_PARAMS, Params, build_small_step

CPU = torch.device("cpu")
MIB = 1 << 20
SOURCES = ("memory", "memory_counted", "memory_formula")


def measure(world: World, name: str, params: Params) -> tuple[Explanation, int]:
    """Return the memory of a step, and its number of parameters."""
    step = build_small_step(world, name, {"kv_heads": 4, **params})
    step.reset()
    step.step()
    memory = run_probes(world, [step.make_memory_probe()], step.step, world.barrier, 0.0)
    step.close()
    return memory, count_parameters(step.spec.shape)


def component_bytes(memory: Explanation, component: str) -> list[float]:
    """Return a component's bytes as measured, as counted and by formula."""
    metrics = [memory.metrics[f"{source}.{component}"] for source in SOURCES]
    return [metric.value or 0.0 for metric in metrics]


def assert_state(memory: Explanation, expected: Sequence[float]) -> None:
    """Compare the bytes of parameters, gradients and the optimizer with the expected ones."""
    for component, num_bytes in zip(STATE_COMPONENTS, expected, strict=True):
        measured, counted, formula = component_bytes(memory, component)
        assert formula == pytest.approx(num_bytes), component
        assert counted == pytest.approx(num_bytes, rel=0.01), component
        assert measured == pytest.approx(num_bytes, rel=0.01), component


@pytest.mark.parametrize(
    ("name", "precision", "bytes_per_parameter"),
    [
        ("ddp", "float32", (4, 4, 8)),
        ("zero1", "bfloat16", (2, 2, 12 / 2)),  # 32-bit masters belong to the optimizer
        ("fsdp", "bfloat16", (2 / 2, 2 / 2, 12 / 2)),
    ],
)
def test_state_is_sharded_as_in_zero(
    two_ranks: Ranks, name: str, precision: str, bytes_per_parameter: Sequence[float]
) -> None:
    """Compare with Rajbhandari et al. (2020), arXiv 1910.02054."""
    arguments = {"name": name, "params": {"precision": precision}}
    (memory, num_elements), _ = two_ranks.call(f"{__name__}:measure", **arguments)
    assert_state(memory, [num_bytes * num_elements for num_bytes in bytes_per_parameter])


def test_gathered_parameters_are_buffers(two_ranks: Ranks) -> None:
    """FSDP without resharding keeps its shards next to the gathered parameters."""
    (memory, num_elements), _ = two_ranks.call(
        f"{__name__}:measure", name="fsdp", params={"reshard": False}
    )
    assert memory.metrics["memory.parameters"].value == 4 / 2 * num_elements
    assert memory.metrics["memory.buffers"].value == 4 * num_elements


def test_checkpointing_reduces_activations(two_ranks: Ranks) -> None:
    num_bytes = []
    for checkpointing in ("full", "selective", "none"):
        arguments = {"name": "ddp", "params": {"checkpointing": checkpointing}}
        (memory, _), _ = two_ranks.call(f"{__name__}:measure", **arguments)
        measured, counted, formula = component_bytes(memory, "activations")
        assert counted == formula <= measured
        num_bytes.append(counted)
    full, selective, none = num_bytes
    assert full < selective < none


def test_copies_of_reduced_gradients_are_buffers(four_ranks: Ranks) -> None:
    """Without FSDP, a mesh holds copies of all gradients at the end of backward."""
    params: Params = {"mesh": "dp=2,tp=2", "bucket_mb": 0.01}
    params |= {"layers": 4, "hidden": 64, "ffn": 1024, "sequence": 4}
    memory, _ = four_ranks.call(f"{__name__}:measure", name="hybrid", params=params)[0]
    spec = PRESETS["hybrid"]({**SMALL_PARAMS, "kv_heads": 4, **params}, 4)
    measured, counted, _ = component_bytes(memory, "activations")
    buffers = make_buffers_equation(spec.make_rank_view(0)).value
    assert measured == pytest.approx(counted + buffers, rel=0.1)


def test_peak_during_step() -> None:
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second = torch.empty(3 * MIB, dtype=torch.uint8)
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second, third

    assert peak_during(step, CPU) == 5 * MIB


def test_master_weights_match_float32_adamw() -> None:
    start = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    narrow = start.clone().requires_grad_()
    wide = start.float().requires_grad_()
    optimizer = make_optimizer([narrow], torch.bfloat16)
    reference = torch.optim.AdamW([wide], lr=LEARNING_RATE)
    for number in range(20):
        narrow.grad = torch.sin(torch.arange(64.0) + number).bfloat16()
        wide.grad = narrow.grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    assert not torch.equal(narrow.detach(), start)
