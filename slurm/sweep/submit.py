"""``parbench slurm submit``, ``resume`` and ``cancel``."""

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import click

from parbench.bench.files import convert_write_errors
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.results.runs import utc_now
from parbench.bench.text import (
    UserError,
    format_duration,
    format_error,
    format_table,
    pluralize,
)
from parbench.slurm.sweep.batch import build_batches, format_script
from parbench.slurm.sweep.expand import expand
from parbench.slurm.sweep.folder import (
    Point,
    Sweep,
    SweepJob,
    create_folder,
    load_jobs,
    load_sweep,
    make_slug,
    write_job,
    write_sweep,
)
from parbench.slurm.sweep.status import follow_sweep, get_status
from parbench.slurm.sweep.sweepfile import locate_errors, read_sweep_file
from parbench.slurm.system import SLURM, Slurm, SlurmError, SlurmTimeoutError


def submit(
    path: Path,
    modules: Sequence[str],
    *,
    dry_run: bool,
    wait: bool,
    out: Path | None,
    slurm: Slurm = SLURM,
) -> int:
    """Submit the sweep of a sweep file to Slurm, and return the exit code of the command.

    After a ``UserError``, the jobs that were already submitted are cancelled.

    Args:
        path: the sweep file.
        modules: the names of the Python modules that define benchmarks.
        dry_run: True to print the runs of the sweep and the batch scripts, and to submit and write
            nothing.
        wait: True to wait for the sweep's jobs and return the exit code of the sweep. Without it,
            the exit code is 0.
        out: the folder in which the sweep's folder is created. None takes it from the sweep file.
        slurm: the programs of Slurm.
    """
    file = read_sweep_file(path)
    with locate_errors(f"sweep file {path}"):
        points, notes = expand(file, load_catalogue(modules))
    sweep = Sweep(
        name=file.name or path.stem,
        created=utc_now(),
        file=file,
        points=points,
        python=sys.executable,
        working_directory=str(Path.cwd()),
    )
    click.echo(format_points(sweep))
    for note in notes:
        click.echo(f"note: {note}")
    parent = out or Path(file.out)
    if dry_run:
        example = parent.absolute() / f"UTC-{make_slug(sweep.name)}-HEX"
        for batch in build_batches(sweep, points):
            click.echo(f"\n{format_script(sweep, example, batch)}")
        click.echo("dry run: nothing was submitted")
        return 0
    folder = create_folder(parent, sweep.name)
    try:
        write_sweep(folder, sweep)
        jobs = submit_points(sweep, folder, sweep.points, slurm)
    except UserError:
        if not load_jobs(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for job in jobs:
        points_text = pluralize(len(job.points), "point")
        click.echo(f"job {job.id}: {points_text} on {pluralize(job.nodes, 'node')}")
    if wait:
        return follow_sweep(folder)
    click.echo(f"next: parbench slurm status {quote(str(folder))}")
    return 0


def format_points(sweep: Sweep) -> str:
    """Return a table of the points (runs) of a sweep, and a line with the total cost, as text.

    The table shows the expected duration of each point and its node-hours (nodes times hours). The
    total in mode ``one`` is the most nodes of a point times the sum of the durations, because one
    job holds these nodes. In mode ``array``, the total is the sum over the points.
    """
    rows = [("point", "label", "time", "node-hours")]
    for point in sweep.points:
        node_hours = f"{point.nodes * point.seconds / 3600:.2g}"
        rows.append((point.id, point.label, format_duration(point.seconds), node_hours))
    seconds = sum(point.seconds for point in sweep.points)
    node_seconds = max(point.nodes for point in sweep.points) * seconds
    if sweep.file.mode == "array":
        node_seconds = sum(point.nodes * point.seconds for point in sweep.points)
    count = pluralize(len(sweep.points), "point")
    cost = f"{count}, about {format_duration(seconds)}, {node_seconds / 3600:.2g} node-hours"
    return f"{format_table(rows, right_aligned=(2, 3))}\n{cost}"


def submit_points(
    sweep: Sweep, folder: Path, points: Sequence[Point], slurm: Slurm, number: int = 0
) -> list[SweepJob]:
    """Submit the jobs that measure ``points`` of a sweep, either all or none, and return them.

    The batch scripts are written to the new folder ``jobs/<number>``. Raises ``UserError`` if this
    folder exists, because another process may be submitting the same points, or if a job cannot be
    submitted.

    Args:
        sweep: the sweep.
        folder: the folder of the sweep.
        points: the points (runs) to measure, in the order of execution.
        slurm: the programs of Slurm.
        number: the number of the submission: 0 for the first of the sweep, and one more for each
            later one.
    """
    jobs_folder = folder / "jobs" / f"{number:04}"
    try:
        with convert_write_errors(jobs_folder):
            jobs_folder.mkdir()
    except UserError as error:
        hint = f"if none does, remove {jobs_folder}"
        raise UserError(
            f"another process may submit points of {folder} ({error}): {hint}"
        ) from error
    jobs: list[SweepJob] = []
    try:
        for batch in build_batches(sweep, points):
            script = jobs_folder / f"{batch.name}.sh"
            with convert_write_errors(script):
                script.write_text(format_script(sweep, folder, batch), encoding="utf-8")
            with delay_interrupt():  # Otherwise Slurm may accept a job whose id is not stored.
                job = SweepJob(
                    id=slurm.sbatch(script),
                    name=batch.name,
                    nodes=batch.nodes,
                    submitted=utc_now(),
                    points=tuple(point.id for point in batch.points),
                )
                jobs.append(job)
                write_job(script.with_suffix(".json"), job)
    except (UserError, KeyboardInterrupt) as error:
        message = _cancel_submitted(jobs, slurm)
        if isinstance(error, SlurmTimeoutError):
            # sbatch may have sent its request before it was killed.
            message += ", unless squeue --me shows a new job, which scancel ends"
        if not jobs:
            shutil.rmtree(jobs_folder, ignore_errors=True)
        if isinstance(error, UserError):
            raise UserError(f"{message}: {error}") from error
        click.echo(format_error(f"interrupted: {message}"), err=True)
        raise
    return jobs


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Raise the ``KeyboardInterrupt`` of a Ctrl-C in the ``with`` block only at its end."""
    interrupts = []
    handler = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        raise KeyboardInterrupt


def _cancel_submitted(jobs: Sequence[SweepJob], slurm: Slurm) -> str:
    """Cancel the jobs of a failed submission, and return a message for the user.

    The message states that no job was submitted, that the jobs were cancelled, or that Slurm could
    not cancel them.
    """
    if not jobs:
        return "nothing was submitted"
    ids = [job.id for job in jobs]
    try:
        slurm.scancel(ids)
    except SlurmError as error:
        return f"jobs {' '.join(ids)} are submitted and could not be cancelled ({error})"
    return f"nothing is left submitted: jobs {' '.join(ids)} were cancelled"


def resume(folder: Path, slurm: Slurm = SLURM) -> int:
    """Submit the points (runs) of a sweep that are not complete, print the new jobs, and return 0.

    Raises ``UserError`` if all points are complete, if jobs of the sweep wait or run, or if Slurm
    does not answer.
    """
    folder = folder.absolute()
    sweep = load_sweep(folder)
    # Before squeue: the job of a later submission is then in the queue.
    number = len({file.parent for file in (folder / "jobs").glob("*/*.json")})
    status = get_status(folder, slurm)
    if status.problem:
        raise SlurmError(f"the jobs of {folder} may still wait or run: {status.problem}")
    alive = [job.id for job in status.jobs if job.is_alive]
    if alive:
        hint = f"wait until they end, or type parbench slurm cancel {quote(str(folder))}"
        raise UserError(f"jobs of {folder} still wait or run ({', '.join(alive)}): {hint}")
    complete = {point.id for point in status.points if point.is_complete}
    missing = [point for point in sweep.points if point.id not in complete]
    if not missing:
        points = pluralize(len(sweep.points), "point")
        raise UserError(f"nothing of {folder} is missing: its {points} are complete")
    for job in submit_points(sweep, folder, missing, slurm, number):
        points = f"{len(job.points)} of {len(sweep.points)} points"
        click.echo(f"job {job.id}: {points}, on {pluralize(job.nodes, 'node')}")
    click.echo(f"next: parbench slurm status {quote(str(folder))}")
    return 0


def cancel(folder: Path, slurm: Slurm = SLURM) -> int:
    """Cancel the waiting and running jobs of the sweep in ``folder``, print them, and return 0.

    Runs and their records stay in the folder. Raises ``SlurmError`` if Slurm does not answer.
    """
    load_sweep(folder)
    alive = {job.id for job in slurm.queue()}
    ids = [job.id for job in load_jobs(folder) if job.id in alive]
    slurm.scancel(ids)
    for job_id in ids:
        click.echo(f"job {job_id}: cancelled")
    if not ids:
        click.echo("no job of this sweep waits or runs")
    return 0
