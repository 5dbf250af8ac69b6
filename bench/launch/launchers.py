"""The launchers that start and kill ranks: a fork server on this node, or srun on several nodes."""

import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from types import ModuleType

import psutil

from parbench.bench.launch.processes import describe_exit, die_with_parent
from parbench.bench.launch.ranks import Ranks
from parbench.bench.machine.slurm_allocation import NodeLayout, build_srun_command
from parbench.bench.text import get_last_line

FOLDER_VARIABLE = "PARBENCH_FOLDER"
"""The environment variable of a rank with the folder for its messages and logs."""
SERVER_LOG_VARIABLE = "PARBENCH_FORK_SERVER_LOG"
"""The environment variable of the fork server with the path of its log."""
DRIVER_VARIABLE = "PARBENCH_DRIVER"
"""The environment variable of the fork server with the process id of the driver."""
WORKER = "parbench.bench.rank.worker"
"""The module that runs as the program of a rank."""
_PRELOAD = "parbench.bench.rank.preload"
"""The module that the fork server imports first, which sets the server up."""
_KILL_DELAY_SECONDS = 5.0
"""The seconds that srun may take to end after SIGTERM before it is killed."""
_READ_AFTER_FORK = ("PARBENCH_", "NCCL_", "GLOO_")
"""The prefixes of environment variables that take effect in a forked rank.

They are read when ranks communicate. Libraries read other variables when they are loaded, so that a
rank with such a variable needs a new Python interpreter.
"""
_TASK_ENDED = re.compile(
    r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(.+))", re.MULTILINE
)
"""Matches srun's line about the first task that ended badly: its number, and its code or signal.

srun's lines about the other tasks state that srun has killed them.
"""


class ForkServer(AbstractContextManager["ForkServer"]):
    """A process that has imported torch and the benchmarks' modules, and forks this node's ranks.

    Only the first start of ranks waits for the imports. The ranks end with the server. The server
    ends with the driver, the process of ``parbench run``.
    """

    def __init__(self, modules: Iterable[str], variables: Mapping[str, str], logs: Path) -> None:
        """Start the server process.

        Args:
            modules: the modules that the server imports, by name.
            variables: environment variables of the server, which the ranks inherit.
            logs: the folder for the server's log.
        """
        self._log = logs / "fork-server.log"
        self._variables = {
            **variables,
            SERVER_LOG_VARIABLE: str(self._log),
            DRIVER_VARIABLE: str(os.getpid()),
        }
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([_PRELOAD, WORKER, *modules])
        self.start()

    def __exit__(self, *exception: object) -> None:
        """Kill the server with all ranks."""
        kill_descendants(self.pid)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._wait(os.WEXITED)

    def _wait(self, options: int) -> os.waitid_result | None:
        """Call ``os.waitid`` for the server process, and return the way in which it has ended.

        The result is None if the server still runs, or if it has been reaped already. ``options``
        are flags of ``os.waitid``, such as ``os.WNOHANG``. The call leaves the process a zombie,
        because the standard library reaps it when it starts the next server.
        """
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, options | os.WNOWAIT)
        return None

    def has_ended(self) -> bool:
        """Return True if the server process has ended."""
        return self._wait(os.WEXITED | os.WNOHANG) is not None

    def get_last_error(self) -> str:
        """Return a message that names the signal that has killed the server.

        If no signal has, the result is the last line of the server's log, which may be empty.
        """
        end = self._wait(os.WEXITED | os.WNOHANG)
        if end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return f"the fork server was {describe_exit(-end.si_status)}"
        return read_last_line(self._log)

    def start(self) -> None:
        """Start the server process with its variables, unless it runs already.

        Sets the attribute ``pid`` to the process id of the server. A server that was started before
        does not run if it has been killed, for example because memory was short.
        """
        before = dict(os.environ)
        os.environ.update(self._variables)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
        server = forkserver._forkserver
        self.pid: int = server._forkserver_pid  # type: ignore[attr-defined]  # no public name


