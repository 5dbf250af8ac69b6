"""The script for a machine with one GPU plans what it should, and runs to its end without a GPU."""

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.launch import measure
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan import options
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.catalogue import MODES
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import Plan
from tests.gpu import one_gpu
from tests.gpu.one_gpu import PARTS, TOTAL_SECONDS, Line, Session
from tests.support.paths import ROOT
from tests.support.refusals import usage_error

SCRIPT = ROOT / "tests" / "gpu" / "one_gpu.sh"
H200_BYTES = 140_000_000_000
PLANNING_PARTS = (
    one_gpu.one_rank,
    one_gpu.every_type,
    one_gpu.memory,
    one_gpu.llama,
    one_gpu.steps,
    one_gpu.on_gloo,
)


def test_dependencies_are_installed_or_among_the_wheels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[><=]", text)[0] for text in project["dependencies"]}
    needed |= {"pytest", "pytest-rerunfailures"}
    wheels = set((SCRIPT.parent / "wheels.sh").read_text().split())
    assert needed - wheels == {"torch", "numpy"}


def test_parts_fit_in_nine_minutes() -> None:
    assert TOTAL_SECONDS < 9 * 60
    assert max(part.seconds for part in PARTS) < TOTAL_SECONDS / 3


class PlanningSession(Session):
    """Plans the runs of the script for an H200 instead of starting them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, folder, rehearse=False)
        self.plans: dict[str, Plan] = {}
        self.refusals: list[str] = []
        self._requested: list[Options] = []
        monkeypatch.setattr(
            measure,
            "run_options",
            lambda request, *args, **kwargs: self._requested.append(request),
        )
        monkeypatch.setattr(
            options, "_choose_ranks", lambda request, joined: (make_h200(request), None)
        )

    def run_parbench(self, name: str, *options: str, budget: float) -> tuple[list[Any], Line]:
        CliRunner().invoke(cli.main, ["run", *options], catch_exceptions=False)
        self.plans[name] = plan_run(self._requested.pop(), cli.DEFINITIONS, None)
        return [], Line(name, "pass", "")

    def run_python(self, name: str, *args: str) -> tuple[int | None, str]:
        CliRunner().invoke(cli.main, args[2:], catch_exceptions=False)
        request = self._requested.pop()
        self.refusals.append(usage_error(plan_run, request, cli.DEFINITIONS, None))
        return 2, ""


def make_h200(request: Options) -> WorldSpec:
    num_ranks = request.nproc or 1
    return WorldSpec(
        nproc=num_ranks,
        backend=request.backend or "nccl",
        device="cuda",
        rank_bytes=H200_BYTES // num_ranks,
    )


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanningSession:
    planning = PlanningSession(tmp_path, monkeypatch)
    for part in PLANNING_PARTS:
        list(part(planning))
    return planning


@pytest.mark.parametrize("name", ["collectives", "types", "gloo: collectives, 2 ranks"])
def test_every_collective_is_planned(session: PlanningSession, name: str) -> None:
    definitions = load_catalogue(cli.DEFINITIONS)
    names = {definition.name for definition in definitions}
    collectives = {name for name in names if name.startswith("collective.")}
    planned = {case.name for case in session.plans[name].cases}
    assert planned >= collectives - {"collective.barrier"}


def test_every_mode_is_planned(session: PlanningSession) -> None:
    counts = Counter(case.all_params["mode"] for case in session.plans["collectives"].cases)
    for mode in MODES:
        assert counts[mode] > 10, mode


def test_only_the_pipeline_step_needs_two_gpus(session: PlanningSession) -> None:
    skipped = {skip.case.name for skip in session.plans["steps that compute"].skipped}
    assert skipped <= {"workload.pp"}


def test_gloo_refuses_what_it_does_not_carry(session: PlanningSession) -> None:
    assert len(session.refusals) == 2
    for message in session.refusals:
        assert "gloo" in message


@pytest.mark.full
@pytest.mark.measures
def test_script_runs_without_gpu(tmp_path: Path) -> None:
    completed = subprocess.run(
        ["bash", str(SCRIPT), "--rehearse", str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=2000,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert len(summary) > 12
    assert not any(line.startswith("fail") for line in summary)
    assert summary[-1].startswith("pass  all")
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"summary.txt", "records.jsonl", "report.html", "everything.tar.gz"}
