"""One point measured: a child ``parbench run`` in the allocation, and what its run folder says came of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.launch.driver import remaining
from bench.launch.processes import die_with_parent
from bench.results.records import Record, encode, read_records
from bench.results.runs import Run, load_run
from bench.text import UserError
from slurm.job.ledger import State
from slurm.sweep.folder import Point, Sweep, plan_path, runs_path
from slurm.system import Slurm, SlurmError

_NO_ANSWER = "no answer"  # bench.launch.monitor says so of a rank that is silent when its driver asks where it is
_BAD_INPUT = 2
_LOG_TAIL_BYTES = 4096


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
    """What came of an attempt; ``silent`` names the hosts that gave no answer when a case hung.

    ``measured`` and ``planned`` count cases times launches.
    """

    state: State
    reason: str = ""
    run: Path | None = None
    hosts: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    measured: int = 0
    planned: int = 0


def parbench_run(attempt: Attempt) -> list[str]:
    """Return ``parbench run`` of a point, or its ``--resume``; ``--json``, for no node is to wait for a report."""
    words = [sys.executable, "-P", "-m", "parbench", "run", "--json"]
    if attempt.nodes:
        words += ["--nodelist", ",".join(attempt.nodes)]
    if attempt.run is not None:
        return [*words, "--resume", str(attempt.run)]
    point = attempt.point
    words += ["--launcher", "srun", "--nodes", str(point.nodes), "--ntasks-per-node", str(point.ntasks_per_node)]
    words += ["--placement", point.placement, "--plan", str(plan_path(attempt.folder, point.id))]
    words += ["--out", str(runs_path(attempt.folder, point.id))]
    if attempt.sweep.link is not None:
        words += ["--link", attempt.sweep.link]
    return words


class Child:
    """A child that measures a point, in a process group of its own; its words go to ``logs/<point>.log``."""

    def __init__(self, attempt: Attempt, command: Command) -> None:
        self._log = attempt.folder / "logs" / f"{attempt.point.id}.log"
        options = {"PARBENCH_SRUN_OPTIONS": "\n".join(attempt.sweep.srun_options)} if attempt.sweep.srun_options else {}
        with self._log.open("ab") as log:
            self._first = log.tell()
            self._process = subprocess.Popen(
                command(attempt),
                env={**os.environ, **options, **attempt.point.variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # its records are in the run's folder
                stderr=log,
                process_group=0,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # before Slurm kills ranks under its eyes
            )

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to stop and keep what is done."""
        self._signal(signal.SIGTERM)

    def end(self, patience_seconds: float) -> None:
        """Wait so long for its end, then kill it."""
        deadline = time.monotonic() + patience_seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.code is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.code is None:
            os.killpg(self._process.pid, number)

    def last_words(self) -> str:
        """Return the last line it wrote on standard error."""
        with self._log.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, self._first))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def begun_run(folder: Path, point: Point, spoilt: Collection[str]) -> Path | None:
    """Return the newest run begun for a point, None without; ``spoilt`` are folders not to go on with."""
    runs = [path.parent for path in runs_path(folder, point.id).glob("*/records.jsonl")]
    whole = [run for run in runs if (run / "run.json").exists() and relative(folder, run) not in spoilt]
    return max(whole, default=None, key=lambda run: run.name)


def relative(folder: Path, run: Path | None) -> str:
    """Return a run's folder as the ledger names it, empty for None."""
    return "" if run is None else str(run.relative_to(folder))


def missing_share(run: Path | None) -> float:
    """Return which share of a begun run has no record yet, 1 of a run that is not begun."""
    if run is None:
        return 1.0
    loaded = load_run(run)
    planned = _planned(loaded)
    return len(remaining(loaded)) / planned if planned else 1.0


def measured_count(run: Path | None) -> int:
    """Return how many of a run's planned measurements have a record."""
    if run is None:
        return 0
    loaded = load_run(run)
    return _planned(loaded) - len(remaining(loaded))


def outcome_of(run: Path | None, code: int | None, words: str) -> Outcome:
    """Return what came of an attempt from its run's folder, its exit code and its last words.

    As in ``parbench run``, what the plan or the budget left out is not bad.
    """
    if run is None:
        ended = f"the run ended with {_code(code)} before it began{f': {words}' if words else ''}"
        return Outcome(state="failed" if code == _BAD_INPUT else "interrupted", reason=words or ended)
    try:
        loaded = load_run(run)
    except UserError as error:
        return Outcome(state="failed", reason=str(error), run=run)
    missing, planned = len(remaining(loaded)), _planned(loaded)
    state, reason = _verdict(loaded.records)
    if missing:
        left = f"{missing} of {planned} measurements are missing, the run ended with {_code(code)}"
        told = [*([reason] if reason else []), f"{left}: {words}" if words and words != str(run) else left]
        state, reason = "failed" if code == _BAD_INPUT else "interrupted", "; ".join(told)
    return Outcome(
        state=state,
        reason=reason,
        run=run,
        hosts=_hosts(loaded),
        silent=silent_hosts(loaded.records),
        measured=planned - missing,
        planned=planned,
    )


