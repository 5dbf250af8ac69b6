"""One real run of the smoke preset, for all tests that look at what a run leaves."""

import subprocess
import sys
from pathlib import Path

from paths import environment

from bench.results.runs import Run, load_run

PARBENCH = str(Path(sys.executable).with_name("parbench"))


def smoke(folder: Path) -> Run:
    run = _measured(folder / "quick", "25s")
    return run if all(record.status == "ok" for record in run.records) else _measured(folder / "slow", "8m")


def _measured(folder: Path, budget: str) -> Run:
    folder.mkdir()
    done = subprocess.run(
        [PARBENCH, "run", "--all", "--preset", "smoke", "--nproc", "2", "--budget", budget],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    (folder / "printed").write_text(done.stdout)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    [path] = (folder / "runs").iterdir()
    return load_run(path)
