"""What a reader sees, as text, JSON and formulas: all of a dry run's numbers, and none that is not there."""

import json
import re
from typing import Any

import pytest
from planner_asks import H100, as_measured, ask

from parbench.workloads.costs.equation import Equation
from parbench.workloads.planner.candidates import Wanted
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.rationale import binding_of
from parbench.workloads.planner.report.render import (
    Formula,
    as_line,
    assumptions,
    dry_run_json,
    dry_run_text,
    duration,
    formulas_of,
    formulas_text,
    search_json,
    search_text,
    table,
)
from parbench.workloads.planner.search import search

RUN = dry_run(ask("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
TEXT = dry_run_text(RUN, ["a note"])
LONG = ask("cp=64,tp=8", model_of("llama3-8b", 4194304), checkpointing="selective")
"""Whose MFU is above 100%, of which it must tell."""


def test_durations_have_three_digits_and_tables_align_words_left_and_numbers_right() -> None:
    shown = [duration(seconds) for seconds in (0, 12.345, 1, 0.0123, 4.2e-5, 123.4)]
    assert shown == ["0", "12.3 s", "1 s", "12.3 ms", "42 us", "123 s"]
    shown = table(["name", "n"], [["a", "10"], ["long name", "5"]]).splitlines()
    assert shown == ["name        n", "a          10", "long name   5"]


def test_it_says_first_that_nothing_was_measured_and_below_what_was_assumed() -> None:
    assert TEXT.startswith("Predicted, not measured: llama3-70b on 1024 GPUs (h100), mesh dp=8,fsdp=4,pp=4,tp=8")
    assert "global batch 1024 = 32 data ranks x 32 microbatches x 1, sequence 8192, 70.55 B parameters, " in TEXT
    told = TEXT[TEXT.index("Assumed:") :]
    for part in ("55% of 989.4 TFLOP/s", "80% of 450 GB/s", "fsdp 90%", "launch 8 us", "not checked", "a note"):
        assert part in told, part
    assert "TFLOP/s * 0.5 for float32" in assumptions(H100, 4)[0]
    assert "float32" not in str(assumptions(H100, 2))


def test_every_rank_that_differs_and_every_axis_has_a_row() -> None:
    for held in RUN.ranks:
        [row] = [line for line in TEXT.splitlines() if line.startswith(held.at.words + " ")]
        assert row.endswith(f"{held.memory.total / 1e9:.2f}")
    assert "87% of 73.6 GB usable a GPU" in TEXT
    for axis in RUN.axes:
        [row] = [line for line in TEXT.splitlines() if re.match(rf"{axis.name} +(inside|across)", line)]
        assert axis.assumption in row
        assert f"{axis.sent_bytes / 1e6:.3f} MB" in row or f"{axis.sent_bytes / 1e9:.3f} GB" in row
        assert f"{duration(axis.seconds)}  " in row
        assert row.endswith(duration(axis.exposed_seconds))
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%$", TEXT, re.MULTILINE)]
    assert sum(shares[: shares.index(100.0)]) == pytest.approx(100, abs=0.5)
    alone = dry_run_text(dry_run(ask("dp=1"), H100))
    assert "sent a rank" not in alone
    assert "bubble:" not in alone


def test_formulas_have_three_lines_each() -> None:
    lines = formulas_text(RUN).splitlines()
    assert len(lines) % 3 == 0
    assert lines[0].startswith("parameters of a rank = ")
    assert all(line.startswith("  = ") for i, line in enumerate(lines) if i % 3)
    assert all(re.search(r"\[.+\]$", line) for line in lines[2::3])


def test_a_search_shows_candidates_what_binds_them_and_why() -> None:
    wanted = Wanted(step=ask(model="llama3-8b"), gpus=16, global_batch=64)
    found = search(wanted, H100, top=3)
    text, told = search_text(found, wanted, ["a note"]), json.loads(as_line(search_json(found)))
    asked = "llama3-8b on 16 GPUs (h100) at global batch 64 of 8192 tokens, 8.03 B parameters"
    assert text.startswith(f"Predicted, not measured: {asked}; {found.tried} candidates")
    for run, best in zip(found.best, told["best"], strict=True):
        assert re.search(rf"^{re.escape(run.spec.mesh_text)} .*{re.escape(binding_of(run))}", text, re.MULTILINE)
        assert (best["bound_by"], best["step_seconds"]) == (binding_of(run), run.seconds)
    assert "Why the first:\n  fit: " in text
    assert text.rstrip().endswith("a note")
    assert (told["kind"], told["tried"]) == ("search", found.tried)
    assert told["why"][0].startswith("fit: ")


def test_what_a_reader_must_know_stands_below_its_number_and_among_the_notes() -> None:
    above = dry_run(LONG, H100)
    [caveat] = above.caveats
    assert f"MFU {above.mfu:.1%}\n{caveat}\n" in dry_run_text(above)
    assert dry_run_json(above, ["a note"])["notes"] == [caveat, "a note"]
    wanted = Wanted(step=LONG, gpus=512, global_batch=1)
    found = search(wanted, PRESETS["h200"], top=1)
    [best] = found.best
    assert f"\n{best.spec.mesh_text}: {best.caveats[0]}\n" in search_text(found, wanted)


def test_json_has_the_same_numbers_on_one_line() -> None:
    line = as_line(dry_run_json(RUN, ["a note"]))
    assert "\n" not in line
    found, time = json.loads(line), RUN
    expected = {
        "kind": "dry-run",
        "predicted": True,
        "model": "llama3-70b",
        "gpus": 1024,
        "mesh": {"dp": 8, "fsdp": 4, "pp": 4, "tp": 8},
        "global_batch": 1024,
        "fits": True,
        "step_seconds": time.seconds,
        "tokens_per_second": RUN.tokens_per_second,
        "mfu": RUN.mfu,
        "notes": ["a note"],
    }
    assert expected.items() <= found.items()
    assert [held["total"] for held in found["memory_bytes"]] == [held.memory.total for held in RUN.ranks]
    assert {name: axis["sent_bytes"] for name, axis in found["axes"].items()} == {
        axis.name: axis.sent_bytes for axis in time.axes
    }
    parts = found["compute_seconds"] + found["update_seconds"] + found["bubble_seconds"]
    exposed = sum(axis["exposed_seconds"] for axis in found["axes"].values())
    assert parts + exposed == pytest.approx(found["step_seconds"])
    assert found["hardware"]["efficiency"]["gemm"] == 0.55
    assert {"state", "activations", "compute", "mfu"} <= {formula["name"] for formula in found["formulas"]}
    large = dry_run_json(dry_run(ask("tp=8", "llama3-70b"), H100))
    assert large["fits"] is False
    assert large["memory_bytes"][0]["total"] > large["usable_bytes"]


MESHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flat": ("dp=2,fsdp=4,tp=2", "llama3-8b", {}),
    "staged": ("dp=2,fsdp=2,pp=4,cp=2,tp=2", "llama3-70b", {"microbatches": 8, "checkpointing": "selective"}),
    "gpt": ("dp=4,pp=12,tp=8", "gpt-175b", {"microbatches": 24, "checkpointing": "full"}),
    "experts": ("fsdp=8,ep=8", "mixtral-8x7b", {"element_bytes": 4}),
}
RUNS = {name: dry_run(ask(mesh, model, **more), H100) for name, (mesh, model, more) in MESHES.items()}


def named(run: DryRun, name: str) -> Formula:
    return next(formula for formula in formulas_of(run) if formula.name == name)


def test_symbols_become_numbers_that_a_calculator_takes() -> None:
    symbols = {"Psi": 1000.0, "e": 0.5, "n": 8, "Psi_x": 1234567890123, "thin": 1e-7}
    for text, numbers in (
        ("2 Psi e (n - 1) / n", "2 * 1000 * 0.5 * (8 - 1) / 8"),
        ("(2 + 2) Psi", "(2 + 2) * 1000"),
        ("n (e + 4) (n - 1)", "8 * (0.5 + 4) * (8 - 1)"),
        ("Psi_x / n", "1234567890123 / 8"),
        ("thin", "1e-07"),
    ):
        assert Equation(text=text, symbols=symbols).numbers == numbers
    with pytest.raises(KeyError):
        _ = Equation(text="a b", symbols={"a": 1}).numbers


def test_values_are_those_of_the_dry_run_and_each_has_equation_numbers_and_source() -> None:
    for name, run in RUNS.items():
        memory, time, found = run.fullest.memory, run, formulas_of(run)
        values = {
            "state": memory.state,
            "activations": memory.activations,
            "compute": time.compute_seconds,
            "bubble": time.bubble_seconds,
            "update": time.update_seconds,
            "mfu": run.mfu,
            **{f"bytes on {axis.name}": axis.sent_bytes for axis in time.axes},
            **{f"time on {axis.name}": axis.seconds for axis in time.axes},
        }
        told = {formula.name: formula.value for formula in found}
        assert {one: told[one] for one in values} == pytest.approx(values), name
        assert all(formula.equation and formula.numbers and formula.source for formula in found), name


TOLD_IN_WORDS = ("bubble", "time on")
"""Of a simulation, and of a sum over calls."""
STEPS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("dp=2,fsdp=4,tp=2", "llama3-8b", "cpu", {"microbatches": 3, "checkpointing": "full"}),
    ("fsdp=2,tp=4", "gpt-7.5b", "", {"microbatches": 2, "element_bytes": 4, "checkpointing": "selective"}),
    ("dp=2,fsdp=2,pp=4,cp=2,tp=2", "llama3-70b", "", {"microbatches": 8, "checkpointing": "selective"}),
    ("pp=4,tp=2", "gpt-7.5b", "cpu", {"microbatches": 8, "schedule": "gpipe", "checkpointing": "full"}),
    ("pp=2,fsdp=2", "llama3-8b", "cuda", {"microbatches": 4, "schedule": "interleaved"}),
    ("cp=4,tp=2", "llama3-8b", "", {"cp_method": "ulysses", "microbatch": 2, "checkpointing": "full"}),
    ("cp=4", "llama3-8b", "", {"cp_method": "allgather_kv", "microbatches": 2, "checkpointing": "full"}),
    ("fsdp=16,cp=2,ep=4", "mixtral-8x7b", "cpu", {"microbatches": 2, "checkpointing": "full"}),
    ("dp=4,pp=2,fsdp=4,tp=2,ep=2", "mixtral-8x7b", "", {"microbatches": 4, "checkpointing": "full"}),
    ("fsdp=16,tp=4,ep=2", "mixtral-8x7b", "", {"element_bytes": 4, "checkpointing": "selective"}),
]


