"""One point measured: a child ``parbench run`` in the allocation, and what its run folder says came of it."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.files import replace_file
from parbench.bench.launch.driver import list_pending
from parbench.bench.launch.processes import PARBENCH, describe_exit, die_with_parent
from parbench.bench.results.records import Record, encode_record, read_records
from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError, format_list, get_last_line, strip_domain
from parbench.slurm.job.state import State
from parbench.slurm.sweep.folder import Point, Sweep, plan_path, runs_path
from parbench.slurm.system import Slurm, SlurmError


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a child is to measure: a point, on these nodes, going on with a run if one was begun."""

    folder: Path
    sweep: Sweep
    point: Point
    nodes: tuple[str, ...]
    run: Path | None


Command = Callable[[Attempt], list[str]]
"""Says how to start the child of an attempt."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an attempt and its hosts; ``measured`` counts cases times repetitions that have a record."""

    state: State
    reason: str = ""
    run: Path | None = None
    hosts: tuple[str, ...] = ()
    measured: int = 0
    has_wrong_results: bool = False


def parbench_run(attempt: Attempt) -> list[str]:
    """Return ``parbench run`` of a point, or its ``--resume``; ``--json``, for no node is to wait for a report."""
    words = [*PARBENCH, "run", "--json"]
    if attempt.nodes:
        words += ["--nodelist", ",".join(attempt.nodes)]
    if attempt.run is not None:
        return [*words, "--resume", str(attempt.run)]
    point = attempt.point
    words += [
        "--launcher",
        "srun",
        "--nodes",
        str(point.nodes),
        "--ntasks-per-node",
        str(point.ntasks_per_node),
    ]
    words += [
        "--distribution",
        point.distribution,
        "--plan",
        str(plan_path(attempt.folder, point.id)),
    ]
    words += ["--out", str(runs_path(attempt.folder, point.id))]
    if attempt.sweep.link is not None:
        words += ["--link", attempt.sweep.link]
    return words


