"""Calls and bytes of every preset and mesh are what the papers and torch's defaults imply."""

from typing import Any

import pytest

from parbench.workloads.costs.communication_pattern import (
    bytes_by_axis,
    list_calls,
    sent_bytes,
    sum_calls,
)
from parbench.workloads.costs.parameter_table import count_elements, count_parameters
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.presets import PRESETS
from tests.support.workloads.planner_asks import make_spec

TINY = SHAPES["tiny"]  # every parameter's rows divide by 4
PSI, LAYERS, HIDDEN = count_parameters(TINY), TINY.layers, TINY.hidden
TOKENS = 4 * 64
ACTIVATION = TOKENS * HIDDEN * 4  # b s h e
HEAD = (TINY.vocabulary + 2) * HIDDEN
SHARE = 3 / 4  # (n - 1) / n
GATHER = PSI * 4 * SHARE
"""Bytes of one gather of all parameters in float32 over four ranks."""
Params = dict[str, Any]


def step_bytes(name: str, params: Params, ranks: int = 4) -> dict[str, float]:
    """Return the bytes that rank 0 sends in a step, by axis."""
    spec = PRESETS[name]({"shape": "tiny", "microbatch": 4, **params}, ranks)
    return bytes_by_axis(list_calls(spec.make_rank_view(0)))


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
    all_calls = list_calls(make_spec(mesh, model, microbatches=4).make_rank_view(0))
    for axis, num_bytes in bytes_by_axis(all_calls).items():
        equation = sum_calls([call for call in all_calls if call.axis == axis])
        assert equation.value == pytest.approx(num_bytes)
        assert eval(equation.numbers) == pytest.approx(num_bytes)


@pytest.mark.parametrize(
    ("name", "params", "num_bytes"),
    [
        ("ddp", {"microbatches": 3}, 2 * GATHER),  # Gradients once, in the last microbatch.
        ("ddp", {"microbatches": 3, "no_sync": False}, 3 * 2 * GATHER),
        ("ddp", {"precision": "bfloat16"}, 2 * GATHER),  # Gradients are reduced in float32.
        ("ddp", {"precision": "bfloat16", "reduce_dtype": "bfloat16"}, GATHER),
        ("zero1", {"microbatches": 3}, 2 * GATHER),
        ("zero1", {"precision": "bfloat16", "optimizer": "distributed"}, 1.5 * GATHER),
        ("zero1", {"optimizer": "zero_redundancy"}, 2 * GATHER + PSI * 4),
    ],
)
def test_replicated_bytes(name: str, params: Params, num_bytes: float) -> None:
    assert step_bytes(name, params) == {"dp": pytest.approx(num_bytes)}


@pytest.mark.parametrize(
    ("params", "gathers", "head_gathers", "scatters"),
    [
        ({"microbatches": 3}, 6, 3, 1),
        ({"microbatches": 3, "no_sync": False}, 6, 3, 3),
        ({"microbatches": 3, "reshard": False}, 3, 3, 1),
    ],
)
def test_fsdp_bytes(params: Params, gathers: int, head_gathers: int, scatters: int) -> None:
    """Norm and head stay gathered between forward and backward."""
    others = gathers * (PSI - HEAD) + head_gathers * HEAD
    expected = (others + scatters * PSI) * 4 * SHARE
    assert step_bytes("fsdp", params) == {"fsdp": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("checkpointing", "reduces", "scatters"), [("none", 8, 8), ("full", 10, 11)]
)
def test_tensor_parallel_bytes(checkpointing: str, reduces: int, scatters: int) -> None:
    """A recomputed layer stops before its last sum. Embedding and head add two sums."""
    params = {"checkpointing": checkpointing}
    layer = ACTIVATION * SHARE * LAYERS
    vocabulary = (4 * ACTIVATION + 3 * 2 * TOKENS * 4) * SHARE
    spec = PRESETS["tp_sp"]({"shape": "tiny"}, 4)
    replicated = count_elements(spec.make_rank_view(0), "replicated")
    expected = pytest.approx(reduces * layer + vocabulary)
    assert step_bytes("tp", params)["tp"] == expected
    sums = 2 * replicated * 4 * SHARE
    expected = pytest.approx(scatters * layer + vocabulary + sums)
    assert step_bytes("tp_sp", params)["tp"] == expected


def test_full_k_recomputes_one_layer_in_k() -> None:
    """Of layers 0 to 3 the layers 0 and 3 are recomputed."""
    none, third = (
        step_bytes("tp_sp", {"checkpointing": checkpointing})["tp"]
        for checkpointing in ("none", "full:3")
    )
    assert third - none == pytest.approx(2 * 3 * ACTIVATION * SHARE)


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
