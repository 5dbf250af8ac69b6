"""The work of a job: it measures one point of the sweep after another, until all are done or its time ends."""

import enum
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import click

from parbench.bench.results.runs import load_run, utc_now
from parbench.bench.text import UserError
from parbench.slurm.job import point_run
from parbench.slurm.job.point_run import Outcome
from parbench.slurm.job.state import SavedState, exit_code, read_states, write_state
from parbench.slurm.sweep.folder import Point, Sweep, load_sweep
from parbench.slurm.system import MARGIN_SECONDS, SLURM, Slurm, SlurmError, end_time, too_long

_RECORDS_INTERVAL_SECONDS = 1.0
_SLURM_INTERVAL_SECONDS = 10.0


class StopReason(enum.Enum):
    """Why a point's child was stopped, as a sentence for its state."""

    SIGNAL = "the job was told to stop"
    END_OF_JOB = "the job's time ended"
    DEAD_NODE = "a node is dead"


@dataclass(kw_only=True)
class StopSignal:
    """SIGTERM, which Slurm sends to end a job; it is forwarded to the child that measures."""

    received_at: str = ""
    child: point_run.Child | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received_at = self.received_at or utc_now()
        if (
            self.child is not None
        ):  # at once, because its ranks get the same signal and must not be blamed
            self.child.send_signal(signal.SIGTERM)


