"""The batch scripts of a sweep, as text: what Slurm is told, and the one command that measures; and what all take."""

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.text import counted, format_duration, format_table
from slurm.sweep.folder import Mode, Point, Sweep, slug
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
        return (_batch(sweep, "sweep", wanted),)
    if sweep.mode == "each":
        return tuple(_batch(sweep, one.id, (one,), "--point", one.id) for one in wanted)
    groups = itertools.groupby(wanted, key=lambda point: point.nodes)
    return tuple(_batch(sweep, f"{nodes}-nodes", tuple(group), "--array") for nodes, group in groups)


def _batch(sweep: Sweep, stem: str, points: tuple[Point, ...], *words: str) -> Batch:
    """Return a job; its time, if not given, is in whole minutes for its points one after the other, or at once."""
    ids = {point.id for point in points} if sweep.mode == "array" else set()
    seconds = [point.seconds for point in points]
    work = max(seconds) if sweep.mode == "array" else sum(seconds)
    return Batch(
        stem=stem,
        points=points,
        nodes=max(point.nodes for point in points),
        ntasks_per_node=max(point.ntasks_per_node for point in points),
        time_seconds=sweep.time_seconds or math.ceil((60 + 1.25 * work) / 60) * 60,
        tasks=tuple(index for index, point in enumerate(sweep.points) if point.id in ids),
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
    options: dict[str, str | bool] = {
        "job-name": slug(sweep.name),
        "nodes": str(batch.nodes),
        "ntasks-per-node": str(batch.ntasks_per_node),
        "time": format_limit(batch.time_seconds),
        "signal": f"B:USR1@{min(sweep.warning_seconds, batch.time_seconds // 3)}",
        "requeue" if sweep.requeue else "no-requeue": True,
        "open-mode": "append",
        "output": str(folder / "logs").replace("%", "%%") + ("/%A_%a.out" if batch.tasks else "/%j.out"),
        "chdir": sweep.working_directory,
        "array": indices(batch.tasks),
        "no-kill": sweep.on_dead_node == "go-on",
        "partition": sweep.partition or "",
    }
    return {**{name: value for name, value in options.items() if value}, **sweep.options}


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


def estimate(points: Sequence[Point], mode: Mode) -> str:
    """Return what points take that use up their budgets: ``12 points in 1 job, about 14 min, 0.6 node-hours``.

    Jobs of their own count as if one ran after the other. Slurm charges nodes held times seconds, and one allocation
    holds the largest number of nodes for all its time.
    """
    seconds = sum(point.seconds for point in points)
    held = sum(point.nodes * point.seconds for point in points)
    if mode == "one":
        held = max(point.nodes for point in points) * seconds
    jobs = {"one": 1, "array": len({point.nodes for point in points}), "each": len(points)}[mode]
    what = f"{counted(len(points), 'point')} in {counted(jobs, 'job')}"
    return f"{what}, about {about(seconds)}, {held / 3600:.2g} node-hours"


def about(seconds: float) -> str:
    """Return a duration as a guess deserves: seconds below two minutes, minutes below three hours, else hours."""
    if seconds < 120:
        return format_duration(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def table(points: Sequence[Point]) -> str:
    """Return one line for each point, its id and label, the expected time and node-hours."""
    rows = [(one.id, one.label, about(one.seconds), f"{one.nodes * one.seconds / 3600:.2g}") for one in points]
    return format_table([("point", "label", "time", "node-hours"), *rows], right=(2, 3))
