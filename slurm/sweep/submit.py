"""``parbench slurm submit``, ``resume`` and ``cancel``: batch scripts given to Slurm, all or none, and taken back."""

import itertools
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec

from parbench.bench.files import convert_write_errors
from parbench.bench.machine.environment import format_cpus
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.results.runs import utc_now
from parbench.bench.text import (
    UserError,
    format_duration,
    format_list,
    format_table,
    parse_duration,
    pluralize,
    suggest_similar,
)
from parbench.slurm.job.state import FINAL
from parbench.slurm.sweep import folder as folders
from parbench.slurm.sweep.expand import expand
from parbench.slurm.sweep.folder import Job, Point, Sweep
from parbench.slurm.sweep.status import follow, look
from parbench.slurm.sweep.sweepfile import SweepFile, at, read_sweep_file
from parbench.slurm.system import SLURM, Partition, Slurm, SlurmError, format_limit

_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=@%+[]*|&")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One sbatch: an allocation, or an array of them, and the points measured in it; ``stem`` names its script.

    ``tasks`` are the indices of an array, which are those of the points in the sweep.
    """

    stem: str
    points: tuple[Point, ...]
    nodes: int
    ntasks_per_node: int
    time_seconds: int
    tasks: tuple[int, ...] = ()


def batches(sweep: Sweep, points: Sequence[Point] | None = None) -> tuple[Batch, ...]:
    """Return the jobs for some points of a sweep, by default all, in the form of its mode."""
    points = sweep.points if points is None else tuple(points)
    if sweep.mode == "one":
        return (_batch(sweep, "sweep", points),)
    groups = itertools.groupby(points, key=lambda point: point.nodes)
    return tuple(_batch(sweep, f"{nodes}-nodes", tuple(group)) for nodes, group in groups)


def _batch(sweep: Sweep, stem: str, points: tuple[Point, ...]) -> Batch:
    """Build a job. Without a time limit of the user it gets whole minutes for its points in sequence, or at once."""
    seconds = [point.seconds for point in points]
    if sweep.mode == "array":
        work_seconds = max(seconds)
        tasks = tuple(sweep.points.index(point) for point in points)
    else:
        work_seconds, tasks = sum(seconds), ()
    return Batch(
        stem=stem,
        points=points,
        nodes=max(point.nodes for point in points),
        ntasks_per_node=max(point.ntasks_per_node for point in points),
        time_seconds=sweep.time_seconds or math.ceil((60 + 1.25 * work_seconds) / 60) * 60,
        tasks=tasks,
    )


def script_text(sweep: Sweep, folder: Path, batch: Batch) -> str:
    """Return a batch script; ``exec`` replaces the shell, so that Slurm's signals reach the measuring process."""
    directives = [_directive(name, value) for name, value in _options(sweep, folder, batch).items()]
    command = [sweep.python, "-m", "parbench", "slurm", "work", str(folder)]
    if batch.tasks:
        command.append("--array")
    lines = [
        "#!/bin/bash",
        *directives,
        "ulimit -c 0",
        *sweep.prologue,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _options(sweep: Sweep, folder: Path, batch: Batch) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {
        "job-name": folders.slug(sweep.name),
        "nodes": str(batch.nodes),
        "ntasks-per-node": str(batch.ntasks_per_node),
        "time": format_limit(batch.time_seconds),
        "requeue" if sweep.requeue else "no-requeue": True,
        "open-mode": "append",
        "output": str(folder / "logs").replace("%", "%%")
        + ("/%A_%a.out" if batch.tasks else "/%j.out"),
        "chdir": sweep.working_directory,
        "array": format_cpus(batch.tasks),  # as sbatch takes them, too: 0-3,7
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


def estimate(points: Sequence[Point], mode: folders.Mode) -> str:
    """Describe the cost of points that use up their budgets: ``12 points in 1 job, about 14 min, 0.6 node-hours``.

    The jobs of an array count as if they ran one after the other. Slurm charges nodes times seconds, and one
    allocation holds the largest number of nodes all the time.
    """
    seconds = sum(point.seconds for point in points)
    sizes = {point.nodes for point in points}
    if mode == "one":
        num_jobs, node_seconds = 1, max(sizes) * seconds
    else:
        num_jobs, node_seconds = len(sizes), sum(point.nodes * point.seconds for point in points)
    jobs = f"{pluralize(len(points), 'point')} in {pluralize(num_jobs, 'job')}"
    return f"{jobs}, about {about(seconds)}, {node_seconds / 3600:.2g} node-hours"


def about(seconds: float) -> str:
    """Return a duration as a guess deserves: seconds below two minutes, minutes below three hours, else hours."""
    if seconds < 120:
        return format_duration(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def table(points: Sequence[Point]) -> str:
    rows = [
        (one.id, one.label, about(one.seconds), f"{one.nodes * one.seconds / 3600:.2g}")
        for one in points
    ]
    return format_table([("point", "label", "time", "node-hours"), *rows], right_aligned=(2, 3))


def submit(
    path: Path,
    modules: Sequence[str],
    *,
    dry_run: bool,
    wait: bool,
    out: Path | None,
    slurm: Slurm = SLURM,
) -> int:
    """Submit a sweep and return the exit code; ``UserError`` if anything is wrong, and then nothing is submitted.

    With ``wait`` the code is that of the finished sweep. A dry run shows what would be submitted, and writes nothing.
    """
    file = read_sweep_file(path)
    if not dry_run:
        slurm.check_program("sbatch")
    partitions: tuple[Partition, ...] | None = None
    try:
        partitions = slurm.partitions()
    except SlurmError as error:
        if not dry_run:
            raise
        click.echo(f"note: the partition, its nodes and its time limit were not checked: {error}")
    with at(f"sweep file {path}"):
        points, notes = expand(file, load_catalogue(modules))
        sweep = freeze(file, path, points)
        if partitions is not None:
            sweep, found = fit_partition(sweep, partitions)
            notes += found
    click.echo(table(sweep.points))
    for note in [*notes, *too_long(sweep)]:
        click.echo(f"note: {note}")
    click.echo(estimate(sweep.points, sweep.mode))
    parent = out or Path(file.out)
    wanted = batches(sweep)
    if dry_run:
        click.echo(
            f"\n{script_text(sweep, parent.absolute() / f'UTC-{folders.slug(sweep.name)}-HEX', wanted[0])}"
        )
        more = (
            f"; {pluralize(len(wanted) - 1, 'script')} more, of the same form"
            if len(wanted) > 1
            else ""
        )
        click.echo(f"dry run: nothing was submitted{more}")
        return 0
    folder = folders.create_folder(parent, sweep.name)
    try:
        folders.write_sweep(folder, sweep)
        jobs = send(sweep, folder, wanted, slurm)
    except UserError:
        if not folders.load_jobs(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    sent = (
        f"job {job.id}: {pluralize(len(job.points), 'point')} on {pluralize(job.nodes, 'node')}"
        for job in jobs
    )
    click.echo("\n".join(sent))
    if wait:
        return follow(folder)
    click.echo(f"next: parbench slurm status {folder}")
    return 0


def freeze(file: SweepFile, path: Path, points: tuple[Point, ...]) -> Sweep:
    """Return what is submitted: the file's contents and what this process adds, its Python and its folder."""
    return Sweep(
        name=file.name or path.stem,
        file=str(path.absolute()),
        created=utc_now(),
        points=points,
        mode=file.mode,
        plan=file.plan(),
        link=file.link,
        prologue=file.prologue,
        partition=file.slurm.partition,
        time_seconds=None if file.slurm.time is None else round(parse_duration(file.slurm.time)),
        options=file.slurm.all_options(),
        srun_options=() if file.container is None else (f"--container-image={file.container}",),
        python=file.python or sys.executable,
        working_directory=str(Path.cwd()),
        requeue=file.slurm.requeue,
        on_dead_node=file.slurm.on_dead_node,
    )


def fit_partition(sweep: Sweep, partitions: Sequence[Partition]) -> tuple[Sweep, list[str]]:
    """Return the sweep with jobs no longer than allowed, and notes; ``UserError`` if it does not fit.

    Only a time that the user asked for is refused: a job of estimated length that is cut short queues itself again.
    """
    chosen = _chosen(sweep.partition, partitions)
    names = format_list(partition.name for partition in chosen)
    nodes = max(partition.nodes for partition in chosen)
    limit = max(partition.limit_seconds for partition in chosen)
    wanted = max(point.nodes for point in sweep.points)
    if wanted > nodes:
        raise UserError(f"nodes({wanted}) > {nodes}, the nodes of partition {names}")
    notes = [
        f"partition {partition.name} is not up: jobs wait"
        for partition in chosen
        if not partition.is_up
    ]
    longest = max(batch.time_seconds for batch in batches(sweep))
    if longest <= limit:
        return sweep, notes
    if sweep.time_seconds is not None:
        raise UserError(
            f"$.slurm.time({about(longest)}) > {about(limit)}, the limit of partition {names}"
        )
    if max(point.seconds for point in sweep.points) > limit or not sweep.requeue:
        raise UserError(
            f"a job needs {about(longest)}, and partition {names} allows {about(limit)}: try "
            "mode = 'array', a smaller budget, or slurm.requeue = true"
        )
    notes.append(
        f"the job takes about {about(longest)}, in parts of {about(limit)}, all that partition {names} allows"
    )
    return msgspec.structs.replace(sweep, time_seconds=int(limit)), notes


def _chosen(name: str | None, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that a job may run in: those named, the default without a name."""
    by_name = {partition.name: partition for partition in partitions}
    there_are = f"there are {format_list(by_name) if by_name else 'none'}"
    if name is None:
        if default := [partition for partition in partitions if partition.is_default]:
            return default
        raise UserError(f"$.slurm.partition is missing, and Slurm has no default: {there_are}")
    for one in name.split(","):
        if one not in by_name:
            hint = suggest_similar(one, by_name)
            raise UserError(f"$.slurm.partition: no partition is named {one!r}: {there_are}{hint}")
    return [by_name[one] for one in name.split(",")]


def too_long(sweep: Sweep) -> list[str]:
    """Say which points may never fit into the time that jobs are given; such a point is postponed, not begun."""
    given = sweep.time_seconds or math.inf
    if found := [point.seconds for point in sweep.points if point.seconds > given]:
        points = f"{pluralize(len(found), 'point')} of up to {about(max(found))}"
        return [f"{points} may not fit into jobs of {about(given)}, and would be postponed"]
    return []


def send(sweep: Sweep, folder: Path, wanted: Sequence[Batch], slurm: Slurm) -> tuple[Job, ...]:
    """Submit jobs for a sweep's folder, each noted there at once; if one is refused, the others are cancelled."""
    jobs: list[Job] = []
    try:
        for batch in wanted:
            script = folder / "scripts" / f"{batch.stem}.sh"
            with convert_write_errors(script):
                script.write_text(script_text(sweep, folder, batch), encoding="utf-8")
            job = Job(
                id=slurm.sbatch(script),
                name=batch.stem,
                nodes=batch.nodes,
                submitted=utc_now(),
                points=tuple(point.id for point in batch.points),
            )
            jobs.append(job)
            folders.append_job(folder, job)
    except UserError as error:
        raise UserError(f"{_cancel_submitted(jobs, slurm)}: {error}") from error
    except KeyboardInterrupt:
        click.echo(f"parbench: interrupted: {_cancel_submitted(jobs, slurm)}", err=True)
        raise
    return tuple(jobs)


def _cancel_submitted(jobs: Sequence[Job], slurm: Slurm) -> str:
    """Cancel submitted jobs and return a message about what is left of them."""
    if not jobs:
        return "nothing was submitted"
    ids = [job.id for job in jobs]
    try:
        slurm.scancel(ids)
    except SlurmError as refusal:
        return f"jobs {' '.join(ids)} are submitted and could not be cancelled ({refusal})"
    return f"nothing is left submitted: jobs {' '.join(ids)} were cancelled"


def resume(folder: Path, slurm: Slurm = SLURM) -> int:
    """Submit what is missing in the form of the sweep's mode, and print the jobs' ids.

    ``UserError`` if nothing is missing, if jobs of the sweep still live, or if Slurm does not answer.
    """
    folder = folder.absolute()
    sweep, picture = folders.load_sweep(folder), look(folder, slurm)
    if picture.trouble:
        raise SlurmError(f"whether jobs of {folder} still live cannot be told: {picture.trouble}")
    if alive := [job.id for job in picture.jobs if job.lives]:
        raise UserError(
            f"jobs of {folder} still wait or run ({', '.join(alive)}): let them end, or cancel them"
        )
    ended = {point.id for point in picture.points if point.state in FINAL}
    missing = [point for point in sweep.points if point.id not in ended]
    if not missing:
        raise UserError(
            f"nothing of {folder} is missing: its {len(sweep.points)} points are done or failed"
        )
    suffix = f"-resumed-{len(picture.jobs)}"  # so that no script is overwritten
    wanted = [replace(batch, stem=f"{batch.stem}{suffix}") for batch in batches(sweep, missing)]
    for job in send(sweep, folder, wanted, slurm):
        click.echo(
            f"job {job.id}: {len(job.points)} of {len(sweep.points)} points, on {job.nodes} nodes"
        )
    click.echo(f"next: parbench slurm status {folder}")
    return 0


def cancel(folder: Path, slurm: Slurm = SLURM) -> int:
    """End the sweep's jobs that still wait or run, by their ids, and print which; what is measured is kept."""
    folders.load_sweep(folder)
    alive = {job.id for job in slurm.queue()}
    ids = [job.id for job in folders.load_jobs(folder) if job.id in alive]
    slurm.scancel(ids)
    for name in ids:
        click.echo(f"job {name}: cancelled")
    if not ids:
        click.echo("no job of this sweep waits or runs")
    return 0
