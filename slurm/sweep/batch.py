"""The batch scripts of a sweep: one job for all points (runs), or an array for each node count."""

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.machine.environment import format_cpus
from parbench.bench.text import parse_duration
from parbench.slurm.sweep.folder import Point, Sweep, make_slug
from parbench.slurm.system import format_limit

# The characters that need no quotes in an #SBATCH line.
_UNQUOTED = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=@%+[]*|&"
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A job to submit, or an array of jobs, and the points (runs of the sweep) that it measures."""

    name: str
    """The name of the batch script without its extension."""
    points: tuple[Point, ...]
    """The points to measure, in the order of execution."""
    nodes: int
    """The number of nodes of each job: the most that one of the points needs."""
    ntasks_per_node: int
    """The number of tasks (ranks) on each node: the most that one of the points needs."""
    time_seconds: float
    """The time limit of each job or task in seconds."""
    tasks: tuple[int, ...] = ()
    """The task numbers of an array, which are the indices of its points in the sweep.

    Empty for a single job.
    """


def build_batches(sweep: Sweep, points: Sequence[Point]) -> tuple[Batch, ...]:
    """Return the jobs that measure these points, which are runs of a sweep.

    In mode ``one`` of the sweep file, the result is a single job. In mode ``array``, it is a job
    array for each number of nodes, with a task for each point. ``points`` has the points in the
    order of execution, sorted by number of nodes.
    """
    if sweep.file.mode == "one":
        return (_build_batch(sweep, "sweep", tuple(points)),)
    groups = itertools.groupby(points, key=lambda point: point.nodes)
    return tuple(_build_batch(sweep, f"{nodes}-nodes", tuple(group)) for nodes, group in groups)


def _build_batch(sweep: Sweep, name: str, points: tuple[Point, ...]) -> Batch:
    """Return the job that measures the points (runs), or in mode ``array`` the array of jobs.

    ``name`` is the name of the batch script without its extension. Without a time limit in the
    sweep file, the limit is 60 s plus 1.25 times the expected duration. This is the duration of all
    points for a single job, and of the longest point for an array.
    """
    seconds = [point.seconds for point in points]
    work_seconds = sum(seconds)
    tasks: tuple[int, ...] = ()
    if sweep.file.mode == "array":
        work_seconds = max(seconds)
        tasks = tuple(sweep.points.index(point) for point in points)
    time_seconds = 60 + 1.25 * work_seconds
    if sweep.file.slurm.time is not None:
        time_seconds = parse_duration(sweep.file.slurm.time)
    return Batch(
        name=name,
        points=points,
        nodes=max(point.nodes for point in points),
        ntasks_per_node=max(point.ntasks_per_node for point in points),
        time_seconds=time_seconds,
        tasks=tasks,
    )


def format_script(sweep: Sweep, folder: Path, batch: Batch) -> str:
    """Return the text of the batch script of ``batch``, a job or an array of jobs of the sweep.

    ``folder`` is the folder of the sweep. The script ends in ``exec``, so that the signals of Slurm
    reach parbench instead of the shell.
    """
    options = {**_list_options(sweep, folder, batch), **sweep.file.slurm.format_options()}
    command = [sweep.python, "-m", "parbench", "slurm", "work", str(folder)]
    if batch.tasks:
        command.append("--array")
    lines = [
        "#!/bin/bash",
        *[_format_directive(name, value) for name, value in options.items() if value],
        "ulimit -c 0",
        *sweep.file.prologue,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _list_options(sweep: Sweep, folder: Path, batch: Batch) -> dict[str, str | bool]:
    """Return the values of the sbatch options that parbench sets, by name without dashes.

    True stands for an option without a value. An option whose value is empty or False is not
    written to the batch script.
    """
    settings = sweep.file.slurm
    logs = str(folder / "logs").replace("%", "%%")
    return {
        "job-name": make_slug(sweep.name),
        "nodes": str(batch.nodes),
        "ntasks-per-node": str(batch.ntasks_per_node),
        "time": format_limit(batch.time_seconds),
        "requeue" if settings.requeue else "no-requeue": True,
        "open-mode": "append",
        "output": f"{logs}/%A_%a.out" if batch.tasks else f"{logs}/%j.out",
        "chdir": sweep.working_directory,
        "array": format_cpus(batch.tasks),  # sbatch has the same form: 0-3,7
        "no-kill": settings.on_dead_node == "go-on",
        "partition": settings.partition or "",
    }


def _format_directive(name: str, value: str | bool) -> str:
    """Return the #SBATCH line that sets the sbatch option ``name``, such as ``time``, to ``value``.

    True stands for an option without a value. The value is in double quotes if needed, because
    sbatch interprets a backslash even in single quotes.
    """
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if not set(text) <= _UNQUOTED:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return f"#SBATCH --{name}={text}"
