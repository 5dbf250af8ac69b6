"""Rehearse the check of pull requests: the action, a git remote, and runs that are measured.

    python -m tests.studies.pull_request [--runs N]

A small project with a training step of its own is pushed to main N times. A branch with an equal
step is checked after the first run and after the last one. A branch whose step also reduces the
norm of the gradients is checked at the end. It prints the exit code and the summary of each.

Exact counts decide: only changes of a time above 100 % fail, so the result does not depend on
the load of the machine. Exit code 1 unless only the branch with the additional call fails, and each
summary begins with the expected verdict. It takes about five minutes on a quiet machine.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.ci_action import ActionResult, run_action

OPTIONS = (
    "checked_step:prepare --set num_elements=1024,65536 --nproc 2 --repetitions 1 --budget 5m"
)
MIN_EFFECT = "100%"
REDUCE_GRADIENTS = "        dist.all_reduce(self.gradients, group=self.world.group)\n"
REDUCE_NORM = "        dist.all_reduce(self.gradients.norm(), group=self.world.group)\n"
STEP = f'''"""A training step that computes, and reduces its gradients."""
import time

import torch
import torch.distributed as dist

from parbench.bench.world.benchmark import Description


class Step:
    def __init__(self, world, num_elements):
        self.world, self.gradients = world, torch.ones(num_elements)

    def step(self):
        time.sleep(0.005)
{REDUCE_GRADIENTS}
    def reset(self):
        self.gradients.fill_(1)

    def check(self):
        return int((self.gradients != self.world.size).sum())

    def describe(self):
        return Description(details={{"num_elements": len(self.gradients)}})

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
            min_effect=MIN_EFFECT,
        )
    event = f"pull request of {branch} to {base}" if base else f"push to {branch}"
    print(f"=== {event}: exit code {result.exit_code}\n{result.summary}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    num_runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = folder / "work"
        run_git(folder, "init", "--quiet", "--bare", "--initial-branch", "main", "origin")
        run_git(folder, "clone", "--quiet", "origin", "work")
        push(work, "main", STEP)
        push(work, "equal", STEP.replace("that computes", "that sleeps"))
        push(work, "more-calls", STEP.replace(REDUCE_GRADIENTS, REDUCE_GRADIENTS + REDUCE_NORM))
        run_git(work, "checkout", "--quiet", "main")
        check_branch(folder, "main")
        early = check_branch(folder, "equal", "main")
        for _ in range(num_runs - 1):
            push(work, "main", STEP)
            check_branch(folder, "main")
        equal = check_branch(folder, "equal", "main")
        changed = check_branch(folder, "more-calls", "main")
    codes = (early.exit_code, equal.exit_code, changed.exit_code)
    print(f"exit codes: too few runs {codes[0]}, equal {codes[1]}, more calls {codes[2]}")
    titles = ("## Not enough history", "## PASS", "## FAIL: 2 COUNT CHANGED")
    has_titles = all(
        result.summary.startswith(title)
        for result, title in zip((early, equal, changed), titles, strict=True)
    )
    return int(codes != (0, 0, 1) or not has_titles)


if __name__ == "__main__":
    sys.exit(main())
