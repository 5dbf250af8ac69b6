"""Formulas, assumptions and JSON of a plan contain the numbers of its dry run."""

import json
from typing import Any

import pytest

from parbench.workloads.costs.equation import Equation
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.report.render import as_line, assumptions, dry_run_json, formulas_of
from tests.support.planner_asks import H100, make_spec

NOT_EVALUATED = ("bubble", "time on")
"""Formulas in words: a simulation, and a sum over calls."""
STEPS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "dp=2,fsdp=4,tp=2",
        "llama3-8b",
        {"microbatches": 3, "checkpointing": "full", "device": "cpu", "ends": "tokens"},
    ),
    (
        "fsdp=2,tp=4",
        "gpt-7.5b",
        {"microbatches": 2, "element_bytes": 4, "checkpointing": "selective"},
    ),
    ("dp=2,fsdp=2,pp=4,cp=2,tp=2", "llama3-70b", {"microbatches": 8, "checkpointing": "selective"}),
    ("pp=4,tp=2", "gpt-7.5b", {"microbatches": 8, "schedule": "gpipe", "checkpointing": "full"}),
    ("cp=4,tp=2", "llama3-8b", {"cp_method": "ulysses", "microbatch": 2, "checkpointing": "full"}),
    (
        "cp=4",
        "llama3-8b",
        {"cp_method": "allgather_kv", "microbatches": 2, "checkpointing": "full"},
    ),
    ("dp=4,pp=2,fsdp=4,tp=2,ep=2", "mixtral-8x7b", {"microbatches": 4, "checkpointing": "full"}),
    ("fsdp=16,tp=4,ep=2", "mixtral-8x7b", {"element_bytes": 4, "checkpointing": "selective"}),
]


def test_assumptions_name_efficiencies_and_notes() -> None:
    shown = "\n".join(assumptions(H100, 4, ["a note"]))
    for part in (
        "55% of 989.4 TFLOP/s * 0.5 for float32",
        "80% of 450 GB/s",
        "fsdp 90%",
        "launch 8 us",
        "a note",
    ):
        assert part in shown, part


def test_equation_numbers_can_be_evaluated() -> None:
    symbols = {"Psi": 1000.0, "e": 0.5, "n": 8, "Psi_x": 1234567890123, "thin": 1e-7}
    for text, numbers in (
        ("2 Psi e (n - 1) / n", "2 * 1000 * 0.5 * (8 - 1) / 8"),
        ("n (e + 4) (n - 1)", "8 * (0.5 + 4) * (8 - 1)"),
        ("Psi_x / n", "1234567890123 / 8"),
        ("thin", "1e-07"),
    ):
        assert Equation(text=text, symbols=symbols).numbers == numbers
    with pytest.raises(KeyError):
        _ = Equation(text="a b", symbols={"a": 1}).numbers


@pytest.mark.parametrize(("mesh", "model", "settings"), STEPS)
def test_formulas_give_the_numbers_of_the_dry_run(
    mesh: str, model: str, settings: dict[str, Any]
) -> None:
    run = dry_run(make_spec(mesh, model, **settings), H100)
    memory = run.fullest.memory
    formulas = {formula.name: formula for formula in formulas_of(run)}
    expected = {
        "state": memory.state,
        "activations": memory.activations,
        "compute": run.compute_seconds,
        "bubble": run.bubble_seconds,
        "update": run.update_seconds,
        "mfu": run.mfu,
        **{f"bytes on {axis.name}": axis.sent_bytes for axis in run.axes},
        **{f"time on {axis.name}": axis.seconds for axis in run.axes},
    }
    assert {name: formulas[name].value for name in expected} == pytest.approx(expected, rel=1e-4)
    for name, formula in formulas.items():
        assert formula.equation, name
        assert formula.source, name
        if not name.startswith(NOT_EVALUATED):
            assert eval(formula.numbers) == pytest.approx(formula.value, rel=1e-6), name


def test_dry_run_json_has_the_numbers_of_the_dry_run() -> None:
    run = dry_run(make_spec("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
    line = as_line(dry_run_json(run, ["a note"]))
    found = json.loads(line)
    expected = {
        "kind": "dry-run",
        "mesh": {"dp": 8, "fsdp": 4, "pp": 4, "tp": 8},
        "global_batch": 1024,
        "fits": True,
        "step_seconds": run.seconds,
        "mfu": run.mfu,
        "notes": ["a note"],
    }
    assert "\n" not in line
    assert expected.items() <= found.items()
    assert [rank["total"] for rank in found["memory_bytes"]] == [
        held.memory.total for held in run.ranks
    ]
    parts = found["compute_seconds"] + found["update_seconds"] + found["bubble_seconds"]
    exposed = sum(axis["exposed_seconds"] for axis in found["axes"].values())
    assert parts + exposed == pytest.approx(found["step_seconds"])
