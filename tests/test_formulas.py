"""Every formula with its numbers: what is shown is what was computed, and each says where it is from."""

from typing import Any

import pytest
from planner_asks import H100, ask

from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.formulas import Formula, formulas_of

MESHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flat": ("dp=2,fsdp=4,tp=2", "llama3-8b", {}),
    "staged": ("dp=2,fsdp=2,pp=4,cp=2,tp=2", "llama3-70b", {"microbatches": 8, "checkpointing": "selective"}),
    "gpt": ("dp=4,pp=12,tp=8", "gpt-175b", {"microbatches": 24, "checkpointing": "full"}),
    "experts": ("fsdp=8,ep=8", "mixtral-8x7b", {"element_bytes": 4}),
}
RUNS = {name: dry_run(ask(mesh, model, **more), H100) for name, (mesh, model, more) in MESHES.items()}


def named(run: DryRun, name: str) -> Formula:
    return next(formula for formula in formulas_of(run) if formula.name == name)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_values_are_those_of_the_dry_run(run: DryRun) -> None:
    memory, time = run.fullest.memory, run.time
    assert named(run, "state").value == memory.state
    assert named(run, "activations").value == memory.activations
    assert named(run, "compute").value == time.compute_seconds
    assert named(run, "bubble").value == time.bubble_seconds
    assert named(run, "update").value == time.update_seconds
    assert named(run, "mfu").value == run.mfu
    for axis in time.axes:
        assert named(run, f"bytes on {axis.name}").value == axis.sent_bytes
        assert named(run, f"time on {axis.name}").value == axis.seconds


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_formula_has_an_equation_numbers_and_a_source(run: DryRun) -> None:
    for formula in formulas_of(run):
        assert formula.equation
        assert formula.numbers
        assert formula.source


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_numbers_of_compute_give_its_value(run: DryRun) -> None:
    formula = named(run, "compute")
    plain = formula.numbers.replace("FLOP/s", "")
    again = 1.0 if run.ask.checkpointing != "selective" else 0.98  # which moves memory beside
    assert eval(plain) == pytest.approx(formula.value * again, rel=0.02)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_numbers_of_mfu_give_its_value(run: DryRun) -> None:
    formula = named(run, "mfu")
    assert eval(formula.numbers) == pytest.approx(formula.value, rel=1e-3)


def test_precision_changes_the_widths() -> None:
    assert named(RUNS["flat"], "state").equation == "(2 + 2 + 12) Psi / fsdp"
    assert named(RUNS["experts"], "state").equation == "(4 + 4 + 8) Psi / fsdp"


@pytest.mark.parametrize(
    ("sharded", "wide", "told"),
    [(True, True, "(1/t + 1) + b s V (e + 4) / t"), (False, False, "(1/t + 1/t) + b s V e / t")],
)
def test_the_head_is_told_as_the_step_has_it(sharded: bool, wide: bool, told: str) -> None:
    run = dry_run(ask("tp=2", "llama3-8b", sharded_vocabulary=sharded, float32_loss=wide), H100)
    assert told in named(run, "activations").equation


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("flat", "4f/h"),
        ("staged", "s b h e (5 + 2g + k f/h) / t"),
        ("gpt", "in flight * layers * s b h e / t"),
    ],
)
def test_activations_have_the_formula_of_their_checkpointing(name: str, part: str) -> None:
    assert part in named(RUNS[name], "activations").equation


def test_buffers_are_told_where_there_are_any() -> None:
    assert "two gathered" in named(RUNS["flat"], "buffers").equation
    assert "gathered and unreduced" in named(RUNS["staged"], "buffers").equation
    assert not [formula for formula in formulas_of(RUNS["gpt"]) if formula.name == "buffers"]
