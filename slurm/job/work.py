"""What runs in a job: one point of the sweep after another, until all are done or the job's time is."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import click

from parbench.bench.results.runs import load_run, utc_now
from parbench.bench.text import UserError
from parbench.slurm.job import point_run
from parbench.slurm.job.claims import Claims, is_gone, this_owner
from parbench.slurm.job.ledger import Ledger, Standing, read_ledger, standings
from parbench.slurm.job.point_run import Outcome
from parbench.slurm.sweep.folder import Point, Sweep, load_sweep
from parbench.slurm.system import MARGIN_SECONDS, SLURM, Slurm, SlurmError, end_time, scale, too_long

_LOOK_EVERY_SECONDS, _ASK_EVERY_SECONDS = 1.0, 10.0
_TOLD_TO_STOP, _TIME_ENDED = "the job was told to stop", "the job's time ended"


@dataclass(kw_only=True)
class Signals:
    """What Slurm told this process: its time will end soon (USR1), or it is to stop now (SIGTERM)."""

    warned: bool = False
    stopped_at: str = ""
    child: point_run.Child | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
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
            self.child.tell(signal.SIGTERM)


def work(
    folder: Path,
    *,
    point_id: str | None = None,
    array: bool = False,
    slurm: Slurm = SLURM,
    command: point_run.Command = point_run.parbench_run,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Measure what is missing of a sweep, of one point if it is named or an array's task means it.

    Returns 0 if all of it is measured, 1 if a result is wrong, 4 if anything is not measured.
    """
    folder = folder.absolute()
    sweep = load_sweep(folder)
    points = choose_points(sweep, point_id, environ.get("SLURM_ARRAY_TASK_ID", "") if array else None)
    owner, signals = this_owner(environ), Signals()
    with signals.heard(), Ledger(folder, owner.writer, owner.job) as ledger:
        claims = Claims(folder, owner, lambda other: is_gone(other, owner, slurm))
        return _Worker(folder, sweep, ledger, claims, slurm, signals, command, environ).work(points)


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


