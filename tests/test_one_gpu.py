"""The script for a machine with one GPU runs to its end without one, and brings what such a machine may lack."""

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parbench.bench.launch import measure
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan import options
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.catalogue import MODES
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import Plan
from parbench.cli import DEFINITIONS, main
from tests.gpu.one_gpu import (
    NONE,
    PARTS,
    WHOLE_SECONDS,
    Session,
    every_type,
    llama,
    memory,
    on_gloo,
    one_rank,
    steps,
    timed,
)
from tests.support.paths import ROOT
from tests.support.refusals import usage_error

SCRIPT = ROOT / "tests" / "gpu" / "one_gpu.sh"


def test_every_dependency_is_at_hand_where_torch_is_or_among_the_wheels_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[><=]", one)[0] for one in project["dependencies"]} | {
        "pytest",
        "pytest-rerunfailures",
    }
    named = set((SCRIPT.parent / "wheels.sh").read_text().split())
    assert needed - named == {"torch", "numpy"}


def test_no_part_may_take_more_than_a_third_of_the_nine_minutes() -> None:
    assert max(part.seconds for part in PARTS) < WHOLE_SECONDS / 3
    assert WHOLE_SECONDS < 9 * 60


def test_what_a_rehearsal_leaves_out_can_be_planned_on_a_gpu_and_what_gloo_does_not_carry_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []
    plans: dict[str, list[Plan]] = {}
    refused: list[str] = []
    monkeypatch.setattr(measure, "run_options", lambda options, *_, **__: asked.append(options))
    monkeypatch.setattr(options, "_where", lambda given, joined: (on_h200(given), None))

    class Planning(Session):
        def parbench(
            self, name: str, *words: str, cwd: Path = ROOT, budget: float = 60
        ) -> tuple[list[Any], list[Any]]:
            CliRunner().invoke(main, ["run", *words], catch_exceptions=False)
            plans[name] = [plan_run(asked.pop(), DEFINITIONS, None)]
            return [], []

        def command(
            self, name: str, *words: str, cwd: Path = ROOT, variables: Mapping[str, str] = NONE
        ) -> tuple[int | None, str]:
            CliRunner().invoke(main, list(words[2:]), catch_exceptions=False)
            refused.append(usage_error(plan_run, asked.pop(), DEFINITIONS, None))
            return 2, ""

    for part in (one_rank, every_type, memory, llama, steps, timed, on_gloo):
        list(part(Planning(tmp_path, tmp_path, rehearse=False)))
    names = {one.name for one in load_catalogue(DEFINITIONS)}
    collectives = {name for name in names if name.startswith("collective.")}
    for name in ("collectives", "types", "gloo: collectives, 2 ranks"):
        assert {case.name for plan in plans[name] for case in plan.cases} >= collectives - {
            "collective.barrier"
        }, name
    modes = Counter(case.whole["mode"] for plan in plans["collectives"] for case in plan.cases)
    assert min(modes[mode] for mode in MODES) > 10, modes
    for name in ("steps that compute", "steps that wait"):
        told = {one.case.name for plan in plans[name] for one in plan.skipped}
        assert told <= {"workload.pp"}, name
    assert all("gloo" in words for words in refused), refused
    assert len(refused) == 3


def on_h200(given: Options) -> WorldSpec:
    backend, memory = given.backend or "nccl", 140_000_000_000
    return WorldSpec(
        nproc=given.nproc or 1,
        backend=backend,
        device="cuda",
        rank_bytes=memory // (given.nproc or 1),
    )


@pytest.mark.full
def test_the_script_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "--rehearse", str(tmp_path)]
    variables = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=2000
    )
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary[-1].startswith("pass  all"), summary
    assert [line for line in summary if line.startswith("fail")] == []
    assert "rehearsed" in summary[-1]
    assert len(summary) > 40
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"summary.txt", "records.jsonl", "report.html", "everything.tar.gz"}