def _planned(run: Run) -> int:
    return len(run.info.plan.cases) * run.info.plan.launches


def _verdict(records: Sequence[Record]) -> tuple[State, str]:
    for status in ("wrong", "hang", "failed"):
        bad = [record for record in records if record.status == status]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            return "failed", f"{status}: {bad[0].case.label}: {bad[0].reason}{more}"
    return "done", ""


def _code(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _hosts(run: Run) -> tuple[str, ...]:
    hosts = (run.info.environment or {}).get("hosts")
    return tuple(dict.fromkeys(map(str, hosts))) if isinstance(hosts, list) else ()


def silent_hosts(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the hosts none of whose ranks answered when a case hung; nothing if that is all of them."""
    found: dict[str, None] = {}
    for record in records:
        if record.status != "hang":
            continue
        answering = {rank.host for rank in record.ranks if not rank.state.startswith(_NO_ANSWER)}
        if answering:
            found |= dict.fromkeys(rank.host for rank in record.ranks if rank.host not in answering)
    return tuple(found)


def broken_records(run: Path | None) -> tuple[Record, ...]:
    """Return the records so far of a running run that tell of a hang or a failure."""
    if run is None or not (run / "records.jsonl").exists():
        return ()
    return tuple(record for record in read_records(run / "records.jsonl") if record.status in ("hang", "failed"))


def forget_broken(run: Path, since: str) -> None:
    """Take out the records of cases that failed or hung after a time: the job's end, not their own fault, broke them.

    ``since`` is UTC as records have it. The run's driver must have ended.
    """
    file = run / "records.jsonl"
    records = list(read_records(file))
    kept = [record for record in records if record.status not in ("hang", "failed") or record.started < since]
    if len(kept) < len(records):
        fresh = run / ".records.jsonl"
        fresh.write_bytes(b"".join(map(encode, kept)))
        fresh.replace(file)


_DOWN = ("down", "error", "unknown")


def is_down(state: str) -> bool:
    """Say whether a node in a state of sinfo, such as ``down*``, is dead; ``*``: it does not answer."""
    return state.endswith("*") or state.rstrip("~#!%$@^-+").lower() in _DOWN


class DeadNodes:
    """The nodes of this job and what is known of their death; once dead, a node stays so for the job."""

    def __init__(self, slurm: Slurm, environ: Mapping[str, str], host: str | None = None) -> None:
        self._slurm = slurm
        self._here = _short(host or socket.gethostname())
        self._job = environ.get("SLURM_JOB_ID", "")
        self._dead: dict[str, str] = {}
        try:
            self._all = slurm.host_names(environ.get("SLURM_JOB_NODELIST", ""))
        except SlurmError:
            self._all = ()

    def look(self, records: Iterable[Record] = ()) -> set[str]:
        """Ask Slurm, and a run's new records, which nodes are dead; return all that are.

        This process's own host is not silent, whatever its ranks are.
        """
        silent = {_short(host) for host in silent_hosts(records)} - {self._here}
        states, kept = self._states(), self._kept()
        for node in self._all:
            if is_down(states.get(node, "")) or node not in kept:
                self._dead.setdefault(node, "down")
            elif _short(node) in silent:
                self._dead.setdefault(node, "silent")
        return set(self._dead)

    def _states(self) -> Mapping[str, str]:
        try:
            return self._slurm.node_states(self._all) if self._all else {}
        except SlurmError:
            return {}

    def _kept(self) -> tuple[str, ...]:
        """Return the nodes that the job has still: one that was down may be up again, but is the job's no more.

        A job that is ending gives its nodes back one by one, which says nothing of them.
        """
        try:
            facts = self._slurm.show_job(self._job) if self._job else ()
            if not facts or facts[0].get("JobState") != "RUNNING":
                return self._all
            return self._slurm.host_names(facts[0].get("NodeList", "")) or self._all
        except SlurmError:
            return self._all

    def alive(self) -> tuple[str, ...]:
        """Return the nodes not known to be dead, in Slurm's order; empty outside of a job."""
        return tuple(node for node in self._all if node not in self._dead)

    def words(self) -> str:
        """Return which nodes are dead and how, as in ``n3 is down``; empty if none is."""
        down, silent = ([node for node in self._dead if self._dead[node] == how] for how in ("down", "silent"))
        told = [f"{_and(down)} {'is' if len(down) == 1 else 'are'} down"] if down else []
        told += [f"{_and(silent)} {'gives' if len(silent) == 1 else 'give'} no answer"] if silent else []
        return " and ".join(told)


def _short(host: str) -> str:
    return host.partition(".")[0]


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