class ForkedRanks(Ranks):
    """Ranks on this node, forked by a fork server. Their output is in files ``rank-<n>.log``."""

    def __init__(
        self,
        server: ForkServer,
        size: int,
        folder: Path,
        variables: Mapping[str, str],
        cpus: Sequence[Sequence[int]] = (),
    ) -> None:
        """Fork the ranks.

        Args:
            server: the fork server.
            size: the number of ranks.
            folder: the folder for the logs and messages of these ranks.
            variables: additional environment variables of all ranks.
            cpus: the CPUs to which each rank is bound, by rank. Empty if ranks are not bound.
        """
        super().__init__(size, folder)
        self._server = server
        self._processes: list[ForkServerProcess] = []
        server.start()
        # The ranks report a server that dies here.
        with suppress(OSError, EOFError), hide_main_module():
            for rank in range(size):
                own_cpus = cpus[rank] if cpus else ()
                arguments = (server.pid, rank, size, folder.absolute(), variables, own_cpus)
                process = server.context.Process(target=run_forked_rank, args=arguments)
                process.start()
                self._processes.append(process)

    def has_launcher_ended(self) -> bool:
        """Return True if the fork server has ended."""
        return self._server.has_ended()

    def get_exit_codes(self) -> dict[int, int]:
        """Return the exit codes of ended ranks by rank. A negative code is a signal.

        The result is empty if the fork server has ended, because the server reports the codes.
        """
        exit_codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        if self._server.has_ended():
            return {}
        return {rank: code for rank, code in exit_codes.items() if code is not None}

    def get_last_error(self) -> str:
        """Return the last line in the log of the first rank with a nonzero exit code.

        If no rank has such a code, it is the last error of the fork server, which may be empty.
        """
        for rank, code in self.get_exit_codes().items():
            if code:
                return read_last_line(self._folder / f"rank-{rank}.log")
        return self._server.get_last_error()

    def kill(self) -> None:
        """Kill all descendants of the fork server, also processes that ranks have left behind."""
        kill_descendants(self._server.pid)  # it has adopted what ranks have left behind


def run_forked_rank(
    server: int,
    rank: int,
    size: int,
    folder: Path,
    variables: Mapping[str, str],
    cpus: Sequence[int],
) -> None:
    """Run a rank in a process that the fork server has just forked.

    Args:
        server: the process id of the fork server.
        rank: the global rank, which is also the rank on this node.
        size: the number of ranks.
        folder: the folder for the log and messages of the rank.
        variables: additional environment variables. An empty value removes a variable.
        cpus: the CPUs to which the rank is bound. Empty if it is not bound.
    """
    os.setsid()  # the driver alone receives the Ctrl-C of a terminal
    die_with_parent(signal.SIGKILL, server)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    redirect_output(folder / f"rank-{rank}.log")
    if cpus:
        os.sched_setaffinity(0, cpus)  # before the rank starts threads
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    apply_variables(os.environ, variables)
    os.environ[FOLDER_VARIABLE] = str(folder)
    if not all(name.startswith(_READ_AFTER_FORK) for name in variables):
        os.execv(sys.executable, [sys.executable, "-m", WORKER])
    importlib.import_module(_PRELOAD).begin_rank()  # imports torch, as the driver does not


