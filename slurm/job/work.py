"""What runs in a job: one point of the sweep after another, until all are done or the job's time is."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import click

from bench.results.runs import utc_now
from bench.text import UserError
from slurm.job.claims import Claims, is_gone, job_lives, this_owner
from slurm.job.ledger import Ledger, Standing, read_ledger, standings
from slurm.job.point_run import (
    Attempt,
    Child,
    Command,
    DeadNodes,
    Outcome,
    begun_run,
    broken_records,
    forget_broken,
    measured_count,
    missing_share,
    outcome_of,
    parbench_run,
    relative,
)
from slurm.sweep.folder import Point, Sweep, load_sweep
from slurm.system import MARGIN_SECONDS, Slurm, SlurmError, end_time, scale, too_long

_TICK_SECONDS = 0.1
_LOOK_EVERY_SECONDS = 1.0
_ASK_EVERY_SECONDS = 10.0
_KILL_PATIENCE_SECONDS = 1.5
"""A cluster's KillWait may be as short as two seconds."""
_STOP_PATIENCE_SECONDS = 6.0
_ENDS = ("the job was told to stop", "the job's time ended")


@dataclass(kw_only=True)
class Signals:
    """What Slurm told this process: its time will end soon (USR1), or it is to stop now (SIGTERM)."""

    warned: bool = False
    stopped_at: str = ""
    child: Child | None = field(default=None, repr=False)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear both signals within the block."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGUSR1, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.warned = True
            return
        self.stopped_at = self.stopped_at or utc_now()
        if self.child is not None:  # at once: its ranks have the same signal, and it is not to blame them
            self.child.terminate()


