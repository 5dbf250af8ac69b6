"""The strategy table: formulas written by hand agree with the counted calls."""

from dataclasses import replace

import pytest

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import count_elements, count_parameters
from parbench.workloads.planner.models import load_model
from parbench.workloads.planner.report.guide import (
    Strategy,
    list_strategies,
    make_guide_document,
)
from tests.support.workloads.planner_asks import H100


def evaluate_formula(strategy: Strategy) -> float:
    """Evaluate the formula of a strategy with the sizes of its step."""
    spec, shape, moe = strategy.spec, strategy.spec.shape, strategy.spec.moe
    ranks = spec.ranks // (spec.dims.fsdp if "dp" in strategy.axes.split() else 1)
    symbols: dict[str, float] = {
        "Psi": count_parameters(shape, moe),
        "e": spec.bytes_per_element,
        "n": ranks,
        "r": (ranks - 1) / ranks,
        "f": spec.dims.fsdp,
        "g": spec.reduce_bytes,
        "H": shape.hidden * (shape.vocabulary + 1),
        "L": shape.layers,
        "M": spec.microbatches,
        "b": spec.microbatch,
        "s": shape.sequence,
        "h": shape.hidden,
        "q": shape.heads * (shape.head_size + shape.value_size),
        "k": shape.kv_heads * (shape.head_size + shape.value_size),
        "D": moe.dense_layers if moe else 0,
        "W": count_elements(spec.make_rank_view(0), "replicated"),
        "top_k": moe.top_k if moe else 0,
    }
    return Equation(text=strategy.formula, symbols=symbols).value


LLAMA_STRATEGIES = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP", "HSDP", "TP", "TP + SP", "PP"]
CONTEXT_STRATEGIES = ["CP, zigzag", "CP, allgather_kv", "CP, ulysses"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("llama3-8b", {*LLAMA_STRATEGIES, *CONTEXT_STRATEGIES}),
        ("gpt-175b", {*LLAMA_STRATEGIES, *CONTEXT_STRATEGIES}),
        ("mixtral-8x7b", {"HSDP", "EP"}),
        ("deepseek-v3", {"HSDP", "PP", "EP"}),
    ],
)
def test_formulas_match_bytes_of_the_calls(model: str, names: set[str]) -> None:
    """Formulas ignore padding, norms and the counts of tokens."""
    table = list_strategies(load_model(model), 64, 8)
    assert names <= {strategy.name for strategy in table}
    for strategy in table:
        expected = pytest.approx(strategy.sent_bytes, rel=0.005)
        assert evaluate_formula(strategy) == expected, strategy.name


@pytest.mark.parametrize(("reduce_bytes", "ratio"), [(4, 1.0), (2, 1.5)])
def test_zero3_sends_as_much_as_noted(reduce_bytes: int, ratio: float) -> None:
    step = replace(load_model("llama3-70b"), reduce_bytes=reduce_bytes)
    sent = {strategy.name: strategy.sent_bytes for strategy in list_strategies(step, 64, 8)}
    assert sent["ZeRO-3, FSDP"] / sent["DDP"] == pytest.approx(ratio, rel=0.02)


def test_strategies_of_one_gpu_are_empty() -> None:
    assert list_strategies(load_model("llama3-8b"), 1, 8) == []


def test_guide_contains_the_limits_of_strategies() -> None:
    document = make_guide_document(load_model("llama3-8b"), 64, H100)
    tables = {table.id: table for part in document.sections for table in part.tables}
    regimes = [row["regime"] for row in tables["regimes"].rows]
    assert regimes[0] == "communication bound"
    assert regimes[-1] == "FSDP"
    assert tables["recomputation"].rows[0]["microbatch_16"] is None