def work(
    folder: Path,
    *,
    array: bool = False,
    slurm: Slurm = SLURM,
    command: point_run.Command = point_run.parbench_run,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Measure the missing points of a sweep; in an array, only the point of this task.

    Returns 0 if all of it is measured, 1 if a result is wrong, 4 if anything is not measured.
    """
    folder = folder.absolute()
    sweep = load_sweep(folder)
    points = (task_point(sweep, environ.get("SLURM_ARRAY_TASK_ID", "")),) if array else sweep.points
    stop = StopSignal()
    with stop.handled():
        return _Worker(folder, sweep, slurm, stop, command, environ).work(points)


def task_point(sweep: Sweep, task: str) -> Point:
    """Return the point of an array's task; UserError if there is none of its number."""
    if not task.isdecimal() or int(task) >= len(sweep.points):
        raise UserError(
            f"SLURM_ARRAY_TASK_ID={task!r} is not one of the {len(sweep.points)} points, from 0"
        )
    return sweep.points[int(task)]


@dataclass
class _Worker:
    folder: Path
    sweep: Sweep
    slurm: Slurm
    stop: StopSignal
    command: point_run.Command
    environ: Mapping[str, str]
    out_of_time: bool = False
    num_measured: int = 0
    states: dict[str, SavedState] = field(init=False)

    def __post_init__(self) -> None:
        self.states = read_states(self.folder, self.sweep.points)
        self.nodes = point_run.DeadNodes(self.slurm, self.environ)
        self.job = self.environ.get("SLURM_JOB_ID")

    def work(self, points: Sequence[Point]) -> int:
        """Measure the points that are not final; requeue the job if its time was too short."""
        for point in points:
            state = self.states.get(point.id)
            if not self.stop.received_at and (state is None or not state.is_final):
                self._work_on(point)
        is_requeued = (
            self.out_of_time
            and not self.stop.received_at
            and self.sweep.requeue
            and self.num_measured
        )
        if is_requeued and self.job:
            try:
                self.slurm.requeue(self.job)
            except SlurmError as error:
                click.echo(f"job {self.job} is not requeued: {error}")
        return exit_code(self.states, points)

    def _work_on(self, point: Point) -> None:
        try:
            obstacle = self._find_obstacle(point)
            if obstacle is not None:
                self._save(point, obstacle)
            elif not self.stop.received_at:
                self._measure(point)
        except UserError as error:
            self._save(point, Outcome(state="failed", reason=str(error)))

    def _find_obstacle(self, point: Point) -> Outcome | None:
        """Return why a point cannot be measured now: nodes or time are missing."""
        self.nodes.look()
        dead, alive = self.nodes.words(), self.nodes.alive()
        if dead and self.sweep.on_dead_node == "fail":
            return Outcome(
                state="lost-node", reason=f'{dead}, and on_dead_node = "fail" ends the job'
            )
        if dead and point.nodes > len(alive):
            left = f"{len(alive)} {'is' if len(alive) == 1 else 'are'} left"
            return Outcome(state="lost-node", reason=f"needs {point.nodes} nodes; {dead}, {left}")
        if why := too_long(self._needed_seconds(point), self._end() - time.time()):
            self.out_of_time = True
            return Outcome(state="postponed", reason=why)
        return None

    def _needed_seconds(self, point: Point) -> float:
        """Return the estimate for the rest of a point, with a margin to stop it."""
        run = self._begun_run(point)
        measured, planned = point_run.progress(load_run(run)) if run else (0, 0)
        missing = 1 - measured / planned if planned else 1.0
        return point.seconds * missing + MARGIN_SECONDS

    def _begun_run(self, point: Point) -> Path | None:
        state = self.states.get(point.id)
        return point_run.begun_run(self.folder, point, state.lost_runs if state else ())

    def _end(self) -> float:
        """Return when the job ends; an administrator may have changed it."""
        facts: tuple[Mapping[str, str], ...] = ()
        with suppress(SlurmError):
            facts = self.slurm.show_job(self.job) if self.job else ()
        return end_time(facts[0] if facts else {}, self.environ)

    def _measure(self, point: Point) -> None:
        """Run the point's child to its end, or to that of the job or of one of its nodes, and save the outcome."""
        run = self._begun_run(point)
        nodes = self.nodes.alive()[: point.nodes]
        num_broken = len(point_run.broken_records(run))
        num_measured = point_run.progress(load_run(run))[0] if run else 0
        self._save(point, Outcome(state="started", run=run), nodes=nodes)
        start = time.monotonic()
        attempt = point_run.Attempt(
            folder=self.folder, sweep=self.sweep, point=point, nodes=nodes, run=run
        )
        child = point_run.Child(attempt, self.command)
        try:
            stop_reason = self._watch(point, child, nodes, num_broken)
        except UserError:
            child.send_signal(signal.SIGTERM)
            raise
        finally:
            # a cluster's KillWait may be as short as two seconds
            child.end(1.5 if self.stop.received_at else 6.0)
            self.stop.child = None
        outcome = self._judge(point, child, stop_reason, nodes, num_broken)
        self.num_measured += outcome.measured - num_measured
        self._save(point, outcome, nodes=outcome.hosts or nodes, seconds=time.monotonic() - start)
        if (
            self.stop.received_at
            and outcome.state == "interrupted"
            and self.nodes.look() & set(nodes)
        ):
            outcome = replace(
                outcome, reason=f"{self.nodes.words()}: {outcome.reason}"
            )  # if there is time for it
            self._save(point, outcome, nodes=outcome.hosts or nodes)

    def _watch(
        self, point: Point, child: point_run.Child, nodes: Sequence[str], num_broken: int
    ) -> StopReason | None:
        """Wait for the child; stop it at the job's end or for a dead node, and return why, or None.

        ``num_broken`` counts the run's records of hangs and failures from earlier attempts.
        """
        self.stop.child = child
        if self.stop.received_at:  # the signal came before the child did
            child.send_signal(signal.SIGTERM)
        end = self._end()
        last_records_read = last_slurm_query = time.monotonic()
        num_handled = num_broken
        while child.code is None:
            now = time.monotonic()
            if self.stop.received_at:
                return StopReason.SIGNAL
            if time.time() > end - MARGIN_SECONDS:
                self.out_of_time = True
                child.send_signal(signal.SIGTERM)
                return StopReason.END_OF_JOB
            if now > last_records_read + _RECORDS_INTERVAL_SECONDS:
                last_records_read = now
                broken = point_run.broken_records(self._begun_run(point))
                if len(broken) > num_handled or now > last_slurm_query + _SLURM_INTERVAL_SECONDS:
                    last_slurm_query = now
                    num_handled = len(broken)
                    end = self._end()
                    if self.nodes.look(broken[num_broken:]) & set(nodes):
                        child.send_signal(signal.SIGTERM)
                        return StopReason.DEAD_NODE
            time.sleep(0.1)
        return None

    def _judge(
        self,
        point: Point,
        child: point_run.Child,
        stop_reason: StopReason | None,
        nodes: Sequence[str],
        num_broken: int,
    ) -> Outcome:
        """Return the outcome of the attempt; a dead node or the job's end excuses what is not done."""
        run = self._begun_run(point)
        if self.stop.received_at and run is not None:
            point_run.forget_broken(run, self.stop.received_at)
        outcome = point_run.outcome_of(run, child.code, child.last_line())
        if outcome.state == "done":
            return outcome
        if stop_reason in (StopReason.SIGNAL, StopReason.END_OF_JOB) or self.stop.received_at:
            if outcome.state != "interrupted":
                return outcome
            return replace(outcome, reason=(stop_reason or StopReason.SIGNAL).value)
        if self.nodes.look(point_run.broken_records(run)[num_broken:]) & set(nodes):
            return replace(
                outcome, state="lost-node", reason=f"{self.nodes.words()}: {outcome.reason}"
            )
        return outcome

    def _save(
        self, point: Point, outcome: Outcome, *, nodes: Sequence[str] = (), seconds: float = 0.0
    ) -> None:
        """Save and print the state of a point; ``seconds`` are added to those of earlier attempts."""
        previous = self.states.get(point.id)
        run = point_run.relative(self.folder, outcome.run)
        lost_runs = previous.lost_runs if previous else ()
        if outcome.state == "lost-node" and run:
            lost_runs = (*lost_runs, run)
        state = SavedState(
            state=outcome.state,
            job=self.job or "none",
            time=utc_now(),
            run=run,
            reason=outcome.reason,
            nodes=tuple(nodes),
            seconds=round(seconds + (previous.seconds if previous else 0.0), 3),
            has_wrong_results=outcome.has_wrong_results,
            lost_runs=lost_runs,
        )
        self.states[point.id] = state
        write_state(self.folder, point.id, state)
        message = f"{outcome.state} on {','.join(nodes)}" if nodes else outcome.state
        click.echo(
            f"{state.time} {point.id} ({point.label}) {message}{': ' * bool(state.reason)}{state.reason}"
        )
