"""Formulas and JSON of a plan contain the numbers of its dry run."""

import json
from typing import Any

import pytest

from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.report.render import (
    as_line,
    assumptions,
    dry_run_json,
    formulas_of,
)
from tests.support.planner_asks import H100, make_spec

WORDED_FORMULAS = ("bubble", "time on")
"""Formulas in words: a simulation, and a sum over calls."""


@pytest.mark.parametrize(
    ("mesh", "model", "params"),
    [
        (
            "dp=2,fsdp=4,tp=2",
            "llama3-8b",
            {"microbatches": 3},
        ),
        ("fsdp=2,tp=4", "gpt-7.5b", {"bytes_per_element": 4, "checkpointing": "selective"}),
        ("cp=4,tp=2", "llama3-8b", {"cp_method": "ulysses", "checkpointing": "full"}),
        ("fsdp=16,pp=2,tp=4,ep=2", "mixtral-8x7b", {"microbatches": 4}),
    ],
)
def test_formulas_evaluate_to_the_dry_run(
    mesh: str, model: str, params: dict[str, Any]
) -> None:
    run = dry_run(make_spec(mesh, model, **params), H100)
    formulas = {formula.name: formula for formula in formulas_of(run)}
    expected = {
        "state": run.fullest.memory.state,
        "activations": run.fullest.memory.activations,
        "compute": run.compute_seconds,
        "bubble": run.bubble_seconds,
        "update": run.update_seconds,
        "mfu": run.mfu,
    }
    for axis in run.axes:
        expected[f"bytes on {axis.name}"] = axis.sent_bytes
        expected[f"time on {axis.name}"] = axis.seconds
    values = {name: formulas[name].value for name in expected}
    assert values == pytest.approx(expected, rel=1e-4)
    for name, formula in formulas.items():
        assert formula.source, name
        if not name.startswith(WORDED_FORMULAS):
            assert eval(formula.numbers) == pytest.approx(formula.value, rel=1e-6), name


def test_assumptions_contain_efficiencies() -> None:
    text = "\n".join(assumptions(H100, 4, ["a note"]))
    assert "55% of 989.4 TFLOP/s * 0.5 for float32" in text
    assert "80% of 450 GB/s" in text
    assert "fsdp 90%" in text
    assert "a note" in text


def test_json_has_numbers_of_the_dry_run() -> None:
    run = dry_run(make_spec("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
    line = as_line(dry_run_json(run, []))
    document = json.loads(line)
    assert document["mesh"] == {"dp": 8, "fsdp": 4, "pp": 4, "tp": 8}
    assert document["fits"] is True
    assert document["step_seconds"] == run.seconds
    totals = [rank.memory.total for rank in run.ranks]
    assert [rank["total"] for rank in document["memory_bytes"]] == totals
    seconds = sum(axis["exposed_seconds"] for axis in document["axes"].values())
    for part in ("compute", "update", "bubble"):
        seconds += document[f"{part}_seconds"]
    assert seconds == pytest.approx(run.seconds)
