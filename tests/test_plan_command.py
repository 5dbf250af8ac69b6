"""``parbench plan`` as a person types it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Command


@pytest.mark.measures
def test_help_has_examples_and_comes_at_once(parbench: Command) -> None:
    began = time.perf_counter()
    shown = parbench("plan", "--help")
    assert shown.returncode == 0
    assert time.perf_counter() - began < 2
    for words in ("Examples:", "--search", "--validate", "--published", "Exit codes: 0 fine; 2 bad input"):
        assert words in shown.stdout


def test_a_dry_run_of_a_thousand_gpus(parbench: Command) -> None:
    shown = parbench("plan", "--model", "llama3-70b", "--gpus", "1024", "--mesh", "dp=8,fsdp=4,pp=4,tp=8")
    assert shown.returncode == 0, shown.stderr
    assert "Predicted, not measured: llama3-70b on 1024 GPUs (h100)" in shown.stdout
    assert shown.stderr == ""


def test_json_goes_to_stdout_alone(parbench: Command) -> None:
    shown = parbench("plan", "--model", "tiny", "--mesh", "dp=2", "--json")
    assert json.loads(shown.stdout)["model"] == "tiny"


def test_what_does_not_fit_is_shown_and_exits_with_2(parbench: Command) -> None:
    shown = parbench("plan", "--model", "llama3-70b", "--mesh", "tp=8", "--json")
    assert shown.returncode == 2
    assert json.loads(shown.stdout)["fits"] is False
    assert shown.stderr.startswith("parbench: llama3-70b with tp=8 needs ")
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "llama3-70", "--mesh", "tp=8"], "did you mean 'llama3-70b'?"),
        (["--model", "llama3-70b", "--gpus", "8", "--search"], "smallest feasible: 16 GPUs as pp=2,tp=8"),
        (["--validate", "absent"], "absent is no run"),
        ([], "--mesh is missing"),
    ],
)
def test_bad_input_is_one_sentence_and_exits_with_2(parbench: Command, words: list[str], told: str) -> None:
    refused = parbench("plan", *words)
    assert refused.returncode == 2
    assert told in refused.stderr
    assert refused.stderr.startswith("parbench: ")
    assert refused.stdout == ""


def test_a_machine_of_ones_own(parbench: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "flops_per_second = 1e15\nmemory_bytes = 96e9\nmemory_bytes_per_second = 4e12\n"
        "inside_bytes_per_second = 2e11\nacross_bytes_per_second = 25e9\n"
    )
    shown = parbench("plan", "--model", "llama3-8b", "--mesh", "fsdp=8", "--hardware", str(file))
    assert shown.returncode == 0
    assert "(mine)" in shown.stdout


def test_nothing_heavy_is_imported() -> None:
    modules = sorted(path.stem for path in (Path(__file__).parent.parent / "workloads" / "planner").glob("[a-z]*.py"))
    imports = ", ".join(f"workloads.planner.{name}" for name in modules)
    heavy = "print([name for name in ('torch', 'numpy', 'pandas') if name in sys.modules])"
    script = f"import sys, workloads.commands, {imports}\n{heavy}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert "validate" in modules
