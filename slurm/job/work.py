"""The work of a job: it measures one point after another until its time ends."""

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from parbench.bench.files import replace_file
from parbench.bench.launch.processes import convert_sigterm_to_interrupt, describe_exit
from parbench.bench.results.records import Record, encode_record, read_records
from parbench.bench.results.runs import utc_now
from parbench.bench.text import UserError
from parbench.slurm.job.child import Child, Command, PointRequest, build_command
from parbench.slurm.job.nodes import NodeMonitor
from parbench.slurm.sweep.folder import (
    JobAttempt,
    Point,
    Sweep,
    load_sweep,
    write_attempt,
)
from parbench.slurm.sweep.progress import ABANDONED, SweepProgress, read_progress
from parbench.slurm.sweep.status import compute_exit_code
from parbench.slurm.system import MARGIN_SECONDS, SLURM, Slurm, SlurmError, get_end_time

_RECORDS_INTERVAL_SECONDS = 1.0  # between two reads of a run's records
_SLURM_INTERVAL_SECONDS = 10.0  # between two questions to Slurm about nodes and the job's end
_READ_ATTEMPTS = 3  # to read a run, because network file systems have temporary errors
_KILL_DELAY_SECONDS = 6.0  # from SIGTERM to SIGKILL of a child
_INTERRUPTED_KILL_DELAY_SECONDS = 1.5
"""The seconds from SIGTERM to SIGKILL of a child if Slurm ends the job.

A cluster may kill a job two seconds after SIGTERM (KillWait).
"""


