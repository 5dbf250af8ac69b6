"""``parbench slurm submit``, ``resume`` and ``cancel``: what is given to Slurm, all of it or none, and taken back."""

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from bench.plan.cases import load_catalogue
from bench.results.runs import utc_now
from bench.text import UserError, counted, did_you_mean, listed, parse_duration, writing
from slurm.job.ledger import FINAL
from slurm.sweep.expand import expand
from slurm.sweep.folder import Job, Point, Sweep, append_job, create_folder, load_jobs, load_sweep, slug, write_sweep
from slurm.sweep.script import Batch, about, batches, estimate, script_text, table
from slurm.sweep.status import follow, look
from slurm.sweep.sweepfile import SweepFile, at, read_sweep_file
from slurm.system import SLURM, Partition, Slurm, SlurmError


def submit(
    path: Path, modules: Sequence[str], *, dry_run: bool, wait: bool, out: Path | None, slurm: Slurm = SLURM
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
        click.echo(f"\n{script_text(sweep, parent.absolute() / f'UTC-{slug(sweep.name)}-HEX', wanted[0])}")
        more = f"; {counted(len(wanted) - 1, 'script')} more, of the same form" if len(wanted) > 1 else ""
        click.echo(f"dry run: nothing was submitted{more}")
        return 0
    folder = create_folder(parent, sweep.name)
    try:
        write_sweep(folder, sweep)
        jobs = send(sweep, folder, wanted, slurm)
    except UserError:
        if not load_jobs(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    sent = (f"job {job.id}: {counted(len(job.points), 'point')} on {counted(job.nodes, 'node')}" for job in jobs)
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
        mode=file.mode,
        points=points,
        preset=file.preset,
        launches=file.launches,
        budget=None if file.budget is None else str(file.budget),
        timeout=None if file.timeout is None else str(file.timeout),
        backend=file.backend,
        device=file.device,
        link=file.link,
        partition=file.slurm.partition,
        time_seconds=None if file.slurm.time is None else round(parse_duration(file.slurm.time)),
        options=file.slurm.all_options(),
        srun_options=() if file.container is None else (f"--container-image={file.container}",),
        prologue=file.prologue,
        python=file.python or sys.executable,
        working_directory=str(Path.cwd()),
        requeue=file.slurm.requeue,
        on_dead_node=file.slurm.on_dead_node,
        warning_seconds=file.slurm.signal_seconds,
    )


def fit_partition(sweep: Sweep, partitions: Sequence[Partition]) -> tuple[Sweep, list[str]]:
    """Return the sweep with jobs no longer than allowed, and notes; ``UserError`` if it does not fit.

    Only a time that the user asked for is refused: a job of estimated length that is cut short queues itself again.
    """
    chosen = _chosen(sweep.partition, partitions)
    names = listed(partition.name for partition in chosen)
    nodes = max(partition.nodes for partition in chosen)
    limit = max(partition.limit_seconds for partition in chosen)
    wanted = max(point.nodes for point in sweep.points)
    if wanted > nodes:
        raise UserError(f"nodes({wanted}) > {nodes}, the nodes of partition {names}")
    notes = [f"partition {partition.name} is not up: jobs wait" for partition in chosen if not partition.is_up]
    longest = max(batch.time_seconds for batch in batches(sweep))
    if longest <= limit:
        return sweep, notes
    if sweep.time_seconds is not None:
        raise UserError(f"$.slurm.time({about(longest)}) > {about(limit)}, the limit of partition {names}")
    if max(point.seconds for point in sweep.points) > limit or not sweep.requeue:
        raise UserError(
            f"a job needs {about(longest)}, and partition {names} allows {about(limit)}: set mode to array or each, a "
            "smaller budget, or slurm.requeue = true"
        )
    notes.append(f"the job takes about {about(longest)}, in parts of {about(limit)}, all that partition {names} allows")
    return msgspec.structs.replace(sweep, time_seconds=int(limit)), notes


def _chosen(name: str | None, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that a job may run in: those named, the default without a name."""
    by_name = {partition.name: partition for partition in partitions}
    there_are = f"there are {listed(by_name) if by_name else 'none'}"
    if name is None:
        if default := [partition for partition in partitions if partition.is_default]:
            return default
        raise UserError(f"$.slurm.partition is missing, and Slurm has no default: {there_are}")
    for one in name.split(","):
        if one not in by_name:
            hint = did_you_mean(one, by_name)
            raise UserError(f"$.slurm.partition: no partition is named {one!r}: {there_are}{hint}")
    return [by_name[one] for one in name.split(",")]


def too_long(sweep: Sweep) -> list[str]:
    """Say which points may never fit into the time that jobs are given; such a point is postponed, not begun."""
    given = sweep.time_seconds or math.inf
    if found := [point.seconds for point in sweep.points if point.seconds > given]:
        points = f"{counted(len(found), 'point')} of up to {about(max(found))}"
        return [f"{points} may not fit into jobs of {about(given)}, and would be postponed"]
    return []


def send(sweep: Sweep, folder: Path, wanted: Sequence[Batch], slurm: Slurm) -> tuple[Job, ...]:
    """Submit jobs for a sweep's folder, each noted there at once; if one is refused, the others are cancelled."""
    jobs: list[Job] = []
    try:
        for batch in wanted:
            script = folder / "scripts" / f"{batch.stem}.sh"
            with writing(script):
                script.write_text(script_text(sweep, folder, batch), encoding="utf-8")
            job = Job(
                id=slurm.sbatch(script),
                name=batch.stem,
                nodes=batch.nodes,
                time_seconds=batch.time_seconds,
                submitted=utc_now(),
                points=tuple(point.id for point in batch.points),
                array=bool(batch.tasks),
            )
            jobs.append(job)
            append_job(folder, job)
    except UserError as error:
        raise UserError(f"{_take_back(jobs, slurm)}: {error}") from error
    except KeyboardInterrupt:
        click.echo(f"parbench: interrupted: {_take_back(jobs, slurm)}", err=True)
        raise
    return tuple(jobs)


def _take_back(jobs: Sequence[Job], slurm: Slurm) -> str:
    """Cancel what was submitted, and return in words what is left of it; what cannot be cancelled is named."""
    if not jobs:
        return "nothing was submitted"
    ids = [job.id for job in jobs]
    try:
        slurm.scancel(ids)
    except SlurmError as refusal:
        return f"jobs {' '.join(ids)} are submitted and could not be cancelled ({refusal})"
    return f"nothing is left submitted, for jobs {' '.join(ids)} were cancelled"


def resume(folder: Path, slurm: Slurm = SLURM) -> int:
    """Submit what is missing in the form of the sweep's mode, and print the jobs' ids.

    ``UserError`` if nothing is missing, if jobs of the sweep still live, or if Slurm does not answer.
    """
    folder = folder.absolute()
    sweep, picture = load_sweep(folder), look(folder, slurm)
    if picture.trouble:
        raise SlurmError(f"whether jobs of {folder} still live cannot be told: {picture.trouble}")
    if alive := [job.id for job in picture.jobs if job.lives]:
        raise UserError(f"jobs of {folder} still wait or run ({', '.join(alive)}): let them end, or cancel them")
    ended = {point.id for point in picture.points if point.state in FINAL}
    missing = [point for point in sweep.points if point.id not in ended]
    if not missing:
        raise UserError(f"nothing of {folder} is missing: its {len(sweep.points)} points are done or failed")
    suffix = f"-resumed-{len(picture.jobs)}"  # so that no script is overwritten
    wanted = [replace(batch, stem=f"{batch.stem}{suffix}") for batch in batches(sweep, missing)]
    for job in send(sweep, folder, wanted, slurm):
        click.echo(f"job {job.id}: {len(job.points)} of {len(sweep.points)} points, on {job.nodes} nodes")
    click.echo(f"next: parbench slurm status {folder}")
    return 0


def cancel(folder: Path, slurm: Slurm = SLURM) -> int:
    """End the sweep's jobs that still wait or run, by their ids, and print which; what is measured is kept."""
    load_sweep(folder)
    alive = {job.id for job in slurm.queue()}
    ids = [job.id for job in load_jobs(folder) if job.id in alive]
    slurm.scancel(ids)
    for name in ids:
        click.echo(f"job {name}: cancelled")
    if not ids:
        click.echo("no job of this sweep waits or runs")
    return 0