@dataclass
class _Worker:
    folder: Path
    sweep: Sweep
    ledger: Ledger
    claims: Claims
    slurm: Slurm
    signals: Signals
    command: point_run.Command
    environ: Mapping[str, str]
    out_of_time: bool = False
    progress: int = 0

    def __post_init__(self) -> None:
        self.nodes = point_run.DeadNodes(self.slurm, self.environ)
        self.job = self.environ.get("SLURM_JOB_ID")

    def work(self, points: Sequence[Point]) -> int:
        """Measure the points that are neither final nor another's; requeue the job if its time was too short."""
        for point in points:
            if not self.signals.stopped_at:
                self._point(point)
        standing = standings(read_ledger(self.folder))
        found = [standing.get(point.id) for point in points]
        if self.out_of_time and not self.signals.stopped_at and self.sweep.requeue and self.progress and self.job:
            try:
                self.slurm.requeue(self.job)
            except SlurmError as error:
                click.echo(f"job {self.job} is not requeued: {error}")
        if any(one is not None and one.last.reason.startswith("wrong: ") for one in found):
            return 1
        return 0 if all(one is not None and one.state == "done" for one in found) else 4

    def _standing(self, point: Point) -> Standing | None:
        return standings(read_ledger(self.folder)).get(point.id)

    def _is_final(self, point: Point) -> bool:
        standing = self._standing(point)
        return standing is not None and standing.is_final

    def _point(self, point: Point) -> None:
        if self._is_final(point):
            return
        if (holder := self.claims.take(point.id)) is not None:
            self._say(point, f"is measured by job {holder.job} on {holder.host}")
            return
        try:
            if self._is_final(point):  # its owner may have ended between the look and the claim
                return
            if hindrance := self._hindrance(point):
                self._write(point, hindrance)
            elif not self.signals.stopped_at:
                self._measure(point)
        except UserError as error:
            self._write(point, Outcome(state="failed", reason=str(error)))
        finally:
            self.claims.give_back(point.id)

    def _hindrance(self, point: Point) -> Outcome | None:
        """Return why a point cannot be measured now: for want of nodes or of time."""
        self.nodes.look()
        dead, alive = self.nodes.words(), self.nodes.alive()
        if dead and self.sweep.on_dead_node == "fail":
            return Outcome(state="lost-node", reason=f'{dead}, and on_dead_node = "fail" ends the job')
        if dead and point.nodes > len(alive):
            left = f"{len(alive)} {'is' if len(alive) == 1 else 'are'} left"
            return Outcome(state="lost-node", reason=f"needs {point.nodes} nodes; {dead}, {left}")
        if why := too_long(self._needed_seconds(point), self._end() - time.time()):
            self.out_of_time = True
            return Outcome(state="postponed", reason=why)
        return None

    def _needed_seconds(self, point: Point) -> float:
        """Return what the rest of a point will take: its estimate, as far as it held for the points that are done.

        A job that has measured nothing yet lets no point seem longer than estimated: none is put off for ever.
        """
        found = standings(read_ledger(self.folder))
        done = [one for one in self.sweep.points if one.id in found and found[one.id].state == "done"]
        factor = scale((found[one.id].seconds, one.seconds) for one in done)
        run = self._begun(point)
        measured, planned = point_run.progress(load_run(run)) if run else (0, 0)
        missing = 1 - measured / planned if planned else 1.0
        return point.seconds * missing * (factor if self.progress else min(factor, 1.0)) + MARGIN_SECONDS

    def _begun(self, point: Point) -> Path | None:
        standing = self._standing(point)
        return point_run.begun_run(self.folder, point, standing.lost_runs if standing else ())

    def _end(self) -> float:
        """Return when the job ends; an administrator may have moved it since it was asked last."""
        facts: tuple[Mapping[str, str], ...] = ()
        with suppress(SlurmError):
            facts = self.slurm.show_job(self.job) if self.job else ()
        return end_time(facts[0] if facts else {}, self.environ)

    def _measure(self, point: Point) -> None:
        """Run the point's child to its end, or to that of the job or of one of its nodes, and write what came of it."""
        run = self._begun(point)
        nodes = self.nodes.alive()[: point.nodes]
        known, measured = len(point_run.broken_records(run)), point_run.progress(load_run(run))[0] if run else 0
        self.ledger.write(point.id, "started", run=point_run.relative(self.folder, run), nodes=nodes)
        self._say(point, f"{'goes on' if run else 'starts'} on {','.join(nodes) or 'this node'}")
        began = time.monotonic()
        attempt = point_run.Attempt(folder=self.folder, sweep=self.sweep, point=point, nodes=nodes, run=run)
        child = point_run.Child(attempt, self.command)
        why = self._watch(point, child, nodes, known)
        child.end(1.5 if self.signals.stopped_at else 6.0)  # a cluster's KillWait may be as short as two seconds
        self.signals.child = None
        outcome = self._judge(point, child, why, nodes, known)
        self.progress += outcome.measured - measured
        self._write(point, outcome, nodes=outcome.hosts or nodes, seconds=time.monotonic() - began)
        if self.signals.stopped_at and outcome.state == "interrupted" and self.nodes.look() & set(nodes):
            told = replace(outcome, reason=f"{self.nodes.words()}: {outcome.reason}")  # if there is time for it yet
            self._write(point, told, nodes=outcome.hosts or nodes)

    def _watch(self, point: Point, child: point_run.Child, nodes: Sequence[str], known: int) -> str:
        """Wait for the child's end; stop it for the job's end or a dead node, and return why, empty if it was not.

        ``known`` counts the run's records of hangs and failures from before.
        """
        self.signals.child = child
        if self.signals.stopped_at:  # the signal came before the child did
            child.tell(signal.SIGTERM)
        end, asked, looked = self._end(), time.monotonic(), time.monotonic()
        while child.code is None:
            now = time.monotonic()
            if self.signals.stopped_at:
                return _TOLD_TO_STOP
            if self.signals.warned:
                self.signals.warned, end = False, self._end()
            if time.time() > end - MARGIN_SECONDS:
                self.out_of_time = True
                child.tell(signal.SIGTERM)
                return _TIME_ENDED
            if now > looked + _LOOK_EVERY_SECONDS:
                looked, broken = now, point_run.broken_records(self._begun(point))
                if len(broken) > known or now > asked + _ASK_EVERY_SECONDS:
                    asked = now
                    if self.nodes.look(broken[known:]) & set(nodes):
                        child.tell(signal.SIGTERM)
                        return "a node is dead"
            time.sleep(0.1)
        return ""

    def _judge(self, point: Point, child: point_run.Child, why: str, nodes: Sequence[str], known: int) -> Outcome:
        """Return what came of the attempt; a dead node or the job's end excuses what is not done."""
        run = self._begun(point)
        if self.signals.stopped_at and run is not None:
            point_run.forget_broken(run, self.signals.stopped_at)
        outcome = point_run.outcome_of(run, child.code, child.last_words())
        if outcome.state == "done":
            return outcome
        if why in (_TOLD_TO_STOP, _TIME_ENDED) or self.signals.stopped_at:
            return replace(outcome, reason=why or _TOLD_TO_STOP) if outcome.state == "interrupted" else outcome
        if self.nodes.look(point_run.broken_records(run)[known:]) & set(nodes):
            return replace(outcome, state="lost-node", reason=f"{self.nodes.words()}: {outcome.reason}")
        return outcome

    def _write(self, point: Point, outcome: Outcome, *, nodes: Sequence[str] = (), seconds: float = 0.0) -> None:
        run = point_run.relative(self.folder, outcome.run)
        self.ledger.write(point.id, outcome.state, run=run, reason=outcome.reason, nodes=nodes, seconds=seconds)
        self._say(point, f"{outcome.state}{f': {outcome.reason}' if outcome.reason else ''}")

    def _say(self, point: Point, words: str) -> None:
        click.echo(f"{utc_now()} {point.id} ({point.label}) {words}")
