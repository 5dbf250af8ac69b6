"""Ranks on the nodes of a Slurm allocation, started by srun as one job step."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.errors import UserError
from bench.launch.launchers import end_process, kill, start_process
from bench.launch.messages import Hello
from bench.plan.plan import Spread

_SCANCEL_SECONDS = 10
# srun says it of the first task that ends badly; what it says of others is that it killed them for that
_ENDED = re.compile(r"^srun: error: \S+: tasks? (?P<first>\d+)[\d,-]*: (?P<how>.+?)\s*$", re.MULTILINE)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Aborted": signal.SIGABRT,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
}


def check_srun() -> None:
    """Refuse to begin where there is no srun."""
    if shutil.which("srun") is None:
        raise UserError("--launcher srun: srun is not in the PATH; load Slurm's module, or leave out --launcher")


def srun_command(
    spread: Spread, folder: Path, environ: Mapping[str, str], nodelist: str | None = None, more: Iterable[str] = ()
) -> list[str]:
    """Return srun's words; a rank's output goes to ``rank-<n>.log`` in the folder, which all nodes share.

    The tasks of each node are said, for ``-N2 -n4`` may place three and one; so are the CPUs of a task, which srun has
    not inherited since Slurm 22.05. A step may overlap one that still dies on a node that does not answer.
    """
    words = ["srun", f"--nodes={spread.nodes}", f"--ntasks={spread.ranks}"]
    words += [f"--ntasks-per-node={spread.ntasks_per_node}", f"--distribution={spread.placement}"]
    words += ["--kill-on-bad-exit=1", "--mpi=none", "--overlap", "--input=none", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    if nodelist:
        words.append(f"--nodelist={nodelist}")
    words += [f"--output={folder}/rank-%t.log", f"--error={folder}/rank-%t.log", *more]
    return [*words, sys.executable, "-m", "bench.rank.srun_rank"]


class SrunGang:
    """Ranks on several nodes, a job step of theirs; srun's own words go to ``logs/gang-<number>/srun.log``."""

    can_restart = True

    def __init__(
        self, spread: Spread, logs: Path, number: int, variables: Mapping[str, str], nodelist: str | None = None
    ) -> None:
        folder = (logs / f"gang-{number}").absolute()
        folder.mkdir(parents=True)
        self._log = folder / "srun.log"
        environment = {**os.environ, **variables, "PYTHONSAFEPATH": "1"}
        command = srun_command(spread, folder, environment, nodelist, more_options(os.environ))
        self._process = start_process(command, environment, self._log)

    def ended(self) -> bool:
        """Say whether srun has ended."""
        return self._process.poll() is not None

    def exits(self) -> dict[int, int]:
        """Return how the first rank that ended badly did, as srun tells it; negative is a signal."""
        return parse_exits(self._log.read_text(errors="replace"))

    def told(self) -> str:
        """Return srun's first error, which names the node."""
        errors = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.startswith("srun: error:")
        ]
        return errors[0] if errors else ""

    def end(self, ranks: Iterable[Hello]) -> None:
        """Kill the ranks of this host, end srun, and have Slurm kill what is left of the step on other nodes."""
        steps = set()
        for hello in ranks:
            if hello.host == socket.gethostname():
                kill(hello.pid)
            if hello.step:
                steps.add(hello.step)
        running = not self.ended()
        end_process(self._process)
        for step in steps if running else ():
            _cancel(step)


def more_options(environ: Mapping[str, str]) -> list[str]:
    """Return srun options of the site or the sweep, one a line, such as a container's image."""
    return [word for word in environ.get("PARBENCH_SRUN_OPTIONS", "").splitlines() if word]


def parse_exits(text: str) -> dict[int, int]:
    """Return the first bad end that srun tells of, by rank; nothing where it tells of none, or in other words."""
    found = _ENDED.search(text)
    if found is None:
        return {}
    code = _EXIT_CODE.match(found["how"])
    if code is not None:
        return {int(found["first"]): int(code[1])}
    number = next((sign for name, sign in _SIGNALS.items() if found["how"].startswith(name)), None)
    return {} if number is None else {int(found["first"]): -int(number)}


def _cancel(step: str) -> None:
    """Have Slurm kill a step, ``JOB.STEP``; one that has ended by itself is no fault."""
    try:
        subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, timeout=_SCANCEL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # its ranks end by themselves: their driver has hung up
