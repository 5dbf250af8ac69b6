"""The pull-request gate with nothing made up: GitHub's action, a git remote, runs of two ranks that are measured.

python tests/studies/pull_request.py [--runs 10] pushes as many commits of a small project with a training step of its
own to main, then a branch whose step computes for ten milliseconds, not five, and one that only reads otherwise. For
each, the action's own steps run in a clone. It prints exit codes and step summaries, and ends with 1 unless the gate is
not armed after one run, fails the slower branch, passes the other, and the remote keeps main's runs alone. About four
minutes on a quiet machine. A script, not a test: tests/test_ci_templates.py holds the same with recorded runs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from ci_action import act, shell

OPTIONS = "--target gate_step:prepare --set num_elements=1024,65536 --nproc 2 --launches 5 --budget 15s"
STEP = '''"""A training step: so much computing, then the gradients' all-reduce."""
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


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=study", "-c", "user.email=study@localhost", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(work: Path, branch: str, text: str, message: str) -> None:
    git(work, "checkout", "--quiet", "-B", branch)
    (work / "gate_step.py").write_text(text)
    git(work, "add", "gate_step.py")
    git(work, "commit", "--quiet", "--allow-empty", "-m", message)
    git(work, "push", "--quiet", "--force", "origin", branch)


def job(folder: Path, branch: str, base: str = "") -> tuple[int, str]:
    """Run the action on a push to ``branch``, or on its pull request; return the exit code and the summary."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as clone:
        git(folder, "clone", "--quiet", "--branch", branch, str(folder / "origin"), clone)
        _, code, summary = act(Path(clone), branch=branch, base=base, shim='export PYTHONPATH="$PWD"', options=OPTIONS)
    answer = summary.partition("\n")[0]
    event = f"pull request of {branch} to {base}" if base else f"push to {branch}"
    print(f"{event:34} exit {code}  {time.perf_counter() - began:5.1f} s  {answer}", flush=True)
    return code, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name), Path(name) / "work"
        git(folder, "init", "--quiet", "--bare", "--initial-branch", "main", "origin")
        git(folder, "clone", "--quiet", "origin", "work")
        commit(work, "main", STEP, "A step")
        commit(work, "slower", STEP.replace("0.005", "0.010"), "Compute more")
        commit(work, "equal", STEP.replace("so much computing", "the computing"), "Say it otherwise")
        git(work, "checkout", "--quiet", "main")
        right = []
        for i in range(runs):
            job(folder, "main")  # which fails where the machine itself has become slower
            if i == 0:
                code, summary = job(folder, "slower", "main")
                right.append(code == 0 and summary.startswith("## Gate not armed: 1 of 8 runs of main\n"))
            commit(work, "main", STEP, f"Night {i + 2}")
        code, summary = job(folder, "slower", "main")
        print(summary)
        right.append(code == 1 and summary.startswith("## FAIL: ") and "custom.gate_step" in summary)
        code, summary = job(folder, "equal", "main")
        print(summary)
        right.append(code == 0 and summary.startswith("## PASS: "))
        git(work, "fetch", "--quiet", "origin", "parbench-history")
        shell("git show FETCH_HEAD:history.sqlite > history.sqlite", work)
        listed = shell("parbench history list --history history.sqlite", work).stdout
        right.append(listed.startswith(f"{runs} runs\n") and "slower" not in listed and "equal" not in listed)
    print("all as it should be" if all(right) else f"not as it should be: {right}")
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
