"""The child of a job that measures a point: ``parbench run``."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parbench.bench.launch.processes import PARBENCH, die_with_parent
from parbench.bench.machine.slurm_allocation import OPTIONS_VARIABLE
from parbench.bench.text import get_last_line
from parbench.slurm.sweep.folder import Point, Sweep, make_cases_path, make_runs_path


@dataclass(frozen=True, kw_only=True)
class PointRequest:
    """A request to measure one point, which is one run of a sweep, on some nodes of the job."""

    folder: Path
    """The folder of the sweep."""
    sweep: Sweep
    """The submitted sweep."""
    point: Point
    """The point to measure."""
    nodes: tuple[str, ...]
    """The names of the nodes to run on, empty if the nodes of the job are unknown."""
    run: Path | None
    """The folder of the run to resume, None to begin a new run."""


Command = Callable[[PointRequest], list[str]]
"""A function that returns the command line of the child process that measures a point.

A point is one run of a sweep.
"""


def build_command(request: PointRequest) -> list[str]:
    """Return the command line of ``parbench run`` that measures or resumes a point (run).

    The option ``--format=json`` makes ``parbench run`` write no HTML page about the run.
    """
    command = [*PARBENCH, "run", "--format=json"]
    nodes = ",".join(request.nodes)
    if request.run is not None and nodes:
        command += ["--nodes", nodes]
    if request.run is not None:
        return [*command, "--resume", str(request.run)]
    point = request.point
    command += ["--launcher", "srun", "--nodes", nodes or str(point.nodes)]
    command += ["--nproc", str(point.ntasks_per_node)]
    command += ["--distribution", point.distribution]
    command += ["--cases", str(make_cases_path(request.folder, point.id))]
    command += ["--out", str(make_runs_path(request.folder, point.id))]
    return command + request.sweep.file.list_run_options()


def build_environment(request: PointRequest) -> dict[str, str]:
    """Return the environment variables of the child process that measures a point.

    They are the variables of this process, overridden by the variables of the point (one run of the
    sweep). If the sweep has a container, one variable also has srun's option for it, which
    ``parbench run`` passes to srun. Variables with an empty value are removed.
    """
    variables = {**os.environ, **request.point.variables}
    container = request.sweep.file.container
    if container is not None:
        variables[OPTIONS_VARIABLE] = f"--container-image={container}"
    return {name: value for name, value in variables.items() if value}


class Child:
    """A child process that measures a point, which is one run of a sweep.

    Its standard error is appended to ``logs/<id>.log`` in the folder of the sweep, where ``<id>``
    is the id of the point. Its standard output is discarded.
    """

    def __init__(self, request: PointRequest, command: Command) -> None:
        """Start the child process. ``command`` builds its command line from the request."""
        self._log = request.folder / "logs" / f"{request.point.id}.log"
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command(request),
                env=build_environment(request),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # The records are in the folder of the run.
                stderr=log,
                process_group=0,
                preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the child. It is -N if signal N ended the child, None while it runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the child if the child still runs.

        After SIGTERM, ``parbench run`` ends its ranks and keeps the records that it has written.
        """
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self, patience_seconds: float) -> None:
        """Send SIGTERM to the process group of the child, and wait until the child has ended.

        SIGKILL follows if the child still runs after ``patience_seconds``.
        """
        self.send_signal(signal.SIGTERM)
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self._process.wait()

    def read_last_message(self) -> str:
        """Return the last line of standard error that this child has written, empty without one."""
        with suppress(OSError):
            return get_last_line(self._log.read_bytes()[self._log_start :].decode(errors="replace"))
        return ""
