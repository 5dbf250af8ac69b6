"""Every formula with its numbers: what is shown is what was computed, and each says where it is from."""

from typing import Any

import pytest
from planner_asks import H100, ask

from workloads.planner.ask import as_measured
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


TOLD_IN_WORDS = ("bubble", "time on")
"""Of a simulation, and of a sum over calls."""
STEPS: list[tuple[str, str, dict[str, Any]]] = [
    ("dp=2,fsdp=4,tp=2", "llama3-8b", {"microbatches": 3}),
    ("dp=2,fsdp=2,tp=4", "gpt-7.5b", {"microbatches": 2, "element_bytes": 4}),
    ("dp=2,fsdp=2,pp=4,cp=2,tp=2", "llama3-70b", {"microbatches": 8}),
    ("pp=4,tp=2", "gpt-7.5b", {"microbatches": 8, "schedule": "gpipe"}),
    ("pp=2,fsdp=2", "llama3-8b", {"microbatches": 4, "schedule": "interleaved"}),
    ("cp=4,tp=2", "llama3-8b", {"cp_method": "ulysses", "microbatch": 2}),
    ("cp=4", "llama3-8b", {"cp_method": "allgather_kv", "microbatches": 2}),
    ("cp=8,tp=4", "llama3-8b", {"cp_method": "ring"}),
    ("fsdp=8,ep=8", "mixtral-8x7b", {"microbatches": 2}),
    ("dp=4,pp=2,fsdp=4,cp=2,tp=2,ep=4", "mixtral-8x7b", {"microbatches": 4, "microbatch": 2}),
    ("fsdp=16,tp=4,ep=2", "mixtral-8x7b", {"element_bytes": 4}),
]


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("measured", [False, True], ids=["cluster", "measured"])
@pytest.mark.parametrize(("mesh", "model", "more"), STEPS, ids=[f"{model} {mesh}" for mesh, model, _ in STEPS])
def test_the_numbers_of_every_equation_give_its_value(
    mesh: str, model: str, more: dict[str, Any], measured: bool, how: str
) -> None:
    step = ask(mesh, model, checkpointing=how, **more)
    run = dry_run(as_measured(step) if measured else step, H100)
    seen = []
    for formula in formulas_of(run):
        if not formula.name.startswith(TOLD_IN_WORDS):
            seen.append(formula.name)
            assert eval(formula.numbers) == pytest.approx(formula.value, rel=1e-6), formula
    assert {"state", "activations", "compute", "update", "mfu"} <= set(seen)
    assert {name for name in seen if name.startswith("bytes on")} == {f"bytes on {axis.name}" for axis in run.time.axes}


def test_equations_are_those_of_the_step_that_was_asked_for() -> None:
    plain, full = (
        dry_run(ask("fsdp=8,tp=2,ep=8", "mixtral-8x7b", checkpointing=how), H100) for how in ("none", "full")
    )
    assert [named(run, "bytes on tp").equation for run in (plain, full)] == [
        "(4 L + 4) M b s h e (t - 1) / t + 2 norms e (t - 1) / t",
        "(6 L + 4) M b s h e (t - 1) / t + 2 norms e (t - 1) / t",
    ]
    assert [named(run, "bytes on ep").equation.split()[0] for run in (plain, full)] == ["4", "6"]
    dense = dry_run(ask("cp=2,tp=2", "llama3-8b", checkpointing="full"), H100)
    assert named(dense, "bytes on tp").equation.startswith("(12 L + 4) M")
    assert named(dense, "bytes on cp").equation == "L M 2 X (2 e + e + 4) (c - 1)"


def test_what_is_computed_again_is_part_of_activations_and_what_is_moved_again_of_compute() -> None:
    none, selective, full = (
        dry_run(ask("fsdp=8", "llama3-8b", checkpointing=how), H100) for how in ("none", "selective", "full")
    )
    layer = "(b s h e (2 / t + 2 + (2 + 2 g + 4 f / h) / t) + 4 a b s / t)"
    assert named(none, "activations").equation.startswith(f"n L {layer} + r (")
    assert named(full, "activations").equation.startswith(f"n L b s h e / t + {layer} + r (")
    assert "moved / (rate share)" in named(selective, "compute").equation
    assert "moved" not in named(full, "compute").equation


def test_precision_changes_the_widths() -> None:
    assert named(RUNS["flat"], "state").equation == "(2 + 2 + 12) Psi / fsdp"
    assert named(RUNS["experts"], "state").equation == "(4 + 4 + 8) (Psi / fsdp + experts / shards)"


@pytest.mark.parametrize(
    ("sharded", "wide", "told"),
    [(True, True, "(1 / t + 1) + b s V (e + 4) / t"), (False, False, "(1 / t + 1 / t) + b s V e / t")],
)
def test_the_head_is_told_as_the_step_has_it(sharded: bool, wide: bool, told: str) -> None:
    run = dry_run(ask("tp=2", "llama3-8b", sharded_vocabulary=sharded, float32_loss=wide), H100)
    assert told in named(run, "activations").equation


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("flat", "4 f / h"),
        ("staged", "n L b s h e (5 + 2 g + 2 f / h) / t"),
        ("gpt", "n L b s h e / t"),
        ("experts", "4 k f / h + 2 k"),
    ],
)
def test_activations_have_the_formula_of_their_checkpointing(name: str, part: str) -> None:
    assert part in named(RUNS[name], "activations").equation


def test_buffers_are_told_where_there_are_any() -> None:
    assert named(RUNS["flat"], "buffers").equation == "3 Psi e / L"
    assert named(RUNS["staged"], "buffers").equation == "2 Psi e"
    assert named(dry_run(ask("fsdp=16,ep=8", "mixtral-8x7b"), H100), "buffers").equation == "3 (Psi + experts) e / L"
    assert not [formula for formula in formulas_of(RUNS["gpt"]) if formula.name == "buffers"]