def apply_variables(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Set the variables in ``environ``, and remove each variable whose new value is empty."""
    for name, value in variables.items():
        environ[name] = value
        if not value:
            del environ[name]


def redirect_output(log: Path) -> None:
    """Append the output and errors of this process to a file, and make its input empty."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def kill_descendants(pid: int) -> None:
    """Kill the children of a process and all of their descendants. ``pid`` is its process id."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module of this process from multiprocessing within the ``with`` statement.

    Otherwise a process that multiprocessing starts would import the main module. Then scripts that
    call parbench would need the guard ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class SrunRanks(Ranks):
    """Ranks on one or several nodes, which srun starts as the tasks of a job step.

    All nodes must share the folder. It holds the output of srun (``srun.log``), the output of each
    rank (``rank-<n>.log``), and the messages.
    """

    def __init__(
        self,
        layout: NodeLayout,
        folder: Path,
        variables: Mapping[str, str],
        nodelist: str | None = None,
    ) -> None:
        """Start srun.

        Args:
            layout: the number of nodes, the ranks on each, and their distribution.
            folder: the folder for the logs and messages of these ranks.
            variables: additional environment variables of all ranks. An empty value removes a
                variable.
            nodelist: the nodes to use as Slurm writes them, None to let Slurm choose.
        """
        folder = folder.absolute()
        super().__init__(layout.num_ranks, folder)
        self._log = folder / "srun.log"
        env = {**os.environ, FOLDER_VARIABLE: str(folder)}
        env["LOCAL_WORLD_SIZE"] = str(layout.ntasks_per_node)
        apply_variables(env, variables)
        on_gpus = variables.get("PARBENCH_DEVICE") == "cuda"
        with self._log.open("wb") as file:
            self._process = Popen(
                build_rank_command(layout, folder, os.environ, nodelist, on_gpus=on_gpus),
                env=env,
                stdin=DEVNULL,
                stdout=file,
                stderr=STDOUT,
                start_new_session=True,  # the driver alone receives the Ctrl-C of a terminal
                # srun ends the step when it is terminated.
                preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
            )

    def has_launcher_ended(self) -> bool:
        """Return True if srun has ended."""
        return self._process.poll() is not None

    def get_exit_codes(self) -> dict[int, int]:
        """Return the exit code of the first rank that srun reports as failed, by rank.

        The result is empty if srun reports none.
        """
        return parse_exit_codes(self._log.read_text(errors="replace"))

    def get_last_error(self) -> str:
        """Return srun's first error line, which names the node. Empty if there is none."""
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("srun: error:")), "")

    def kill(self) -> None:
        """Kill the ranks on all nodes, also stopped ones, and end srun."""
        steps = [hello.step for hello in self.evidence.hellos.values()]
        if steps and not self.has_launcher_ended():
            # The step may have ended by itself. Where scancel fails, ranks end themselves.
            command = ["scancel", "--signal=KILL", steps[0]]
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=10, check=False)
        self._process.terminate()
        try:
            self._process.wait(_KILL_DELAY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def build_rank_command(
    layout: NodeLayout,
    logs: Path,
    environ: Mapping[str, str],
    nodelist: str | None = None,
    *,
    on_gpus: bool = False,
) -> list[str]:
    """Return the srun command that starts the ranks as the tasks of a job step.

    The number of tasks on each node is stated, because ``-N2 -n4`` may place three and one. So are
    the CPUs of a task, which srun does not inherit since Slurm 22.05. Without them, srun would bind
    a rank on a GPU to a single core, although NCCL's threads need more. The step may overlap a step
    that is still ending on a node that does not answer.

    Args:
        layout: the number of nodes, the ranks on each, and their distribution.
        logs: the folder for the output of each rank.
        environ: the environment variables of the driver, with those of Slurm.
        nodelist: the nodes to use as Slurm writes them, None to let Slurm choose.
        on_gpus: True if the ranks use GPUs.
    """
    options = [
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.num_ranks}",
        f"--ntasks-per-node={layout.ntasks_per_node}",
        f"--distribution={layout.distribution}",
        "--kill-on-bad-exit=1",
    ]
    if environ.get("SLURM_CPUS_PER_TASK"):
        options.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    elif on_gpus:
        options.append("--cpu-bind=none")
    if nodelist:
        options.append(f"--nodelist={nodelist}")
    options += [f"--output={logs}/rank-%t.log", f"--error={logs}/rank-%t.log"]
    return [*build_srun_command(environ, *options), sys.executable, "-m", WORKER]


def parse_exit_codes(text: str) -> dict[int, int]:
    """Return the exit code of the first failed task in the output of srun, by rank.

    A negative code is a signal. The result is empty if srun reports no failed task.
    """
    match = _TASK_ENDED.search(text)
    if match is None:
        return {}
    rank, code, how = match.groups()
    if code:
        return {int(rank): int(code)}
    names = {str(signal.strsignal(sign)): sign for sign in signal.Signals}
    return {int(rank): -sign for name, sign in names.items() if how.startswith(name)}


def read_last_line(log: Path) -> str:
    """Return the last message in a log with the name of the log: ``killed (logs/rank-0.log)``.

    The message is the last line that is not blank and does not begin with ``hint:``. The name has
    the file and its folder. The result is empty if there is no such line or no file.

    Args:
        log: the path of the log.
    """
    text = get_last_line(log.read_text(errors="replace")) if log.exists() else ""
    return f"{text} ({log.parent.name}/{log.name})" if text else ""
