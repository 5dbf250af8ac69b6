"""What starts and ends the ranks of one launch: torchrun on this node, srun on several, or a program before ours."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import msgspec
import psutil

from bench.launch.control_channel import Hello
from bench.machine.environment import interface_of
from bench.machine.slurm_allocation import INTERFACE_VARIABLE, NodeLayout, more_options

_PATIENCE_SECONDS = 5.0
# srun says it of the first task that ends badly; what it says of others is that it killed them for that
_ENDED = re.compile(r"^srun: error: \S+: tasks? (?P<first>\d+)[\d,-]*: (?P<how>.+?)\s*$", re.MULTILINE)


class Launcher:
    """What the driver needs of a launcher; it learns everything else from the ranks themselves.

    This one is another program's, which started the ranks: they end with it, and cannot be started again.
    """

    can_restart = False

    def ended(self) -> bool:
        return False

    def exits(self) -> dict[int, int]:
        """Return the exit codes of the ranks that ended badly, as far as they are known; negative is a signal."""
        return {}

    def last_error(self) -> str:
        """Return what the launcher itself said went wrong, nothing if it said nothing worth repeating."""
        return ""

    def end(self, ranks: Iterable[Hello]) -> None:
        """End every rank, stopped ones too; those of this host are told to, and may take a while to be gone."""


class _StartedLauncher(Launcher):
    """A launcher that is a process of this one, its output in a file of a new folder; Ctrl-C is the driver's alone."""

    can_restart = True

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True)
        env = {**os.environ, **variables, "PYTHONSAFEPATH": "1"}
        with log.open("wb") as file:
            self._process = Popen(command, env=env, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, ranks: Iterable[Hello]) -> None:
        for hello in ranks:
            if hello.host == socket.gethostname():
                with suppress(ProcessLookupError):
                    os.kill(hello.pid, signal.SIGKILL)
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TorchrunLauncher(_StartedLauncher):
    """Ranks on this node, started by torchrun with a free port; their output goes to ``logs/gang-<number>``."""

    def __init__(self, nproc: int, logs: Path, number: int, variables: Mapping[str, str]) -> None:
        folder = logs / f"gang-{number}"
        self._exits = folder / "exits.json"
        command = [sys.executable, "-m", "bench.launch.torchrun_entry", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(nproc), "--log-dir", str(folder), "--redirects", "3"]
        command += ["-m", "bench.rank.worker"]
        entry = {"PARBENCH_EXITS": str(self._exits), "PARBENCH_DRIVER_PID": str(os.getpid())}
        super().__init__(command, {**variables, **entry}, folder / "torchrun.log")

    def exits(self) -> dict[int, int]:
        return msgspec.json.decode(self._exits.read_bytes(), type=dict[int, int]) if self._exits.exists() else {}


class SrunLauncher(_StartedLauncher):
    """Ranks on several nodes, a job step of theirs; srun's own words go to ``logs/gang-<number>/srun.log``."""

    def __init__(
        self, layout: NodeLayout, logs: Path, number: int, variables: Mapping[str, str], nodelist: str | None = None
    ) -> None:
        folder = (logs / f"gang-{number}").absolute()
        self._log = folder / "srun.log"
        super().__init__(srun_command(layout, folder, os.environ, nodelist), variables, self._log)

    def exits(self) -> dict[int, int]:
        return parse_exits(self._log.read_text(errors="replace"))

    def last_error(self) -> str:
        """Return srun's first error, which names the node."""
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("srun: error:")), "")

    def end(self, ranks: Iterable[Hello]) -> None:
        """Kill the ranks of this host, end srun, and have Slurm kill what is left of the step on other nodes."""
        hellos, running = list(ranks), not self.ended()
        super().end(hellos)
        for step in {hello.step for hello in hellos if hello.step and running}:
            # a step that has ended by itself is no fault; where scancel fails, ranks end as their driver has hung up
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, timeout=10, check=False)


def srun_command(layout: NodeLayout, logs: Path, environ: Mapping[str, str], nodelist: str | None = None) -> list[str]:
    """Return srun's words; a rank's output goes to ``rank-<n>.log`` in the folder of logs, which all nodes share.

    The tasks of each node are said, for ``-N2 -n4`` may place three and one; so are the CPUs of a task, which srun has
    not inherited since Slurm 22.05. A step may overlap one that still dies on a node that does not answer.
    """
    words = ["srun", f"--nodes={layout.nodes}", f"--ntasks={layout.ranks}"]
    words += [f"--ntasks-per-node={layout.ntasks_per_node}", f"--distribution={layout.placement}"]
    words += ["--kill-on-bad-exit=1", "--mpi=none", "--overlap", "--input=none", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    if nodelist:
        words.append(f"--nodelist={nodelist}")
    words += [f"--output={logs}/rank-%t.log", f"--error={logs}/rank-%t.log", *more_options(environ)]
    return [*words, sys.executable, "-m", "bench.rank.worker", "srun"]


def parse_exits(text: str) -> dict[int, int]:
    """Return the first bad end that srun tells of, by rank; nothing where it tells of none, or in other words."""
    if (found := _ENDED.search(text)) is None:
        return {}
    rank, how = int(found["first"]), found["how"]
    if code := re.match(r"Exited with exit code (\d+)", how):
        return {rank: int(code[1])}
    sign = next((sign for sign in signal.Signals if how.startswith(str(signal.strsignal(sign)))), None)
    return {} if sign is None else {rank: -sign}


def local_state(hello: Hello) -> str | None:
    """Return the process state of a rank on this host, such as ``stopped``; None where it cannot be seen.

    A zombie is gone, though nobody may ever ask for its exit code; but not while threads of it are left in a driver.
    """
    if hello.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(hello.pid)
        state = str(process.status())
        return "gone" if state == psutil.STATUS_ZOMBIE and process.num_threads() <= 1 else state
    except psutil.NoSuchProcess:
        return "gone"


def loopback_variables() -> dict[str, str]:
    """Return what keeps gloo's groups within this node; by host name gloo may pick an interface that is not up."""
    loopback = interface_of("127.0.0.1")
    return {} if loopback is None else {INTERFACE_VARIABLE: loopback}
