"""The strategy table: hand-written formulas agree with the counted calls."""

import pytest

from parbench.bench.results.document import Table
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.parameter_table import elements_of, num_parameters
from parbench.workloads.planner.guide import Strategy, guide, strategies
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.models import MODELS, model_of

H100 = PRESETS["h100"]
SMALL = 0.005  # what a formula by hand leaves out: padding, norms, counts of tokens


def evaluate_formula(strategy: Strategy) -> float:
    """Evaluate the formula of a strategy with the sizes of its step."""
    spec, shape, moe = strategy.spec, strategy.spec.shape, strategy.spec.moe
    ranks = spec.world // (spec.size("fsdp") if "dp" in strategy.axes.split() else 1)
    symbols: dict[str, float] = {
        "Psi": num_parameters(shape, moe),
        "e": spec.element_bytes,
        "n": ranks,
        "r": (ranks - 1) / ranks,
        "f": spec.size("fsdp"),
        "L": shape.layers,
        "M": spec.microbatches,
        "b": spec.microbatch,
        "s": shape.sequence,
        "h": shape.hidden,
        "q": shape.heads * (shape.head_size + shape.value_size),
        "k": shape.kv_heads * (shape.head_size + shape.value_size),
        "D": moe.dense_layers if moe else 0,
        "W": elements_of(spec.at(0), "whole"),
        "top_k": moe.top_k if moe else 0,
    }
    return Equation(text=strategy.formula, symbols=symbols).value


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith(("tiny", "small"))]
)
def test_a_formula_by_hand_is_the_bytes_of_the_calls(name: str) -> None:
    known = strategies(model_of(name), 64, 8)
    assert {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP", "HSDP"} <= {one.name for one in known}
    for one in known:
        assert evaluate_formula(one) == pytest.approx(one.sent_bytes, rel=SMALL), (
            f"{name}: {one.name}"
        )


def test_every_strategy_of_a_llama_is_told_and_experts_where_there_are_some() -> None:
    names = [one.name for one in strategies(model_of("llama3-8b"), 64, 8)]
    context = ["CP, zigzag", "CP, allgather_kv", "CP, ulysses"]
    assert names == [
        "DDP",
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3, FSDP",
        "HSDP",
        "TP",
        "TP + SP",
        "PP",
        *context,
    ]
    assert strategies(model_of("mixtral-8x7b"), 64, 8)[-1].name == "EP"
    assert {one.name for one in strategies(model_of("llama3-8b"), 1, 8)} == set()
    (pipeline,) = [one for one in strategies(model_of("deepseek-v3"), 64, 8) if one.name == "PP"]
    assert pipeline.spec.split  # 61 layers


def _cells(table: Table, row: str) -> dict[str, object]:
    return next(
        dict(zip((one.title for one in table.columns), line, strict=True))
        for line in table.rows
        if line[0] == row
    )


def test_a_row_has_the_numbers_of_the_model() -> None:
    step = model_of("llama3-8b")
    psi = num_parameters(step.shape)
    table = guide(step, 64, H100).parts[0].tables[0]
    ddp, sharded = _cells(table, "DDP"), _cells(table, "ZeRO-3, FSDP")
    assert ddp["here"] == pytest.approx(2 * psi * 2 * 63 / 64 / 1e9, rel=SMALL)
    assert sharded["here"] == pytest.approx(3 * psi * 2 * 63 / 64 / 1e9, rel=SMALL)
    assert (ddp["state"], sharded["state"]) == pytest.approx(
        (16 * psi / 1e9, 16 * psi / 64 / 1e9), rel=1e-3
    )
    assert ddp["bytes a rank sends"] == "2 Psi e r"
    assert _cells(table, "ZeRO-1")["calls"] == "1 reduce_scatter, 1 all_gather"
