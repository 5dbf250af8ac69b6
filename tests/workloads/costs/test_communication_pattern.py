"""Calls and bytes of every strategy are what the papers state for each."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.communication_pattern import (
    Call,
    bytes_by_axis,
    calls,
    equation_of,
    sent_bytes,
)
from parbench.workloads.costs.parameter_table import (
    num_parameters,
)
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import MIXED, SHAPES, Widths
from tests.support.planner_asks import make_spec
from tests.support.training_steps import DEFINITION_BY_NAME

TINY = SHAPES["tiny"]  # every parameter's rows divide by 4
PSI, LAYERS, HIDDEN = num_parameters(TINY), TINY.layers, TINY.hidden
TOKENS = 4 * 64
ACTIVATION = TOKENS * HIDDEN * 4  # b s h e


def make_case_spec(name: str, ranks: int = 4, **params: Any) -> StepSpec:
    case = DEFINITION_BY_NAME[name].whole({"shape": "tiny", "microbatch": 4, **params})
    return STRATEGIES[name](case, ranks, "cpu")


def step_bytes(name: str, ranks: int = 4, **params: Any) -> dict[str, float]:
    """Return the bytes that rank 0 sends in a step, by axis."""
    return bytes_by_axis(calls(make_case_spec(name, ranks, **params).at(0)))


def calls_on(spec: StepSpec, axis: str) -> list[Call]:
    return [call for call in calls(spec.at(0)) if call.axis == axis]


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


def test_sent_bytes_rejects_unknown_operation() -> None:
    with pytest.raises(ValueError, match="allreduce"):
        sent_bytes("allreduce", 8, 2)


@pytest.mark.parametrize(
    ("mesh", "model"),
    [("dp=2,fsdp=2,pp=2,cp=2,tp=2", "llama3-8b"), ("fsdp=8,tp=2,ep=4", "mixtral-8x7b")],
)
def test_equations_give_bytes_of_calls(mesh: str, model: str) -> None:
    spec = make_spec(mesh, model, microbatches=4)
    for axis, num_bytes in bytes_by_axis(calls(spec.at(0))).items():
        equation = equation_of(calls_on(spec, axis))
        assert eval(equation.numbers) == pytest.approx(num_bytes) == equation.value


UNIT = PSI * 4 * 3 / 4
"""Bytes of one gather of all parameters in float32 over four ranks."""


@pytest.mark.parametrize(
    ("name", "params", "num_bytes"),
    [
        ("ddp", {}, 2 * UNIT),
        ("ddp", {"accumulation": 3}, 3 * 2 * UNIT),
        ("ddp", {"accumulation": 3, "no_sync": True}, 2 * UNIT),
        ("ddp", {"precision": "bfloat16"}, UNIT),
        ("ddp", {"grad_compression": "bf16"}, UNIT),
        ("zero1", {"accumulation": 3}, 3 * 2 * UNIT + PSI * 4),
        ("zero1", {"optimizer": "distributed"}, 2 * UNIT),
        ("fsdp", {"accumulation": 3}, 3 * 3 * UNIT),
        ("fsdp", {"accumulation": 3, "no_sync": True}, (3 * 2 + 1) * UNIT),
        ("fsdp", {"accumulation": 3, "reshard": False}, 3 * 2 * UNIT),
    ],
)
def test_data_parallel_bytes(name: str, params: dict[str, Any], num_bytes: float) -> None:
    assert step_bytes(name, **params) == {"dp": pytest.approx(num_bytes)}


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_bytes(ranks: int) -> None:
    """A recomputed layer stops before its last sum, of which a scatter is half."""
    share = (ranks - 1) / ranks
    layers = 8 * ACTIVATION * share * LAYERS
    norms = (2 * LAYERS + 1) * 2 * HIDDEN * 4
    ends = (2 * ACTIVATION + 2 * norms) * share  # both gather; norms sum their gradients
    assert step_bytes("tp", ranks, accumulation=2)["tp"] == pytest.approx(2 * layers)
    assert step_bytes("tp", ranks, precision="bfloat16")["tp"] == pytest.approx(layers / 2)
    for how, factor, sp_factor in (("none", 1, 1), ("full", 10 / 8, 11 / 8)):
        tp = step_bytes("tp", ranks, checkpointing=how)["tp"]
        tp_sp = step_bytes("tp_sp", ranks, checkpointing=how)["tp"]
        assert tp == pytest.approx(factor * layers), how
        assert tp_sp == pytest.approx(sp_factor * layers + ends), how


@pytest.mark.parametrize(("checkpointing", "forwards"), [("none", 1), ("full", 2)])
def test_context_parallel_bytes(checkpointing: str, forwards: int) -> None:
    """Of c ranks, e bytes an element and float32 sums. Half as many key heads as heads."""
    c, e = 4, 2
    queries = TOKENS / c * HIDDEN * LAYERS
    keys_and_values = 2 * queries / 2
    expected = {
        "zigzag": {"cp": keys_and_values * (c - 1) * ((forwards + 1) * e + 4)},
        "allgather_kv": {"cp": keys_and_values * (c - 1) * (forwards + 2) * e},
        "usp": {
            "ring": keys_and_values * ((forwards + 1) * e + 4),
            "ulysses": (2 * queries + keys_and_values) * (forwards + 1) * e / 2,
        },
    }
    params = {"kv_heads": 2, "checkpointing": checkpointing, "precision": "bfloat16"}
    for method, axes in expected.items():
        ulysses = 2 if method == "usp" else 0
        sent = step_bytes("cp", c, method=method, ulysses=ulysses, **params)
        del sent["dp"]
        assert sent == pytest.approx(axes), method
    sent = step_bytes("cp", c, method="ulysses", **{**params, "kv_heads": 4})
    assert sent["cp"] == pytest.approx(4 * queries * (forwards + 1) * e * (c - 1) / c)
