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
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import (
    elements_of,
    num_parameters,
    padded_elements,
    tables_of,
)
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import MIXED, SHAPES, Widths
from tests.support.planner_asks import make_spec
from tests.support.training_steps import DEFINITION_BY_NAME

TINY = SHAPES["tiny"]  # every parameter's rows divide by 4
PSI, LAYERS, HIDDEN = num_parameters(TINY), TINY.layers, TINY.hidden
ROOT = (512 + 64 + 512) * HIDDEN + 2 * HIDDEN  # embeddings, head and last norm
TOKENS = 4 * 64
ACTIVATION = TOKENS * HIDDEN * 4  # b s h e


def make_case_spec(name: str, ranks: int = 4, **params: Any) -> StepSpec:
    case = DEFINITION_BY_NAME[name].whole({"shape": "tiny", "microbatch": 4, **params})
    return STRATEGIES[name](case, ranks, "cpu")


def step_bytes(name: str, ranks: int = 4, **params: Any) -> dict[str, float]:
    """Return the bytes that rank 0 sends in a step, by axis."""
    return bytes_by_axis(calls(make_case_spec(name, ranks, **params).at(0)))


def mesh_bytes(mesh: str, ranks: int, **params: Any) -> dict[str, float]:
    return step_bytes("hybrid", ranks, mesh=mesh, microbatches=4, **params)


def calls_on(spec: StepSpec, axis: str) -> list[Call]:
    return [call for call in calls(spec.at(0)) if call.axis == axis]


def test_sent_bytes_of_operations() -> None:
    """A broadcast counts the busiest rank of a chain, as nccl-tests do."""
    rings = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    expected = {"all_reduce": 1200, **dict.fromkeys(rings, 600)}
    expected |= {"broadcast": 800, "reduce": 800, "send": 800, "recv": 0, "barrier": 0}
    assert {operation: sent_bytes(operation, 800, 4) for operation in expected} == expected
    assert {sent_bytes(operation, 800, 1) for operation in expected} == {0}
    with pytest.raises(ValueError, match="allreduce"):
        sent_bytes("allreduce", 8, 2)
    with pytest.raises(ValueError, match="0"):
        sent_bytes("all_reduce", 8, 0)


def test_equation_text_gives_its_value() -> None:
    symbols = {"b": 2, "s": 5, "h": 0.5, "e": 4, "t": 8}
    equation = Equation(text="3 b (s + h) e / t", symbols=symbols)
    assert (equation.value, equation.numbers) == (16.5, "3 * 2 * (5 + 0.5) * 4 / 8")


@pytest.mark.parametrize(
    ("mesh", "model"),
    [("dp=2,fsdp=2,pp=2,cp=2,tp=2", "llama3-8b"), ("fsdp=8,tp=2,ep=4", "mixtral-8x7b")],
)
def test_equations_give_bytes_of_calls(mesh: str, model: str) -> None:
    spec = make_spec(mesh, model, microbatches=4)
    for axis, num_bytes in bytes_by_axis(calls(spec.at(0))).items():
        equation = equation_of(calls_on(spec, axis))
        assert eval(equation.numbers) == pytest.approx(num_bytes) == equation.value


def test_data_parallel_bytes() -> None:
    unit = PSI * 4 * 3 / 4
    table: list[tuple[str, dict[str, Any], float]] = [
        ("ddp", {}, 2 * unit),
        ("ddp", {"accumulation": 3}, 3 * 2 * unit),
        ("ddp", {"accumulation": 3, "no_sync": True}, 2 * unit),
        ("ddp", {"precision": "bfloat16"}, unit),
        ("ddp", {"grad_compression": "bf16"}, unit),
        ("zero1", {"accumulation": 3}, 3 * 2 * unit + PSI * 4),
        ("zero1", {"optimizer": "distributed"}, 2 * unit),
        ("fsdp", {"accumulation": 3}, 3 * 3 * unit),
        ("fsdp", {"accumulation": 3, "no_sync": True}, (3 * 2 + 1) * unit),
        ("fsdp", {"accumulation": 3, "reshard": False}, 3 * 2 * unit),
    ]
    for name, params, num_bytes in table:
        assert step_bytes(name, **params) == {"dp": pytest.approx(num_bytes)}, (name, params)


def test_hsdp_bytes() -> None:
    """The root stays gathered."""
    sent = step_bytes("hsdp", shard=2, accumulation=2)
    assert sent["shard"] == pytest.approx(2 * (3 * PSI - ROOT) * 4 / 2)
    assert sent["replicate"] == pytest.approx(2 * 2 * (PSI / 2) * 4 / 2)
    assert step_bytes("hsdp", shard=4).keys() == {"shard"}


