"""What starts and ends the ranks of one launch: forks on this node, srun on several, or a program before ours."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from select import select
from subprocess import DEVNULL, PIPE, STDOUT, Popen

import msgspec
import psutil

from parbench.bench.launch.control_channel import Hello
from parbench.bench.launch.processes import die_with_parent
from parbench.bench.machine.environment import find_interface
from parbench.bench.machine.slurm_allocation import INTERFACE_VARIABLE, NodeLayout, build_srun_command
from parbench.bench.text import last_line, writing

EXITS = "exits.json"  # in a launch's folder of logs: the exit code of each rank that has ended, negative is a signal
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
        """Return the exit codes of ranks that have ended, as far as they are known; negative is a signal."""
        return {}

    def last_error(self) -> str:
        """Return what the launcher or a rank that it started said went wrong last, nothing if they said nothing."""
        return ""

    def end(self, ranks: Iterable[Hello]) -> None:
        """End every rank, stopped ones too; those of this host are told to, and may take a while to be gone."""


class Order(msgspec.Struct, frozen=True):
    """What the fork server is told: to start so many ranks, with these variables, output and exit codes in a folder.

    ``cpus`` are those of each rank, to which it is bound; none if it is not.
    """

    size: int
    folder: str
    variables: dict[str, str]
    cpus: Sequence[Sequence[int]] = ()


class ForkServer(AbstractContextManager["ForkServer"]):
    """A process that has imported ``modules`` for the ranks of this node, which it forks for each launch.

    It ends with its context, or as its driver's pipe closes; then its ranks end, too.
    """

    def __init__(
        self, modules: Iterable[str], variables: Mapping[str, str], log: Path, patience_seconds: float
    ) -> None:
        self._command = [sys.executable, "-m", "parbench.bench.rank.fork_server", *modules]
        self._env = {**os.environ, **variables}
        self._log, self._patience_seconds = log, patience_seconds
        self._process = self._start()

    def _start(self) -> "Popen[bytes]":
        with self._log.open("ab") as file:
            return Popen(
                self._command,
                env=self._env,
                stdin=PIPE,
                stdout=PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # while it imports; then it hears of it
            )

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()  # then it ends its ranks and what they started, if it has come to listen
            if select([process.stdout], [], [], 0)[0]:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def launch(
        self, size: int, folder: Path, variables: Mapping[str, str], cpus: Sequence[Sequence[int]] = ()
    ) -> Launcher:
        """Start ranks once all is imported: each launch then takes as long to start as any other."""
        with writing(folder):
            folder.mkdir(parents=True)
        if self.ended():  # killed, perhaps for want of memory
            self.__exit__()
            self._process = self._start()
        assert self._process.stdout is not None
        select([self._process.stdout], [], [], self._patience_seconds)
        self.tell(msgspec.json.encode(Order(size, str(folder.absolute()), dict(variables), cpus)))
        return _ForkedRanks(self, size, folder / EXITS)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, words: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the ranks' launcher tells
            self._process.stdin.write(words + b"\n")


class _ForkedRanks(Launcher):
    can_restart = True

    def __init__(self, server: ForkServer, size: int, exits: Path) -> None:
        self._server, self._size, self._exits = server, size, exits

    def ended(self) -> bool:
        """Tell whether a rank has ended badly, or all have ended."""
        found = self.exits()
        return self._server.ended() or any(found.values()) or len(found) == self._size

    def exits(self) -> dict[int, int]:
        return msgspec.json.decode(self._exits.read_bytes(), type=dict[int, int]) if self._exits.exists() else {}

    def last_error(self) -> str:
        """Return the last words of the first rank that ended badly, or of the server that was to fork them."""
        bad = [f"rank-{rank}.log" for rank, code in self.exits().items() if code] or ["../fork-server.log"]
        file = (self._exits.parent / bad[0]).resolve()
        words = last_line(file.read_text(errors="replace")) if file.exists() else ""
        return f"{words} ({file.parent.name}/{file.name})" if words else ""

    def end(self, ranks: Iterable[Hello]) -> None:
        self._server.tell(b"")


class SrunLauncher(Launcher):
    """Ranks on several nodes, a job step of theirs; srun's own words go to ``logs/gang-<number>/srun.log``."""

    can_restart = True

    def __init__(
        self, layout: NodeLayout, logs: Path, number: int, variables: Mapping[str, str], nodelist: str | None = None
    ) -> None:
        folder = (logs / f"gang-{number}").absolute()
        with writing(folder):
            folder.mkdir(parents=True)
        self._log = folder / "srun.log"
        env = {**os.environ, **variables}
        command = srun_command(layout, folder, os.environ, nodelist)
        with self._log.open("wb") as file:  # Ctrl-C is the driver's alone
            self._process = Popen(command, env=env, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def exits(self) -> dict[int, int]:
        return parse_exits(self._log.read_text(errors="replace"))

    def last_error(self) -> str:
        """Return srun's first error, which names the node."""
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("srun: error:")), "")

    def end(self, ranks: Iterable[Hello]) -> None:
        """Kill the ranks of this host, end srun, and have Slurm kill what is left of the step on other nodes."""
        hellos, running = list(ranks), not self.ended()
        for hello in hellos:
            if hello.host == socket.gethostname():
                with suppress(ProcessLookupError):
                    os.kill(hello.pid, signal.SIGKILL)
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for step in {hello.step for hello in hellos if hello.step and running}:
            # a step that has ended by itself is no fault; where scancel fails, ranks end as their driver has hung up
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, timeout=10, check=False)


def srun_command(layout: NodeLayout, logs: Path, environ: Mapping[str, str], nodelist: str | None = None) -> list[str]:
    """Return srun's words; a rank's output goes to ``rank-<n>.log`` in the folder of logs, which all nodes share.

    The tasks of each node are said, for ``-N2 -n4`` may place three and one; so are the CPUs of a task, which srun has
    not inherited since Slurm 22.05. A step may overlap one that still dies on a node that does not answer.
    """
    words = [f"--nodes={layout.nodes}", f"--ntasks={layout.ranks}", f"--ntasks-per-node={layout.ntasks_per_node}"]
    words += [f"--distribution={layout.distribution}", "--kill-on-bad-exit=1"]
    if environ.get("SLURM_CPUS_PER_TASK"):
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    if nodelist:
        words.append(f"--nodelist={nodelist}")
    words += [f"--output={logs}/rank-%t.log", f"--error={logs}/rank-%t.log"]
    return [*build_srun_command(environ, *words), sys.executable, "-m", "parbench.bench.rank.worker", "srun"]


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
    loopback = find_interface("127.0.0.1")
    return {} if loopback is None else {INTERFACE_VARIABLE: loopback}