def work(
    folder: Path,
    *,
    array: bool = False,
    slurm: Slurm = SLURM,
    command: Command = build_command,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Measure the points of a sweep that are not complete, one after another, in this Slurm job.

    A point is one run of the sweep. Returns the exit code for these points: 0 if all are complete
    without a failure, 1 if a result is wrong, and 4 if a measurement failed or is missing.

    Args:
        folder: the folder of the sweep.
        array: True if the job is a task of a job array. It then measures one point only: the point
            whose index in the sweep is ``SLURM_ARRAY_TASK_ID``.
        slurm: the programs of Slurm.
        command: a function that returns the command line of the process that measures a point.
        environ: the environment variables, in which Slurm describes the job.
    """
    folder = folder.absolute()
    sweep = load_sweep(folder)
    points: Sequence[Point] = sweep.points
    if array:
        points = (get_task_point(sweep, environ.get("SLURM_ARRAY_TASK_ID", "")),)
    worker = Worker(folder, sweep, slurm, command, environ)
    # Slurm ends a job with SIGTERM.
    with suppress(KeyboardInterrupt), convert_sigterm_to_interrupt():
        worker.measure_points(points)
    return compute_exit_code(read_progress(folder, point.id) for point in points)


def get_task_point(sweep: Sweep, task: str) -> Point:
    """Return the point (run of the sweep) that a task of a job array measures.

    ``task`` is the value of ``SLURM_ARRAY_TASK_ID``, the index of the point in ``sweep.points``.
    Raises ``UserError`` if no point has this index.
    """
    if not task.isdecimal() or int(task) >= len(sweep.points):
        allowed = f"0 to {len(sweep.points) - 1}"
        raise UserError(f"SLURM_ARRAY_TASK_ID={task!r} is not a point of the sweep: {allowed}")
    return sweep.points[int(task)]


class Worker:
    """The part of a Slurm job that measures points (runs of a sweep), one after another."""

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        slurm: Slurm,
        command: Command,
        environ: Mapping[str, str],
    ) -> None:
        """Find the id and the nodes of the job in the environment variables ``environ``.

        Args:
            folder: the folder of the sweep.
            sweep: the submitted sweep.
            slurm: the programs of Slurm.
            command: a function that returns the command line of the process that measures a point.
            environ: the environment variables of this process.
        """
        self._folder = folder
        self._sweep = sweep
        self._slurm = slurm
        self._command = command
        self._job = environ.get("SLURM_JOB_ID", "")
        self._nodes = NodeMonitor(slurm, environ)
        self._is_out_of_time = False
        self._num_measured = 0

    def measure_points(self, points: Sequence[Point]) -> None:
        """Measure each point (run of the sweep) that is not complete in a child process.

        A point that cannot be measured now is reported and skipped. If the job's time was too short
        for a point, the job is requeued at the end. It is not requeued if it measured nothing or if
        the sweep file has ``requeue = false``. Raises ``KeyboardInterrupt`` if Slurm ends the job.
        """
        for point in points:
            progress = self._read_progress(point)
            if progress.is_complete:
                continue
            obstacle = progress.problem or self._find_obstacle(point, progress)
            if obstacle:
                self._report(point, reason=obstacle)
            else:
                self._measure(point, progress)
        if self._is_out_of_time and self._sweep.file.slurm.requeue and self._num_measured:
            try:
                self._slurm.requeue(self._job)
            except SlurmError as error:
                click.echo(f"job {self._job} is not requeued: {error}")

    def _read_progress(self, point: Point) -> SweepProgress:
        """Return the measurements of a point (run) so far, read from the folder of its run.

        A reading error is retried, because it may be temporary on a network file system. If the
        third attempt fails too, the result has the error as ``problem``, and no measurements.
        """
        for _ in range(_READ_ATTEMPTS):
            progress = read_progress(self._folder, point.id)
            if not progress.problem:
                break
            time.sleep(_RECORDS_INTERVAL_SECONDS)
        return progress

    def _find_obstacle(self, point: Point, progress: SweepProgress) -> str:
        """Return the reason why a point (run) cannot be measured now, empty if it can be measured.

        The reason is a dead node, too few nodes, or too little time until the end of the job. The
        time that the point still needs follows from ``progress``, its measurements so far.
        """
        self._nodes.update()
        dead = self._nodes.describe()
        num_alive = len(self._nodes.list_alive())
        if dead and self._sweep.file.slurm.on_dead_node == "fail":
            return f'{dead}, and on_dead_node = "fail" ends the job'
        if dead and point.nodes > num_alive:
            return f"needs {point.nodes} nodes, {num_alive} are left: {dead}"
        missing_share = 1.0
        if progress.planned:
            missing_share -= progress.measured / progress.planned
        needed_seconds = point.seconds * missing_share + MARGIN_SECONDS
        remaining_seconds = self._get_end() - time.time()
        if needed_seconds > remaining_seconds:
            self._is_out_of_time = True
            remaining = f"{max(remaining_seconds, 0):.0f} s are left"
            return f"postponed: needs about {needed_seconds:.0f} s, {remaining}"
        return ""

    def _get_end(self) -> float:
        """Return the time at which Slurm ends the job, in seconds since the epoch.

        The result is infinity without a time limit, outside of a job, or if Slurm does not answer.
        ``scontrol`` runs at each call, because an administrator may change the limit.
        """
        facts: tuple[Mapping[str, str], ...] = ()
        with suppress(SlurmError):
            facts = self._slurm.show_job(self._job) if self._job else ()
        return get_end_time(facts[0]) if facts else math.inf

    def _measure(self, point: Point, progress: SweepProgress) -> None:
        """Measure a point (run of the sweep) in a child process, and report the result.

        The child is stopped if the job's time ends or a node dies. A run in which a node died is
        moved away (``abandon_run``), so that it is not resumed. ``progress`` is the progress of the
        point before the child starts. If it has a run, the child resumes this run.
        """
        nodes = self._nodes.list_alive()[: point.nodes]
        self._report(point, nodes=nodes, is_running=True)
        request = PointRequest(
            folder=self._folder, sweep=self._sweep, point=point, nodes=nodes, run=progress.run
        )
        child = Child(request, self._command)
        try:
            reason = self._watch(point, child, nodes, progress)
        except KeyboardInterrupt:
            # The attempt stays as running, and the status shows how Slurm ended the job.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child.end(_INTERRUPTED_KILL_DELAY_SECONDS)
            remove_failures(read_progress(self._folder, point.id), progress)
            raise
        finally:
            child.end(_KILL_DELAY_SECONDS)
        latest = self._read_progress(point)
        self._num_measured += latest.measured - progress.measured
        failures = list_new_failures(latest, progress)
        has_dead_node = not self._nodes.update(failures).isdisjoint(nodes)
        if has_dead_node and (failures or not latest.is_complete):
            reason = f"{self._nodes.describe()}: {latest.not_done_reason or reason}"
            abandon_run(latest)
        elif not latest.is_complete:
            reason = reason or describe_end(latest, child)
        self._report(point, reason=reason, nodes=nodes)

    def _watch(
        self, point: Point, child: Child, nodes: Sequence[str], earlier: SweepProgress
    ) -> str:
        """Wait until the child ends or must be stopped, and return the reason to stop it.

        The reason is a text about the job's time or a dead node, empty if the child has ended by
        itself. ``nodes`` are the names of the nodes on which the child's ranks run, and ``earlier``
        is the progress of the point before the child started. The caller stops the child.
        """
        end_seconds = self._get_end()
        records_time = slurm_time = time.monotonic()
        num_failures = 0
        while child.exit_code is None:
            if time.time() > end_seconds - MARGIN_SECONDS:
                self._is_out_of_time = True
                return "the job's time ended"
            now = time.monotonic()
            if now > records_time + _RECORDS_INTERVAL_SECONDS:
                records_time = now
                failures = list_new_failures(read_progress(self._folder, point.id), earlier)
                has_new_failure = len(failures) > num_failures
                if has_new_failure or now > slurm_time + _SLURM_INTERVAL_SECONDS:
                    slurm_time = now
                    num_failures = len(failures)
                    end_seconds = self._get_end()
                    if not self._nodes.update(failures).isdisjoint(nodes):
                        return "a node is dead"
            time.sleep(0.1)
        return ""

    def _report(
        self,
        point: Point,
        *,
        reason: str = "",
        nodes: Sequence[str] = (),
        is_running: bool = False,
    ) -> None:
        """Print the state of a point (run), and write it to ``attempts/<id>.json`` of the sweep.

        Args:
            point: the point.
            reason: the reason why the point is not complete, empty if it is complete or running.
            nodes: the names of the nodes of the point's run, empty if the run did not begin.
            is_running: True at the start of the run.
        """
        state = "started" if is_running else reason or "measured"
        click.echo(f"{utc_now()} {point.id} ({point.label}) {state}", nl=True)
        attempt = JobAttempt(
            job=self._job, nodes=tuple(nodes), reason=reason, is_running=is_running
        )
        with suppress(OSError):  # It only explains the state of the point.
            write_attempt(self._folder, point.id, attempt)


def describe_end(progress: SweepProgress, child: Child) -> str:
    """Return a text about a child process that ended before all measurements were made.

    The text has the number of missing measurements or the first failure, the child's exit code, and
    the last line of its log. ``progress`` is the progress of the child's run.
    """
    exit_text = describe_exit(child.exit_code or 0).removeprefix("ended by ")
    text = f"{progress.not_done_reason or 'the run did not begin'}, the run ended with {exit_text}"
    return f"{text}: {child.read_last_message()}".removesuffix(": ")


def list_new_failures(progress: SweepProgress, earlier: SweepProgress) -> list[Record]:
    """Return the failed records of a run that were not there in its ``earlier`` progress."""
    return [record for record in progress.failures if record not in earlier.failures]


def remove_failures(progress: SweepProgress, earlier: SweepProgress) -> None:
    """Remove the new failed records from a run, because the end of the job may have caused them.

    A failed record is new if it is in ``progress``, the progress of the run now, and not in
    ``earlier``, its progress before this job continued it. The file ``records.jsonl`` of the run is
    replaced.
    """
    failures = list_new_failures(progress, earlier)
    if progress.run is not None and failures:
        file = progress.run / "records.jsonl"
        records = [record for record in read_records(file) if record not in failures]
        replace_file(file, b"".join(map(encode_record, records)))


def abandon_run(progress: SweepProgress) -> None:
    """Move the folder of a run to ``abandoned/`` next to it, so that the run is not resumed.

    A node died during the run. ``progress`` has the run. Nothing is moved if the run is None or if
    it cannot be read.
    """
    if progress.run is not None and not progress.problem:
        target = progress.run.parent / ABANDONED / progress.run.name
        target.parent.mkdir(exist_ok=True)
        progress.run.rename(target)