def test_the_numbers_of_every_equation_give_its_value() -> None:
    for mesh, model, device, more in STEPS:
        step = ask(mesh, model, **more)
        run = dry_run(as_measured(step, device) if device else step, H100)
        seen = set()
        for formula in formulas_of(run):
            if not formula.name.startswith(TOLD_IN_WORDS):
                seen.add(formula.name)
                assert eval(formula.numbers) == pytest.approx(formula.value, rel=1e-6), (mesh, formula)
        axes = {f"bytes on {axis.name}" for axis in run.axes}
        assert seen >= {"parameters of a rank", "state", "activations", "compute", "update", "mfu", *axes}, mesh


def test_equations_are_those_of_the_step_that_was_asked_for() -> None:
    flights = "(2 L + 2) M b s h e (R - 1) / R"
    layer = "2 (n (h e + 4)) + G h e + G h e (2 + 2 g) / t + 4 G a / t + G h e + 4 G f e / t"
    texts: list[tuple[str, str, str, str]] = [
        ("fsdp=8,tp=2,ep=8", "none", "bytes on tp", f"{flights} + {flights} + whole e 2 (R - 1) / R"),
        ("fsdp=8,tp=2,ep=8", "full", "bytes on tp", "(3 L + 2) M b s h e (R - 1) / R + (3 L + 2) M"),
        ("fsdp=8,tp=2,ep=8", "none", "state", "(2 + 2 + 12) Psi / fsdp + (2 + 2 + 12) experts / shards"),
        ("fsdp=16,ep=8", "none", "buffers", "3 Psi e / L"),
        ("fsdp=4,pp=2", "none", "buffers", "2 Psi e"),
        ("cp=2,tp=2", "full", "bytes on cp", "3 L M 2 G j d e / t + L M 2 G j d 4 / t"),
        (
            "fsdp=8",
            "full",
            "activations",
            f"m L (n h e) + {layer} + m (8 n) + w (n (h e + 4) + G h e + G V (e + 4) / t",
        ),
        ("fsdp=8", "selective", "compute", "M ((forward + backward + again) / (peak gemm) + moved / (rate share))"),
        ("fsdp=8", "full", "compute", "M (forward + backward + again) / (peak gemm)"),
    ]
    for mesh, how, name, text in texts:
        run = dry_run(ask(mesh, "mixtral-8x7b" if "ep" in mesh else "llama3-8b", checkpointing=how), H100)
        assert named(run, name).equation.startswith(text), (mesh, how, name)
    assert not [formula for formula in formulas_of(RUNS["gpt"]) if formula.name == "buffers"]
