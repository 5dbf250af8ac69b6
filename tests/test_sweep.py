"""Sweeps on a real cluster of four nodes: whatever ends a job, every point is measured once or named."""

import sys
from pathlib import Path

import pytest
from clusters import in_cluster
from sweep_scenarios import SCENARIOS

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_sweep_on_a_real_cluster(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "sweep_scenarios.py"), name, str(tmp_path)]
    done = in_cluster(command, variables={"PYTHONPATH": f"{HERE.parent}:{HERE}"}, timeout=170)
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("**/logs/*.*")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs[-6000:]}"