def test_ddp_calls_per_bucket() -> None:
    for bucket_mb, buckets in ((0.5, -(-PSI * 4 // (1 << 19))), (25.0, 1)):
        [call] = calls(make_case_spec("ddp", bucket_mb=bucket_mb).at(0))
        assert call.times == buckets


def test_fsdp_pads_each_parameter() -> None:
    at = make_case_spec("fsdp", 3).at(0)
    tables = tables_of(at)
    padded = LAYERS * padded_elements(tables.layers[0][1], 3) + padded_elements(tables.ends, 3)
    assert padded > PSI
    assert bytes_by_axis(calls(at))["dp"] == pytest.approx(3 * padded * 4 * 2 / 3)


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


def test_tensor_parallel_fsdp_bytes() -> None:
    sent = step_bytes("tp_fsdp", tp=2)
    elements = elements_of(make_case_spec("tp_fsdp", tp=2).at(0))
    assert sent == {"tp": step_bytes("tp", 2)["tp"], "dp": pytest.approx(3 * elements * 4 / 2)}


def test_split_vocabulary_sums_only_norms() -> None:
    split = make_spec("tp=2", "llama3-8b")
    norms, ends = (2 * 32 + 1) * 4096, 2 * 128256 * 4096
    for spec, elements in ((split, norms), (replace(split, ends="tokens"), norms + ends)):
        [call] = [call for call in calls_on(spec, "tp") if call.op == "all_reduce"]
        assert call.num_bytes / 2 == elements


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


@pytest.mark.parametrize("ep", [2, 4])
def test_expert_parallel_bytes(ep: int) -> None:
    even: dict[str, Any] = {"routing": "balanced", "experts": 8, "top_k": 2}
    tokens, counts = TOKENS * 2 * HIDDEN * 4 * (ep - 1) / ep, 8 * 8 * (ep - 1) / ep
    for checkpointing, forwards in (("none", 1), ("full", 2)):
        sent = step_bytes("ep_step", ep=ep, checkpointing=checkpointing, accumulation=3, **even)
        per_layer = 2 * (forwards + 1) * tokens + forwards * counts
        assert sent["ep"] == pytest.approx(3 * LAYERS * per_layer), checkpointing
    at = make_case_spec("ep_step", ep=ep, **even).at(0)
    dense, routed = elements_of(at, "whole", "split"), elements_of(at, "routed")
    assert sent["dp"] == pytest.approx(2 * dense * 4 * 3 / 4)
    assert sent.get("edp", 0) == pytest.approx(2 * routed * 4 * (1 - ep / 4))


def test_mesh_bytes_of_axes() -> None:
    assert mesh_bytes("dp=1", 1) == {}
    assert mesh_bytes("dp=1,tp=2", 2).keys() == {"tp"}
    assert mesh_bytes("dp=4", 4) == step_bytes("ddp")  # once a step
    assert mesh_bytes("dp=2,cp=2", 4)["dp"] == step_bytes("ddp")["dp"]
    assert mesh_bytes("dp=2,fsdp=4", 8)["dp"] == pytest.approx(2 * PSI / 4 * 4 / 2)
    assert mesh_bytes("fsdp=4", 4)["fsdp"] == pytest.approx((2 * 4 + 1) * PSI * 4 * 3 / 4)
    assert mesh_bytes("pp=2,cp=2,tp=2", 8)["pp"] == mesh_bytes("pp=2", 2)["pp"] / 4
    stage = elements_of(make_case_spec("hybrid", mesh="fsdp=2,pp=2", microbatches=4).at(0))
    assert mesh_bytes("fsdp=2,pp=2", 4)["fsdp"] == pytest.approx(2 * stage * 4 / 2)
    for method in ("zigzag", "allgather_kv", "ulysses"):
        whole = mesh_bytes("cp=2", 2, cp_method=method)["cp"]
        assert mesh_bytes("cp=2,tp=2", 4, cp_method=method)["cp"] == pytest.approx(whole / 2)


def test_gradients_travel_in_their_dtype() -> None:
    wide = Widths.parse("gradients=float32", MIXED)
    table = (("dp=8", "", 2.0), ("dp=8", "reduce_scatter", 1.5), ("fsdp=8", "", 4 / 3))
    for mesh, zero1, factor in table:
        narrow, float32 = (
            sum(
                bytes_by_axis(
                    calls(make_spec(mesh, "llama3-8b", zero1=zero1, state=state).at(0))
                ).values()
            )
            for state in (None, wide)
        )
        assert float32 / narrow == pytest.approx(factor), (mesh, zero1)
