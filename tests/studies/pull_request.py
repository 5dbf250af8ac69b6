"""Rehearse the check of pull requests: the action, a git remote, and runs that are measured.

    python -m tests.studies.pull_request [--runs N]

A small project with a training step of its own is pushed to main N times. Then one branch whose
step computes for 10 ms instead of 5 ms is checked, and one with an equal step. It prints the exit
code and the summary of each. Exit code 1 unless the slower branch fails only after enough history,
and the equal branch passes. It takes about five minutes.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.ci_action import ActionResult, run_action

OPTIONS = (
    "checked_step:prepare --set num_elements=1024,65536 --nproc 2 --repetitions 5 --budget 40s"
)
STEP = '''"""A training step that computes, and reduces its gradients."""
import time

import torch
import torch.distributed as dist

from parbench.bench.world.benchmark import Description


class Step:
    def __init__(self, world, num_elements):
        self.world, self.gradients = world, torch.ones(num_elements)

    def step(self):
        time.sleep(0.005)
        dist.all_reduce(self.gradients, group=self.world.group)

    def reset(self):
        self.gradients.fill_(1)

    def check(self):
        return int((self.gradients != self.world.size).sum())

    def describe(self):
        return Description(details={"num_elements": len(self.gradients)})

    def close(self):
        pass


def prepare(world, *, num_elements: int = 1024):
    return Step(world, num_elements)
'''


def run_git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=study", "-c", "user.email=study@localhost"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def push(work: Path, branch: str, source: str) -> None:
    """Commit the step to a branch and push it."""
    run_git(work, "checkout", "--quiet", "-B", branch)
    (work / "checked_step.py").write_text(source)
    run_git(work, "add", "checked_step.py")
    run_git(work, "commit", "--quiet", "--allow-empty", "-m", f"Change {branch}")
    run_git(work, "push", "--quiet", "--force", "origin", branch)


def check_branch(folder: Path, branch: str, base: str = "") -> ActionResult:
    """Run the action for a push to a branch, or for its pull request to ``base``."""
    with tempfile.TemporaryDirectory(dir=folder) as clone:
        origin = str(folder / "origin")
        run_git(folder, "clone", "--quiet", "--branch", branch, origin, clone)
        result = run_action(
            Path(clone),
            branch=branch,
            base=base,
            prologue='export PYTHONPATH="$PWD"',
            options=OPTIONS,
        )
    event = f"pull request of {branch} to {base}" if base else f"push to {branch}"
    print(f"=== {event}: exit code {result.exit_code}\n{result.summary}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    num_runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = folder / "work"
        run_git(folder, "init", "--quiet", "--bare", "--initial-branch", "main", "origin")
        run_git(folder, "clone", "--quiet", "origin", "work")
        push(work, "main", STEP)
        push(work, "slower", STEP.replace("0.005", "0.010"))
        push(work, "equal", STEP.replace("that computes", "that sleeps"))
        run_git(work, "checkout", "--quiet", "main")
        check_branch(folder, "main")
        early = check_branch(folder, "slower", "main")
        for _ in range(num_runs - 1):
            push(work, "main", STEP)
            check_branch(folder, "main")
        slower = check_branch(folder, "slower", "main")
        equal = check_branch(folder, "equal", "main")
    codes = (early.exit_code, slower.exit_code, equal.exit_code)
    print(f"exit codes: too few runs {codes[0]}, slower {codes[1]}, equal {codes[2]}")
    return int(codes != (0, 1, 0))


if __name__ == "__main__":
    sys.exit(main())
