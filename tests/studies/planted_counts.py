"""Count changes that a comparison finds in steps with a planted fault, and in equal steps.

    python -m tests.studies.planted_counts [--runs N] [--busy N]

Each fault of ``tests/support/planted_steps.py`` is measured in one repetition, next to one without
it, and ``parbench compare`` has to report its cause. Steps without a fault are measured ``--runs``
times and compared in pairs: 7 runs are 21 pairs. ``--busy`` processes compute meanwhile, so that
times mean nothing. Exit code 1 if a fault is not named or a pair differs. About 15 minutes.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.paths import environment
from tests.support.planted_steps import PLANTS, VARIABLE

EQUAL_STEPS = ("ddp", "fsdp", "tp_sp", "pp", "ep_step")
MAX_NAMED_CHANGES = 3


def run_parbench(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "parbench", *words]
    return subprocess.run(
        command, env={**environment(), **variables}, capture_output=True, text=True, check=False
    )


def measure(folder: Path, *words: str, **variables: str) -> Path:
    """Measure one repetition and return the folder of the run."""
    options = ["--nproc", "2", "--repetitions", "1", "--out", str(folder), "--json"]
    completed = run_parbench("run", *words, *options, **variables)
    if completed.returncode:
        raise SystemExit(f"parbench run {' '.join(words)}: {completed.stderr[-2000:]}")
    return Path(completed.stderr.splitlines()[-1])


def compare(base: Path, new: Path) -> dict[str, Any]:
    completed = run_parbench("compare", str(base), str(new), "--format", "json")
    comparison: dict[str, Any] = json.loads(completed.stdout)
    return comparison


def list_changes(comparison: dict[str, Any]) -> list[str]:
    changes = comparison["counts"]["changes"]
    return [change["message"] for change in changes if change["verdict"] == "CHANGED"]


def compare_planted(folder: Path) -> int:
    """Print the changes that each fault causes, and return the number of faults named."""
    num_named = 0
    for name, plant in PLANTS.items():
        words = ["--target", f"tests.support.planted_steps:{name}", "--budget", "20s"]
        base = measure(folder / name, *words)
        planted = measure(folder / name, *words, **{VARIABLE: "1"})
        comparison = compare(base, planted)
        changes = list_changes(comparison)
        is_named = comparison["exit_code"] == 1 and any(
            re.match(plant.cause, change) for change in changes
        )
        num_named += is_named
        print(f"{name}: {'named' if is_named else 'NOT NAMED'}")
        for change in changes[:MAX_NAMED_CHANGES]:
            print(f"    {change}", flush=True)
    return num_named


def compare_equal(folder: Path, num_runs: int) -> tuple[int, int]:
    """Return the number of pairs of equal runs, and of those that differ."""
    words = ["--set", "shape=tiny", "--set", "microbatch=1", "--budget", "120s"]
    for name in EQUAL_STEPS:
        words += ["--only", f"workload.{name}"]
    runs = [measure(folder / "equal", *words) for _ in range(num_runs)]
    num_pairs = 0
    num_different = 0
    for base, new in itertools.combinations(runs, 2):
        changes = list_changes(compare(base, new))
        num_pairs += 1
        num_different += bool(changes)
        for change in changes:
            print(f"equal steps differ: {change}", flush=True)
    return num_pairs, num_different


def keep_core_busy() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--busy", type=int, default=2)
    options = parser.parse_args()
    for _ in range(options.busy):
        multiprocessing.Process(target=keep_core_busy, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        num_named = compare_planted(Path(name))
        num_pairs, num_different = compare_equal(Path(name), options.runs)
    load = os.getloadavg()[0]
    print(f"{num_named} of {len(PLANTS)} faults named")
    print(f"{num_different} of {num_pairs} pairs of equal runs differ")
    print(f"{options.busy} processes computed meanwhile, load average {load:.1f}")
    return int(num_named < len(PLANTS) or num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
