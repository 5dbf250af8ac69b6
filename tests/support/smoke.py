"""Real runs on two ranks for tests that read a run folder."""

import sys
from pathlib import Path

from parbench.bench.results.runs import Run, load_run
from tests.support.paths import run_command

PARBENCH = str(Path(sys.executable).with_name("parbench"))
OUTPUT_FILE = "stdout.txt"
"""File next to ``runs/`` with the standard output of the run."""

SUBSET = ("all_reduce", "sendrecv", "ddp")


def run_smoke_subset(folder: Path) -> Run:
    """Measure a few cases of the smoke preset once and return the run."""
    return run_preset(folder, "--repetitions", "1", "--budget", "60s", *SUBSET)


def run_preset(folder: Path, *options: str) -> Run:
    """Run ``parbench run --preset smoke`` on two ranks in a folder and return the run."""
    command = [PARBENCH, "run", "--preset", "smoke", "--nproc", "2", *options]
    completed = run_command(command, folder, timeout=600)
    (folder / OUTPUT_FILE).write_text(completed.stdout)
    assert completed.returncode in (0, 4), completed.stdout + completed.stderr
    [path] = (folder / "runs").glob("*Z-*")
    return load_run(path)
