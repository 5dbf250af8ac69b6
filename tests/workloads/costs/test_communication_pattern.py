"""Calls and bytes of every strategy are what the papers state for each."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.communication_pattern import (
    bytes_by_axis,
    calls,
    equation_of,
    sent_bytes,
)
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.shapes import MIXED, SHAPES, Widths
from tests.support.planner_asks import make_spec
from tests.support.training_steps import DEFINITION_BY_NAME

TINY = SHAPES["tiny"]  # every parameter's rows divide by 4
PSI, LAYERS, HIDDEN = num_parameters(TINY), TINY.layers, TINY.hidden
TOKENS = 4 * 64
ACTIVATION = TOKENS * HIDDEN * 4  # b s h e
GATHER = PSI * 4 * 3 / 4
"""Bytes of one gather of all parameters in float32 over four ranks."""
Params = dict[str, Any]


def step_bytes(name: str, params: Params, ranks: int = 4) -> dict[str, float]:
    """Return the bytes that rank 0 sends in a step, by axis."""
    case = DEFINITION_BY_NAME[name].complete({"shape": "tiny", "microbatch": 4, **params})
    return bytes_by_axis(calls(STRATEGIES[name](case, ranks, "cpu").at(0)))


@pytest.mark.parametrize(
    ("operation", "num_bytes"),
    [
        ("all_reduce", 1200),
        ("all_gather", 600),
        ("reduce_scatter", 600),
        ("all_to_all", 600),
        ("broadcast", 800),  # The busiest rank of a chain, as in nccl-tests.
        ("send", 800),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_sent_bytes_of_operations(operation: str, num_bytes: float) -> None:
    assert sent_bytes(operation, 800, 4) == num_bytes
    assert sent_bytes(operation, 800, 1) == 0


@pytest.mark.parametrize(
    ("mesh", "model"),
    [("dp=2,fsdp=2,pp=2,cp=2,tp=2", "llama3-8b"), ("fsdp=8,tp=2,ep=4", "mixtral-8x7b")],
)
def test_equations_give_bytes_of_calls(mesh: str, model: str) -> None:
    all_calls = calls(make_spec(mesh, model, microbatches=4).at(0))
    for axis, num_bytes in bytes_by_axis(all_calls).items():
        equation = equation_of([call for call in all_calls if call.axis == axis])
        assert equation.value == pytest.approx(num_bytes)
        assert eval(equation.numbers) == pytest.approx(num_bytes)


@pytest.mark.parametrize(
    ("name", "params", "num_bytes"),
    [
        ("ddp", {"accumulation": 3}, 3 * 2 * GATHER),
        ("ddp", {"accumulation": 3, "no_sync": True}, 2 * GATHER),
        ("ddp", {"precision": "bfloat16"}, GATHER),
        ("ddp", {"grad_compression": "bf16"}, GATHER),
        ("zero1", {"accumulation": 3}, 3 * 2 * GATHER + PSI * 4),
        ("zero1", {"optimizer": "distributed"}, 2 * GATHER),
        ("fsdp", {"accumulation": 3}, 3 * 3 * GATHER),
        ("fsdp", {"accumulation": 3, "no_sync": True}, (3 * 2 + 1) * GATHER),
        ("fsdp", {"accumulation": 3, "reshard": False}, 3 * 2 * GATHER),
    ],
)
def test_data_parallel_bytes(name: str, params: Params, num_bytes: float) -> None:
    assert step_bytes(name, params) == {"dp": pytest.approx(num_bytes)}


@pytest.mark.parametrize(
    ("mesh", "zero1", "factor"),
    [("dp=8", "", 2.0), ("dp=8", "reduce_scatter", 1.5), ("fsdp=8", "", 4 / 3)],
)
def test_gradients_are_sent_in_their_dtype(mesh: str, zero1: str, factor: float) -> None:
    spec = make_spec(mesh, "llama3-8b", zero1=zero1)
    float32 = replace(spec, state=Widths.parse("gradients=float32", MIXED))
    [narrow_bytes] = bytes_by_axis(calls(spec.at(0))).values()
    [float32_bytes] = bytes_by_axis(calls(float32.at(0))).values()
    assert float32_bytes / narrow_bytes == pytest.approx(factor)


@pytest.mark.parametrize(
    ("checkpointing", "reduces", "scatters"), [("none", 8, 8), ("full", 10, 11)]
)
def test_tensor_parallel_bytes(checkpointing: str, reduces: int, scatters: int) -> None:
    """A recomputed layer stops before its last sum, of which a scatter is half."""
    share = 3 / 4
    norms = (2 * LAYERS + 1) * 2 * HIDDEN * 4
    ends = (2 * ACTIVATION + 2 * norms) * share  # both gather; norms sum their gradients
    params = {"checkpointing": checkpointing}
    layer = ACTIVATION * share * LAYERS
    assert step_bytes("tp", params)["tp"] == pytest.approx(reduces * layer)
    assert step_bytes("tp_sp", params)["tp"] == pytest.approx(scatters * layer + ends)


@pytest.mark.parametrize(("checkpointing", "forwards"), [("none", 1), ("full", 2)])
def test_context_parallel_bytes(checkpointing: str, forwards: int) -> None:
    """On 4 ranks in bfloat16 with float32 sums. There are half as many key heads as heads."""
    passes = (forwards + 1) * 2
    queries = TOKENS / 4 * HIDDEN * LAYERS
    keys_and_values = 2 * queries / 2
    params = {"kv_heads": 2, "checkpointing": checkpointing, "precision": "bfloat16"}

    def method_bytes(method: str, ulysses: int = 0) -> dict[str, float]:
        return step_bytes("cp", {**params, "cp_method": method, "ulysses": ulysses})

    ring = keys_and_values * (passes + 4)
    ulysses = (2 * queries + keys_and_values) * passes / 2
    assert method_bytes("zigzag")["cp"] == pytest.approx(3 * ring)
    assert method_bytes("allgather_kv")["cp"] == pytest.approx(
        3 * keys_and_values * (passes + 2)
    )
    assert method_bytes("usp", ulysses=2)["ring"] == pytest.approx(ring)
    assert method_bytes("usp", ulysses=2)["ulysses"] == pytest.approx(ulysses)
