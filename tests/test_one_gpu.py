"""The script for a machine with one GPU runs to its end without one, and brings what such a machine may lack."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from one_gpu import PARTS, WHOLE_SECONDS
from paths import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "one_gpu.sh"


def test_every_dependency_is_at_hand_where_torch_is_or_among_the_wheels_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[><=]", one)[0] for one in project["dependencies"]} | {"pytest", "pytest-rerunfailures"}
    named = set((SCRIPT.parent / "wheels.sh").read_text().split())
    assert needed - named == {"torch", "numpy", "matplotlib"}


def test_no_part_may_take_more_than_a_third_of_the_nine_minutes() -> None:
    assert max(part.seconds for part in PARTS) < WHOLE_SECONDS / 3
    assert WHOLE_SECONDS < 9 * 60


@pytest.mark.full
def test_the_script_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "--rehearse", str(tmp_path)]
    variables = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=2000)
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary[-1].startswith("pass  all"), summary
    assert [line for line in summary if line.startswith("fail")] == []
    assert "rehearsed" in summary[-1]
    assert len(summary) > 40
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"summary.txt", "records.jsonl", "report.html", "everything.tar.gz"}
