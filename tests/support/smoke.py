"""One small real run for all tests that look at what a run leaves."""

import subprocess
import sys
from pathlib import Path

from parbench.bench.results.runs import Run, load_run
from tests.support.paths import environment

PARBENCH = str(Path(sys.executable).with_name("parbench"))


def smoke(folder: Path) -> Run:
    """Measure a few operations and a training step on two ranks in ``folder`` and return the run."""
    names = ("all_reduce", "all_to_all", "sendrecv", "barrier", "ddp")
    only = [word for name in names for word in ("--only", name)]
    return measure(folder, "--preset", "smoke", *only, "--launches", "1", "--budget", "4m")


def measure(folder: Path, *words: str) -> Run:
    """Run ``parbench run`` on two ranks in ``folder``, keep its output in the file ``printed``, and return the run."""
    done = subprocess.run(
        [PARBENCH, "run", "--all", "--nproc", "2", *words],
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