def work(
    folder: Path,
    *,
    point_id: str | None = None,
    array: bool = False,
    slurm: Slurm | None = None,
    command: Command = parbench_run,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Measure what is missing of a sweep, of one point if it is named or an array's task means it.

    Returns 0 if all of it is measured, 1 if a result is wrong, 4 if anything is not measured.
    """
    folder = folder.absolute()
    sweep = load_sweep(folder)
    points = choose_points(sweep, point_id, environ.get("SLURM_ARRAY_TASK_ID", "") if array else None)
    owner = this_owner(environ)
    slurm = slurm or Slurm()
    signals = Signals()
    with signals.heard(), Ledger(folder, owner.writer, owner.job) as ledger:
        claims = Claims(folder, owner, lambda other: is_gone(other, owner, lambda whose: job_lives(slurm, whose)))
        worker = Worker(folder, sweep, ledger, claims, slurm, signals, command, environ)
        return worker.work(points)


def choose_points(sweep: Sweep, point_id: str | None, task: str | None) -> tuple[Point, ...]:
    """Return the points that this process is to measure; ``UserError`` if there is none of the name or number."""
    if point_id is not None:
        found = tuple(point for point in sweep.points if point.id == point_id)
        if not found:
            raise UserError(f"the sweep has no point {point_id}: see parbench slurm status")
        return found
    if task is None:
        return sweep.points
    if not task.isdecimal() or int(task) >= len(sweep.points):
        raise UserError(f"SLURM_ARRAY_TASK_ID={task!r} is none of the sweep's {len(sweep.points)} points, from 0")
    return (sweep.points[int(task)],)


class Worker:
    """Works through points in one job."""

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        ledger: Ledger,
        claims: Claims,
        slurm: Slurm,
        signals: Signals,
        command: Command,
        environ: Mapping[str, str],
    ) -> None:
        self._folder, self._sweep, self._ledger, self._claims = folder, sweep, ledger, claims
        self._slurm, self._signals, self._command, self._environ = slurm, signals, command, environ
        self._nodes = DeadNodes(slurm, environ)
        self._out_of_time = False
        self._progress = 0

    def work(self, points: Sequence[Point]) -> int:
        """Measure the points that are neither final nor another's; requeue the job if its time was too short."""
        for point in points:
            if self._signals.stopped_at:
                break
            self._point(point)
        code = self._code(points)
        if self._out_of_time and not self._signals.stopped_at:
            self._requeue()
        return code

    def _code(self, points: Sequence[Point]) -> int:
        found = self._standings()
        states = [found[point.id].state if point.id in found else None for point in points]
        if any(point.id in found and found[point.id].last.reason.startswith("wrong: ") for point in points):
            return 1
        return 0 if all(state == "done" for state in states) else 4

    def _standings(self) -> Mapping[str, Standing]:
        return standings(read_ledger(self._folder))

    def _point(self, point: Point) -> None:
        if self._is_final(point):
            return
        holder = self._claims.take(point.id)
        if holder is not None:
            self._say(point, f"is measured by job {holder.job} on {holder.host}")
            return
        try:
            if self._is_final(point):  # its owner may have ended between the look and the claim
                return
            hindrance = self._hindrance(point)
            if hindrance is not None:
                self._write(point, hindrance)
            elif not self._signals.stopped_at:
                self._measure(point)
        except UserError as error:
            self._write(point, Outcome(state="failed", reason=str(error)))
        finally:
            self._claims.give_back(point.id)

    def _is_final(self, point: Point) -> bool:
        standing = self._standings().get(point.id)
        return standing is not None and standing.is_final

    def _hindrance(self, point: Point) -> Outcome | None:
        """Return why a point cannot be measured now: for want of nodes or of time."""
        self._nodes.look()
        dead, alive = self._nodes.words(), self._nodes.alive()
        if dead and self._sweep.on_dead_node == "fail":
            return Outcome(state="lost-node", reason=f'{dead}, and on_dead_node = "fail" ends the job')
        if dead and point.nodes > len(alive):
            left = f"{len(alive)} {'is' if len(alive) == 1 else 'are'} left"
            return Outcome(state="lost-node", reason=f"needs {point.nodes} nodes; {dead}, {left}")
        why = too_long(self._needed_seconds(point), self._end() - time.time())
        if why:
            self._out_of_time = True
            return Outcome(state="postponed", reason=why)
        return None

    def _needed_seconds(self, point: Point) -> float:
        """Return what the rest of a point will take: its estimate, as far as it held for the points that are done.

        A job that has measured nothing yet lets no point seem longer than estimated: none is put off for ever.
        """
        found = self._standings()
        expected = {one.id: one.seconds for one in self._sweep.points if one.id in found}
        factor = scale((found[name].seconds, expected[name]) for name in expected if found[name].state == "done")
        if not self._progress:
            factor = min(factor, 1.0)
        return point.seconds * missing_share(self._begun(point)) * factor + MARGIN_SECONDS

    def _begun(self, point: Point) -> Path | None:
        standing = self._standings().get(point.id)
        return begun_run(self._folder, point, standing.lost_runs if standing else ())

    def _end(self) -> float:
        """Return when the job ends; an administrator may have moved it since it was asked last."""
        job = self._environ.get("SLURM_JOB_ID")
        try:
            facts = self._slurm.show_job(job) if job else ()
        except SlurmError:
            facts = ()
        return end_time(facts[0] if facts else {}, self._environ)

    def _measure(self, point: Point) -> None:
        """Run the point's child to its end, or to that of the job or of one of its nodes, and write what came of it."""
        run = self._begun(point)
        nodes = self._nodes.alive()[: point.nodes]
        known, measured = len(broken_records(run)), measured_count(run)
        self._ledger.write(point.id, "started", run=relative(self._folder, run), nodes=nodes)
        self._say(point, f"{'goes on' if run else 'starts'} on {','.join(nodes) or 'this node'}")
        began = time.monotonic()
        child = Child(Attempt(folder=self._folder, sweep=self._sweep, point=point, nodes=nodes, run=run), self._command)
        why = self._watch(point, child, nodes, known)
        child.end(_KILL_PATIENCE_SECONDS if self._signals.stopped_at else _STOP_PATIENCE_SECONDS)
        self._signals.child = None
        outcome = self._judge(point, child, why, nodes, known)
        self._progress += outcome.measured - measured
        self._write(point, outcome, nodes=outcome.hosts or nodes, seconds=time.monotonic() - began)
        if self._signals.stopped_at and outcome.state == "interrupted" and self._nodes.look() & set(nodes):
            told = replace(outcome, reason=f"{self._nodes.words()}: {outcome.reason}")  # if there is time for it yet
            self._write(point, told, nodes=outcome.hosts or nodes)

    def _watch(self, point: Point, child: Child, nodes: Sequence[str], known: int) -> str:
        """Wait for the child's end; stop it for the job's end or a dead node, and return why, empty if it was not.

        ``known`` counts the run's records of hangs and failures from before.
        """
        self._signals.child = child
        if self._signals.stopped_at:  # the signal came before the child did
            child.terminate()
        end, asked, looked = self._end(), time.monotonic(), time.monotonic()
        while child.code is None:
            now = time.monotonic()
            if self._signals.stopped_at:
                return _ENDS[0]
            if self._signals.warned:
                self._signals.warned, end = False, self._end()
            if time.time() > end - MARGIN_SECONDS:
                self._out_of_time = True
                child.terminate()
                return _ENDS[1]
            if now > looked + _LOOK_EVERY_SECONDS:
                looked, broken = now, broken_records(self._begun(point))
                if len(broken) > known or now > asked + _ASK_EVERY_SECONDS:
                    asked = now
                    if self._nodes.look(broken[known:]) & set(nodes):
                        child.terminate()
                        return "a node is dead"
            time.sleep(_TICK_SECONDS)
        return ""

    def _judge(self, point: Point, child: Child, why: str, nodes: Sequence[str], known: int) -> Outcome:
        """Return what came of the attempt; a dead node or the job's end excuses what is not done."""
        run = self._begun(point)
        if self._signals.stopped_at and run is not None:
            forget_broken(run, self._signals.stopped_at)
        outcome = outcome_of(run, child.code, child.last_words())
        if outcome.state == "done":
            return outcome
        if why in _ENDS or self._signals.stopped_at:
            return replace(outcome, reason=why or _ENDS[0]) if outcome.state == "interrupted" else outcome
        if self._nodes.look(broken_records(run)[known:]) & set(nodes):
            return replace(outcome, state="lost-node", reason=f"{self._nodes.words()}: {outcome.reason}")
        return outcome

    def _requeue(self) -> None:
        """Put this job back into the queue, if the sweep allows it and this round has measured anything."""
        job = self._environ.get("SLURM_JOB_ID")
        if not (self._sweep.requeue and self._progress and job):
            return
        try:
            self._slurm.requeue(job)
        except SlurmError as error:
            click.echo(f"job {job} is not requeued: {error}")

    def _write(self, point: Point, outcome: Outcome, *, nodes: Sequence[str] = (), seconds: float = 0.0) -> None:
        run = relative(self._folder, outcome.run)
        self._ledger.write(point.id, outcome.state, run=run, reason=outcome.reason, nodes=nodes, seconds=seconds)
        self._say(point, f"{outcome.state}{f': {outcome.reason}' if outcome.reason else ''}")

    def _say(self, point: Point, words: str) -> None:
        click.echo(f"{utc_now()} {point.id} ({point.label}) {words}")
