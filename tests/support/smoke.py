"""One real run of the smoke preset, for all tests that look at what a run leaves."""

import subprocess
import sys
from pathlib import Path

from paths import environment

from parbench.bench.results.runs import Run, load_run

PARBENCH = str(Path(sys.executable).with_name("parbench"))


def smoke(folder: Path) -> Run:
    """Return it whole: what a busy machine leaves out in the first minute is made after it."""
    run = _measured(folder, "--all", "--preset", "smoke", "--nproc", "2", "--budget", "45s")
    if any(record.status == "skipped" for record in run.records):
        run = _measured(folder, "--resume", f"runs/{run.path.name}", "--budget", "8m")
    return run


def _measured(folder: Path, *words: str) -> Run:
    done = subprocess.run(
        [PARBENCH, "run", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    (folder / "printed").write_text(done.stdout)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    [path] = (folder / "runs").glob("*Z-*")
    return load_run(path)
