"""The batch scripts of a sweep, as text: what Slurm is told, and the one command that measures."""

import itertools
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.text import format_duration
from slurm.sweep.folder import slug
from slurm.sweep.points import Mode, Point, Sweep
from slurm.system import format_limit

_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=@%+[]*|&")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One sbatch: an allocation, or an array of them, and the points measured in it; ``stem`` names its script.

    ``tasks`` are the array's indices, those of the points in the sweep; empty where the job is no array.
    """

    stem: str
    points: tuple[Point, ...]
    nodes: int
    ntasks_per_node: int
    time_seconds: int
    tasks: tuple[int, ...] = ()
    words: tuple[str, ...] = ()


def batches(sweep: Sweep, points: Sequence[Point] | None = None) -> tuple[Batch, ...]:
    """Return the jobs for some points of a sweep, all without ``points``, in the form of its mode."""
    wanted = sweep.points if points is None else tuple(points)
    if sweep.mode == "one":
        return (_batch(sweep, wanted, stem="sweep"),)
    if sweep.mode == "each":
        return tuple(_batch(sweep, (one,), stem=one.id, words=("--point", one.id)) for one in wanted)
    groups = itertools.groupby(wanted, key=lambda point: point.nodes)
    return tuple(_array(sweep, nodes, tuple(group)) for nodes, group in groups)


def _array(sweep: Sweep, nodes: int, points: tuple[Point, ...]) -> Batch:
    index = {point.id: number for number, point in enumerate(sweep.points)}
    tasks = tuple(index[point.id] for point in points)
    return _batch(sweep, points, stem=f"{nodes}-nodes", tasks=tasks, words=("--array",))


def _batch(
    sweep: Sweep, points: tuple[Point, ...], *, stem: str, tasks: tuple[int, ...] = (), words: tuple[str, ...] = ()
) -> Batch:
    return Batch(
        stem=stem,
        points=points,
        nodes=max(point.nodes for point in points),
        ntasks_per_node=max(point.ntasks_per_node for point in points),
        time_seconds=sweep.time_seconds or job_seconds(points, at_once=bool(tasks)),
        tasks=tasks,
        words=words,
    )


def script_text(sweep: Sweep, folder: Path, batch: Batch) -> str:
    """Return a batch script; the measuring process takes the shell's place, so that Slurm's signals reach it."""
    directives = [_directive(name, value) for name, value in _options(sweep, folder, batch).items()]
    command = [sweep.python, "-P", "-m", "parbench", "slurm", "work", str(folder), *batch.words]
    # a warning that comes before there is anyone to hear it would end the job; the time left is looked at anyway
    shell = ["ulimit -c 0", "trap '' USR1"]
    lines = ["#!/bin/bash", *directives, *shell, *sweep.prologue, f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def _options(sweep: Sweep, folder: Path, batch: Batch) -> dict[str, str | bool]:
    """Return sbatch's long options; the signal never comes in the first two thirds of a short job."""
    log = str(folder / "logs").replace("%", "%%") + ("/%A_%a.out" if batch.tasks else "/%j.out")
    warning = min(sweep.warning_seconds, batch.time_seconds // 3)
    options: dict[str, str | bool] = {
        "job-name": slug(sweep.name),
        "nodes": str(batch.nodes),
        "ntasks-per-node": str(batch.ntasks_per_node),
        "time": format_limit(batch.time_seconds),
        "signal": f"B:USR1@{warning}",
        "requeue" if sweep.requeue else "no-requeue": True,
        "open-mode": "append",
        "output": log,
        "chdir": sweep.working_directory,
    }
    if batch.tasks:
        options["array"] = indices(batch.tasks)
    if sweep.on_dead_node == "go-on":
        options["no-kill"] = True
    if sweep.partition is not None:
        options["partition"] = sweep.partition
    return {**options, **sweep.options}


def _directive(name: str, value: str | bool) -> str:
    """Return a line that sbatch reads; unlike a shell, it knows a backslash within single quotes too."""
    if isinstance(value, bool):
        return f"#SBATCH --{name}"
    if not set(value) <= _SAFE:
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}={value}"


def indices(tasks: Sequence[int]) -> str:
    """Return an array's indices as sbatch takes them: ``0-3,7``."""
    ranges: list[list[int]] = []
    for task in sorted(tasks):
        if ranges and task == ranges[-1][1] + 1:
            ranges[-1][1] = task
        else:
            ranges.append([task, task])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


START_SECONDS = 10.0
"""What a run takes beside its budget: parbench and srun start, the last case ends. Launches are in the budget."""

_JOB_SECONDS = 60.0
_MARGIN = 1.25
_MINUTE = 60


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a sweep takes if every point uses up its budget: ``seconds`` from the first job's start to the last's end.

    Jobs of their own count as if one ran after the other. ``node_seconds`` is what Slurm charges for the work: nodes
    held times seconds.
    """

    points: int
    jobs: int
    seconds: float
    node_seconds: float

    @property
    def text(self) -> str:
        """The estimate in one line, such as ``12 points in 1 job, about 14 min, 0.6 node-hours``."""
        jobs = f" in {self.jobs} {'job' if self.jobs == 1 else 'jobs'}"
        points = f"{self.points} {'point' if self.points == 1 else 'points'}"
        return f"{points}{jobs}, about {about(self.seconds)}, {self.node_seconds / 3600:.2g} node-hours"


def point_seconds(budget_seconds: float) -> float:
    """Return what a point takes at most, but for a case that hangs."""
    return START_SECONDS + budget_seconds


def job_seconds(points: Iterable[Point], *, at_once: bool) -> int:
    """Return the time to ask for, in whole minutes, for points measured one after the other, or each in its own job."""
    seconds = [point.seconds for point in points]
    work = max(seconds) if at_once else sum(seconds)
    return math.ceil((_JOB_SECONDS + _MARGIN * work) / _MINUTE) * _MINUTE


def estimate(points: Sequence[Point], mode: Mode) -> Estimate:
    """Return what all points take: one allocation holds the largest number of nodes for all its time."""
    seconds = sum(point.seconds for point in points)
    if mode == "one":
        held = max(point.nodes for point in points) * seconds
    else:
        held = sum(point.nodes * point.seconds for point in points)
    jobs = {"one": 1, "array": len({point.nodes for point in points}), "each": len(points)}[mode]
    return Estimate(points=len(points), jobs=jobs, seconds=seconds, node_seconds=held)


def about(seconds: float) -> str:
    """Return a duration as a guess deserves: seconds below two minutes, minutes below three hours, else hours."""
    if seconds < 120:
        return format_duration(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def table(points: Sequence[Point]) -> list[str]:
    """Return one line for each point, its id and label, the expected time and node-hours."""
    rows = [("point", "label", "time", "node-hours")]
    for point in points:
        hours = point.nodes * point.seconds / 3600
        rows.append((point.id, point.label, about(point.seconds), f"{hours:.2g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}" for row in rows
    ]