class Child:
    """A child that measures a point, in a process group of its own; its messages go to ``logs/<point>.log``."""

    def __init__(self, attempt: Attempt, command: Command) -> None:
        self._log = attempt.folder / "logs" / f"{attempt.point.id}.log"
        options = (
            {"PARBENCH_SRUN_OPTIONS": "\n".join(attempt.sweep.srun_options)}
            if attempt.sweep.srun_options
            else {}
        )
        with self._log.open("ab") as log:
            self._first = log.tell()
            self._process = subprocess.Popen(
                command(attempt),
                env={**os.environ, **options, **attempt.point.variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # its records are in the run's folder
                stderr=log,
                process_group=0,
                preexec_fn=lambda: die_with_parent(
                    signal.SIGTERM
                ),  # before Slurm kills ranks under its eyes
            )

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group; SIGTERM makes it stop and keep what is done."""
        if self.code is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, number)

    def end(self, patience_seconds: float) -> None:
        """Wait for the end, and kill the process group after some time."""
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self._process.wait()

    def last_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 4096, self._first))
            return get_last_line(log.read().decode(errors="replace"))


def begun_run(folder: Path, point: Point, spoilt: Collection[str]) -> Path | None:
    """Return the newest run begun for a point, None without; ``spoilt`` are folders not to go on with."""
    runs = [path.parent for path in runs_path(folder, point.id).glob("*/records.jsonl")]
    whole = [
        run for run in runs if (run / "run.json").exists() and relative(folder, run) not in spoilt
    ]
    return max(whole, default=None, key=lambda run: run.name)


def relative(folder: Path, run: Path | None) -> str:
    """Return a run's folder relative to the sweep's, empty for None."""
    return "" if run is None else str(run.relative_to(folder))


def progress(run: Run) -> tuple[int, int]:
    """Return how many of a run's planned measurements have a record, and how many are planned."""
    planned = len(run.info.plan.cases) * run.info.plan.repetitions
    return planned - len(list_pending(run)), planned


def outcome_of(run: Path | None, code: int | None, message: str) -> Outcome:
    """Return the outcome of an attempt from its run folder, its exit code and its last message.

    As in ``parbench run``, what the plan or the budget left out is not bad; bad input is not tried again.
    """
    not_done: State = "failed" if code == 2 else "interrupted"
    how = "no exit code" if code is None else describe_exit(code).removeprefix("ended by ")
    ended = f"the run ended with {how}"
    if run is None:
        return Outcome(state=not_done, reason=message or f"{ended} before it began")
    try:
        loaded = load_run(run)
    except UserError as error:
        return Outcome(state="failed", reason=str(error), run=run)
    measured, planned = progress(loaded)
    state: State = "done"
    reasons: list[str] = []
    by_status = {
        status: [record for record in loaded.records if record.status == status]
        for status in ("wrong", "hang", "failed")
    }
    for status, bad in by_status.items():
        if bad and not reasons:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            state = "failed"
            reasons.append(f"{status}: {bad[0].case.label}: {bad[0].reason}{more}")
    if measured < planned:
        state = not_done
        missing = f"{planned - measured} of {planned} measurements are missing, {ended}"
        reasons.append(f"{missing}: {message}" if message and message != str(run) else missing)
    hosts = (loaded.info.environment or {}).get("hosts")
    return Outcome(
        state=state,
        reason="; ".join(reasons),
        run=run,
        hosts=tuple(dict.fromkeys(map(str, hosts))) if isinstance(hosts, list) else (),
        measured=measured,
        has_wrong_results=bool(by_status["wrong"]),
    )


def broken_records(run: Path | None) -> tuple[Record, ...]:
    """Return the records so far of a running run that tell of a hang or a failure."""
    if run is None or not (run / "records.jsonl").exists():
        return ()
    return tuple(
        record
        for record in read_records(run / "records.jsonl")
        if record.status in ("hang", "failed")
    )


def forget_broken(run: Path, since: str) -> None:
    """Take out the records of cases that failed or hung after a time: the job's end, not their own fault, broke them.

    ``since`` is UTC as records have it. The run's driver must have ended.
    """
    records = list(read_records(run / "records.jsonl"))
    kept = [
        record
        for record in records
        if record.status not in ("hang", "failed") or record.started < since
    ]
    if len(kept) < len(records):
        replace_file(run / "records.jsonl", b"".join(map(encode_record, kept)))


def is_down(state: str) -> bool:
    """Say whether a node in a state of sinfo, such as ``down*``, is dead; ``*``: it does not answer."""
    return state.endswith("*") or state.rstrip("~#!%$@^-+").lower() in ("down", "error", "unknown")


class DeadNodes:
    """The nodes of this job and what is known of their death; once dead, a node stays so for the job."""

    def __init__(self, slurm: Slurm, environ: Mapping[str, str], host: str | None = None) -> None:
        self._slurm = slurm
        self._here = strip_domain(host or socket.gethostname())
        self._job = environ.get("SLURM_JOB_ID", "")
        self._dead: dict[str, str] = {}
        self._all: tuple[str, ...] = ()
        with suppress(SlurmError):
            self._all = slurm.host_names(environ.get("SLURM_JOB_NODELIST", ""))

    def look(self, records: Iterable[Record] = ()) -> set[str]:
        """Ask Slurm, and a run's new records, which nodes are dead; return all that are.

        This process's own host is not silent, whatever its ranks are.
        """
        silent: set[str] = set()
        for record in records:
            if record.status == "hang":
                answering = {rank.host for rank in record.ranks if not rank.is_silent}
                silent |= {
                    strip_domain(rank.host)
                    for rank in record.ranks
                    if answering and rank.host not in answering
                }
        states: Mapping[str, str] = {}
        with suppress(SlurmError):
            states = self._slurm.node_states(self._all) if self._all else {}
        kept = self._kept()
        for node in self._all:
            if is_down(states.get(node, "")) or node not in kept:
                self._dead.setdefault(node, "down")
            elif strip_domain(node) in silent - {self._here}:
                self._dead.setdefault(node, "silent")
        return set(self._dead)

    def _kept(self) -> tuple[str, ...]:
        """Return the nodes that the job has still: one that was down may be up again, but is the job's no more.

        A job that is ending gives its nodes back one by one, which says nothing of them.
        """
        with suppress(SlurmError):
            facts = self._slurm.show_job(self._job) if self._job else ()
            if facts and facts[0].get("JobState") == "RUNNING":
                return self._slurm.host_names(facts[0].get("NodeList", "")) or self._all
        return self._all

    def alive(self) -> tuple[str, ...]:
        """Return the nodes not known to be dead, in Slurm's order; empty outside of a job."""
        return tuple(node for node in self._all if node not in self._dead)

    def words(self) -> str:
        """Return which nodes are dead and how, as in ``n3 is down``; empty if none is."""
        told = []
        for how, one, several in (
            ("down", "is down", "are down"),
            ("silent", "gives no answer", "give no answer"),
        ):
            names = [node for node in self._dead if self._dead[node] == how]
            told += (
                [f"{format_list(names, 'and')} {several if len(names) > 1 else one}"]
                if names
                else []
            )
        return " and ".join(told)
