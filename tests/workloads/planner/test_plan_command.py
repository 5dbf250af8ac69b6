"""``parbench plan`` answers a step, a search or a validation, and rejects bad input with code 2."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.plan.cases import make_case
from parbench.workloads.planner.plan_command import (
    MachineOptions,
    StepOptions,
    answer_search,
    build_step_on_mesh,
)
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    counted_metric,
    curve_records,
    ok_record,
    seconds_metric,
    write_run,
)
from tests.workloads.planner.conftest import PlanCommand

MESH = "mesh --model llama3-8b --mesh"


def test_plan_of_too_large_step_exits_with_2(plan_command: PlanCommand) -> None:
    result = plan_command("mesh --model llama3-70b --mesh tp=8 --format=json")
    assert result.exit_code == 2
    assert "memory" in json.loads(result.stdout)["tables"]
    assert "error: llama3-70b with tp=8 needs" in result.stderr
    assert "Find steps that fit" in result.stderr


@pytest.mark.parametrize("mesh", ["dp=4,pp=2,tp=8", "cp=4,tp=8"])
def test_too_large_step_names_zero_that_fits(plan_command: PlanCommand, mesh: str) -> None:
    options = f"mesh --model llama3-70b --mesh {mesh}"
    assert "It fits with --set zero=1" in plan_command(options).stderr
    assert plan_command(f"{options} --set zero=1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("mesh --model llama3-70b --mesh dp=8,fsdp=4,pp=4,tp=8", "1024 GPUs (h100)"),
        (
            "mesh --model llama3-8b --mesh fsdp=8 --checkpointing full --explain",
            "arXiv 1910.02054",
        ),
        ("search --model tiny --gpus 2 --set schedule=1f1b", "global batch 2"),
        (f"{MESH} pp=4,tp=8 --set layers_per_stage=7+1x9+9+7", "layers 7+2x9+7"),
        (f"{MESH} dp=2,cp=4,tp=4", "reduced over dp x cp"),
        ("guide", "2 * Psi * g * r"),
        ("guide --model mixtral-8x7b --gpus 16 --format=json", '"strategy":"DDP"'),
        ("recipes", "arXiv 2412.19437"),
    ],
)
def test_plan_answers_on_stdout(plan_command: PlanCommand, arguments: str, text: str) -> None:
    result = plan_command(arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("search --model tiny", "--gpus"),
        ("mesh --model tiny", "--mesh"),
        ("mesh --mesh dp=2", "--model"),
        ("mesh --mesh tp=8 --model llama3-70", "llama3-70b,"),
        ("search --model tiny --gpus 8 --set microbatches=4", "parbench plan mesh"),
        (f"{MESH} dp=2 --set microbatches=2 --global-batch 4", "exclude each other"),
        (f"{MESH} dp=2 --set precision=bf16", "--set precision=bf16"),
        (f"{MESH} dp=2 --set schedule=1f2b", "1f1b,"),
        (f"{MESH} pp=2 --set layers_per_stage=20+13", "33 layers"),
        (f"{MESH} dp=2 --microbatch 0", "--microbatch"),
        (f"{MESH} dp=2 --checkpointing full:33", "full:33 > layers(32)"),
        (f"{MESH} dp=2 --set zero=3", "--set zero=3 needs fsdp > 1"),
        (f"{MESH} tp=16", "kv_heads(8) % tp(16) != 0"),
        (f"{MESH} fsdp=8 --set schedule=zb_h1", "--set schedule has no effect without pp"),
        (f"{MESH} fsdp=8 --set cp_method=ring", "--set cp_method has no effect without cp"),
        (f"{MESH} fsdp=8 --set zero=2 --set zero=3", "zero is given twice"),
        (f"{MESH} pp=2 --set microbatches=0", "microbatches: 0 is not in the range"),
        (f"{MESH} pp=2 --set layers=2", "'layers' is not one of schedule,"),
        ("validate absent", "absent"),
    ],
)
def test_plan_rejects_bad_input(
    plan_command: PlanCommand, arguments: str, message: str
) -> None:
    result = plan_command(arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_plan_modules_import_nothing_heavy() -> None:
    """Help and errors of the command are printed without importing torch."""
    script = """if True:
        import importlib, pkgutil, sys
        from parbench.workloads import commands, planner
        for module in pkgutil.walk_packages(planner.__path__, planner.__name__ + "."):
            importlib.import_module(module.name)
        print(sorted({"torch", "numpy", "pandas"} & sys.modules.keys()))
        print("parbench.workloads.planner.measured.validate" in sys.modules)
    """
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\nTrue\n"


@pytest.mark.parametrize(
    ("mesh", "options", "microbatches"),
    [
        ("dp=2", {}, 1),
        ("pp=4", {}, 16),
        ("dp=2,pp=4", {"global_batch": 64, "microbatch": 2}, 16),
    ],
)
def test_plan_default_microbatches(
    mesh: str, options: dict[str, Any], microbatches: int
) -> None:
    spec = build_step_on_mesh(StepOptions(model="llama3-8b", **options), mesh)
    assert spec.microbatches == microbatches


def test_mesh_balances_uneven_stages() -> None:
    spec = build_step_on_mesh(StepOptions(model="deepseek-v3"), "pp=16,dp=128,ep=64")
    layers = list(map(int, spec.pipeline_options.layers_per_stage.split("+")))
    assert sum(layers) == spec.shape.layers
    assert max(layers) - min(layers) <= 2


def test_plan_options_reach_the_step() -> None:
    options = StepOptions(
        model="llama3-8b",
        sequence=16384,
        precision="float32",
        cp_method="ulysses",
        virtual_stages=4,
        schedule="interleaved",
        checkpointing="full",
        zero=1,
    )
    step = build_step_on_mesh(options, "pp=2,cp=2")
    assert step.shape.sequence == 16384
    assert step.bytes_per_element == 4
    assert step.cp_method == "ulysses"
    assert step.pipeline_options.stages_per_rank == 4
    assert step.pipeline_options.schedule == "interleaved"
    assert step.checkpointing == "full"
    assert step.zero_stage == 1


def test_search_uses_its_options() -> None:
    options = StepOptions(
        model="llama3-8b", global_batch=16, microbatch=2, checkpointing="full", schedule="1f1b"
    )
    document = answer_search(options, MachineOptions(), gpus=4, top=3)
    [meshes] = [table for table in document.sections[1].tables if table.id == "meshes"]
    assert len(meshes.rows) == 3
    for row in meshes.rows:
        assert row["settings"].startswith("microbatch 2, checkpointing full")


def test_plan_writes_figures(tmp_path: Path, plan_command: PlanCommand) -> None:
    folder = tmp_path / "figures"
    options = f"--figures {folder} --figure-format svg,pdf"
    result = plan_command(f"mesh --model tiny --mesh pp=2 {options}")
    assert result.stderr == f"{folder}: 2 figures as svg, pdf\n"
    assert {file.stem for file in folder.glob("*.pdf")} == {"time_figure_1", "memory_figure_1"}

    plan_command(f"search --model tiny --gpus 2 {options}")
    assert (folder / "meshes_figure_2.svg").read_bytes().startswith(b"<?xml")


def test_plan_uses_and_validates_a_run(tmp_path: Path, plan_command: PlanCommand) -> None:
    target = "parbench.workloads.step.train_step:ddp"
    metrics = {"step_time": seconds_metric(0.02), "compute": counted_metric(0.01, "s")}
    case = make_case("workload.ddp", target, {"shape": "tiny", "microbatch": 4})
    records = [*curve_records(), ok_record(case, metrics=metrics)]
    run = run_from_records(*records, environment=ENVIRONMENT)
    path = write_run(tmp_path / "run", run)

    result = plan_command(f"mesh --model small-llama --mesh dp=2,tp=4 --links {path}")
    assert f"fitted to {path}" in result.stdout

    validation = json.loads(plan_command(f"validate {path} --format=json").stdout)
    assert validation["rows"][0]["label"].startswith("workload.ddp")
    text = plan_command(f"validate {path}").stdout
    assert "step_time" in text
    assert "memory_counted.activations" in text
    assert "COMPARED" in text
