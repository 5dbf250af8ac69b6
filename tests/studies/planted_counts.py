"""What a comparison finds of faults that are planted in steps, and what it imagines of runs that are alike.

    python tests/studies/planted_counts.py [planted] [alike] [--runs 7] [--busy 2] [--nproc 2] [--out FOLDER]

Each fault of tests/support/planted_steps.py is measured in one launch, beside one without it, by ``parbench run``, and
``parbench compare`` has to tell its cause. Steps without a fault are measured ``--runs`` times and compared in pairs: 7
runs are 21 pairs. Meanwhile ``--busy`` processes do nothing but compute, so that times tell nothing. It prints what was
found and ends with 1 unless every fault is named and no pair differs. Half an hour on two busy cores. A script, not a
test: tests/reports/regression/test_planted_counts.py does the same with one fault.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import support_path  # noqa: F401 - the next imports are of the tests' helpers
from planted_steps import PLANTS, TARGETS, VARIABLE

from parbench.bench.results.runs import load_run, runs_in
from parbench.reports.regression.compare import compare
from parbench.reports.regression.rule import Rule

ROOT = Path(__file__).parents[2]
STEPS = ("ddp", "fsdp", "tp_sp", "pp", "ep_step")
"""What is measured without a fault, beside the steps that faults are planted in."""


def spin() -> None:
    while True:
        pass


def parbench(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    command = [sys.executable, "-m", "parbench", *words]
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def measured(out: Path, *words: str, plant: str = "", partly: bool = False) -> Path:
    """Return the folder of a run of one launch, whose results are right; ``partly`` if there may be no time for all."""
    done = parbench("run", *words, "--launches", "1", "--out", str(out), "--json", **{VARIABLE: plant})
    if done.returncode not in ((0, 4) if partly else (0,)):
        raise RuntimeError(f"parbench run {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return runs_in(out)[-1]


def compared(base: Path, new: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(parbench("compare", str(base), str(new), "--format", "json").stdout)
    return told


def effect_of(told: dict[str, Any]) -> str:
    """Return how much longer the steps took, which on a loaded machine tells nothing."""
    [series] = [one for family in told["families"] for one in family["series"]]
    return f"{100 * series['effect']['change']:+.0f} %"


def find(out: Path, nproc: str) -> int:
    """Plant each fault, print what is told of it, and return how many are named by their cause."""
    words = {target: ("--target", f"planted_steps:{target}", "--nproc", nproc, "--budget", "20s") for target in TARGETS}
    bases = {target: measured(out / target, *words[target]) for target in TARGETS}
    found = 0
    for name, (target, cause) in PLANTS.items():
        told = compared(bases[target], measured(out / name, *words[target], plant=name))
        causes = [change["told"] for change in told["counts"]["changes"] if change["verdict"] == "CHANGED"]
        named = told["exit_code"] == 1 and any(re.fullmatch(cause, one) for one in causes)
        found += named
        print(f"{name}: {'named' if named else 'NOT NAMED'}, exit code {told['exit_code']}, time {effect_of(told)}")
        print("".join(f"    {one}\n" for one in causes), end="", flush=True)
    return found


def imagine(out: Path, nproc: str, runs: int) -> tuple[int, int, int]:
    """Measure steps without a fault again and again; return pairs, those that differ, and counts held in each."""
    only = [word for name in STEPS for word in ("--only", f"workload.{name}")]
    small = ("--set", "shape=tiny", "--set", "microbatch=1", "--nproc", nproc, "--budget", "120s")
    folders = [measured(out / "alike", *only, *small, partly=True) for _ in range(runs)]
    loaded = [load_run(folder) for folder in folders]
    pairs = [compare(*pair, Rule()) for pair in itertools.combinations(loaded, 2)]
    for found in pairs:
        told = [change.told for _, held in found.counted for change in held.changes]
        print("".join(f"imagined: {one}\n" for one in told), end="", flush=True)
    held = min((sum(held.count for _, held in found.counted) for found in pairs), default=0)
    return len(pairs), sum("CHANGED" in found.counts for found in pairs), held


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="planted, alike; default: both")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--nproc", default="2")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(given.busy)]
    for one in busy:
        one.start()
    with tempfile.TemporaryDirectory() as folder:
        out, parts = given.out or Path(folder), given.parts or ["planted", "alike"]
        found = find(out, given.nproc) if "planted" in parts else len(PLANTS)
        pairs, imagined, held = imagine(out, given.nproc, given.runs) if "alike" in parts else (0, 0, 0)
    for one in busy:
        one.terminate()
    told = [f"{found} of {len(PLANTS)} faults named"] if "planted" in parts else []
    told += [f"{imagined} of {pairs} pairs of runs differ, {held} counts held in each"] if "alike" in parts else []
    print("; ".join([*told, f"{given.busy} processes computed meanwhile, load average {os.getloadavg()[0]:.1f}"]))
    return found < len(PLANTS) or imagined > 0


if __name__ == "__main__":
    sys.exit(main())
