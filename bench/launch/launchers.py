"""The gang: all ranks of one launch. torchrun starts them on this node, or they are there already; srun's is apart."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from bench.launch.control_channel import Hello
from bench.machine.environment import interface_of
from bench.machine.slurm_allocation import INTERFACE_VARIABLE, more_options
from bench.plan.plan import NodeLayout

_PATIENCE_SECONDS = 5.0


class Launcher(Protocol):
    """What the driver needs of a gang; it learns everything else from the ranks themselves."""

    can_restart: bool

    def ended(self) -> bool: ...

    def exits(self) -> dict[int, int]:
        """Return the exit codes of the ranks that ended badly, as far as they are known."""

    def last_error(self) -> str:
        """Return what the launcher itself said went wrong, nothing if it said nothing worth repeating."""

    def end(self, ranks: Iterable[Hello]) -> None: ...


class TorchrunLauncher:
    """Ranks on this node, started by torchrun with a free port; their output goes to ``logs/gang-<number>``."""

    can_restart = True

    def __init__(self, nproc: int, logs: Path, number: int, variables: Mapping[str, str]) -> None:
        self._folder = logs / f"gang-{number}"
        self._folder.mkdir(parents=True)
        self._exits = self._folder / "exits.json"
        command = [sys.executable, "-m", "bench.launch.torchrun_entry", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(nproc), "--log-dir", str(self._folder), "--redirects", "3"]
        environment = {
            **os.environ,
            **variables,
            "PYTHONSAFEPATH": "1",
            "PARBENCH_EXITS": str(self._exits),
            "PARBENCH_DRIVER_PID": str(os.getpid()),
        }
        self._process = start_process([*command, "-m", "bench.rank.worker"], environment, self._folder / "torchrun.log")

    def ended(self) -> bool:
        return self._process.poll() is not None

    def exits(self) -> dict[int, int]:
        if not self._exits.exists():
            return {}
        return msgspec.json.decode(self._exits.read_bytes(), type=dict[int, int])

    def last_error(self) -> str:
        return ""

    def end(self, ranks: Iterable[Hello]) -> None:
        host = socket.gethostname()
        for hello in ranks:
            if hello.host == host:
                kill(hello.pid)
        end_process(self._process)


class ExternalLauncher:
    """Ranks that another launcher started, this process among them: they cannot be started again from here."""

    can_restart = False

    def ended(self) -> bool:
        """The launcher watches its ranks; here only their connections tell."""
        return False

    def exits(self) -> dict[int, int]:
        return {}

    def last_error(self) -> str:
        return ""

    def end(self, ranks: Iterable[Hello]) -> None:
        """Nothing to do: ranks end when the driver's process does, and their launcher sees it."""


def local_state(hello: Hello) -> str | None:
    """Return the process state of a rank on this host, such as ``stopped``; None where it cannot be seen."""
    if hello.host != socket.gethostname():
        return None
    try:
        return str(psutil.Process(hello.pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def loopback_variables() -> dict[str, str]:
    """Return what keeps gloo's groups within this node; ranks of NCCL have one too, for control."""
    loopback = interface_of("127.0.0.1")
    # by host name gloo may pick an interface that is not even up
    return {} if loopback is None else {INTERFACE_VARIABLE: loopback}


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a launcher whose output goes to a file; Ctrl-C is the driver's alone."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_process(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


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


def srun_command(
    spread: NodeLayout, folder: Path, environ: Mapping[str, str], nodelist: str | None = None, more: Iterable[str] = ()
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
    return [*words, sys.executable, "-m", "bench.rank.entries"]


class SrunLauncher:
    """Ranks on several nodes, a job step of theirs; srun's own words go to ``logs/gang-<number>/srun.log``."""

    can_restart = True

    def __init__(
        self, spread: NodeLayout, logs: Path, number: int, variables: Mapping[str, str], nodelist: str | None = None
    ) -> None:
        folder = (logs / f"gang-{number}").absolute()
        folder.mkdir(parents=True)
        self._log = folder / "srun.log"
        environment = {**os.environ, **variables, "PYTHONSAFEPATH": "1"}
        command = srun_command(spread, folder, environment, nodelist, more_options(os.environ))
        self._process = start_process(command, environment, self._log)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def exits(self) -> dict[int, int]:
        return parse_exits(self._log.read_text(errors="replace"))

    def last_error(self) -> str:
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
