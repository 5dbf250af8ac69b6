"""Builders of sweeps for tests, and a Slurm whose answers the test decides."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.plan import Entry
from parbench.bench.results.records import Record
from parbench.bench.results.runs import create_run, open_writer
from parbench.slurm.sweep.folder import FOLDERS, Point, Sweep, SweepJob, write_job, write_sweep
from parbench.slurm.sweep.sweepfile import SweepFile
from parbench.slurm.system import QueuedJob, Slurm, SlurmTimeoutError
from tests.support.fakes import make_fake_case, make_plan
from tests.support.reports.reports_fixtures import ok_record

SUBMITTED = "2026-01-01T00:00:00.000Z"
PYTHON = "python"


def make_point(
    number: int = 0, *, nodes: int = 2, seconds: float = 20.0, **fields: Any
) -> Point:
    """Build a point of one rank per node whose id contains its number."""
    defaults = {
        "id": f"{number:04}abcdef{nodes:02}",
        "label": f"{nodes} nodes x 1, r{number}",
        "ntasks_per_node": 1,
        "distribution": "block",
        "repeat": 1,
        "environment": "",
        "variables": {},
        "cases": (Entry(name="collective.all_reduce", set={"size_bytes": "1K"}),),
    }
    return Point(**{**defaults, "nodes": nodes, "seconds": seconds, **fields})


def make_sweep(points: Sequence[Point], **fields: Any) -> Sweep:
    """Build a sweep from the fields of its file; ``slurm`` are those of its table ``[slurm]``."""
    slurm = {"time": "10m", **fields.pop("slurm", {})}
    file = msgspec.convert({"nodes": 2, **fields, "slurm": slurm}, SweepFile)
    return Sweep(
        name=file.name or "test",
        created=SUBMITTED,
        file=file,
        points=tuple(points),
        python=PYTHON,
        working_directory="/",
    )


def make_job(job_id: str, points: Sequence[Point], **fields: Any) -> SweepJob:
    """Build a job of two nodes that measures points."""
    ids = tuple(point.id for point in points)
    defaults = {"name": "sweep", "nodes": 2, "submitted": SUBMITTED}
    return SweepJob(**{**defaults, "id": job_id, "points": ids, **fields})


def make_folder(parent: Path, sweep: Sweep, *jobs: SweepJob) -> Path:
    """Write a sweep and its jobs to ``parent/sweep`` and return that folder."""
    folder = parent / "sweep"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_sweep(folder, sweep)
    for number, job in enumerate(jobs):
        submission = folder / "jobs" / f"{number:04}"
        submission.mkdir()
        write_job(submission / f"{job.name}.json", job)
    return folder


def queue_job(
    job_id: str, state: str = "RUNNING", *, task_id: str | None = None, task: int | None = None
) -> QueuedJob:
    """Build a line of squeue; ``task_id`` and ``task`` are those of a task of an array."""
    own_id = task_id or job_id
    return QueuedJob(
        id=job_id,
        own_id=own_id,
        state=state,
        reason="None",
        task=task,
    )


def write_run(folder: Path, point: Point, *records: Record, num_cases: int = 1) -> Path:
    """Write a run of a point; without ``records`` every case has a good one."""
    cases = [make_fake_case(number) for number in range(num_cases)]
    run, _ = create_run(folder / "runs" / point.id, make_plan(cases), "0")
    with open_writer(run) as writer:
        for record in records or map(ok_record, cases):
            writer.write(record)
    return run


class FakeSlurm(Slurm):
    """A Slurm that answers with the attributes that the test sets, and records each call.

    Attributes:
        queued: the answer of squeue.
        jobs: the facts of ``scontrol show job`` by job id.
        nodes: the state of each node that is not idle.
        calls: the program and the arguments of every call.
        is_down: no program answers.
        refused_from: by program, the number of the call from which on it fails.
        refusal: the exception of a call that fails.
    """

    def __init__(
        self,
        *,
        queued: Sequence[QueuedJob] = (),
        jobs: Mapping[str, Mapping[str, str]] | None = None,
        nodes: Mapping[str, str] | None = None,
        is_down: bool = False,
        refused_from: Mapping[str, int] | None = None,
        refusal: BaseException | None = None,
    ) -> None:
        super().__init__()
        self.queued = queued
        self.jobs = jobs or {}
        self.nodes = nodes or {}
        self.is_down = is_down
        self.refused_from = refused_from or {}
        self.refusal = refusal
        self.calls: list[tuple[str, ...]] = []

    def arguments_of(self, program: str) -> list[tuple[str, ...]]:
        """Return the arguments of every call of a program."""
        return [call[1:] for call in self.calls if call[0] == program]

    def _record_call(self, program: str, *args: str) -> None:
        self.calls.append((program, *args))
        num_calls = len(self.arguments_of(program))
        if self.is_down or num_calls >= self.refused_from.get(program, math.inf):
            raise self.refusal or SlurmTimeoutError(f"{program} did not answer within 30 s")

    def sbatch(self, script: Path) -> str:
        """Accept a script; jobs are numbered from 101."""
        self._record_call("sbatch", str(script))
        return str(100 + len(self.arguments_of("sbatch")))

    def scancel(self, ids: Sequence[str]) -> None:
        self._record_call("scancel", *ids)

    def requeue(self, job_id: str) -> None:
        self._record_call("requeue", job_id)

    def queue(self) -> tuple[QueuedJob, ...]:
        self._record_call("squeue")
        return tuple(self.queued)

    def show_job(self, job_id: str) -> tuple[Mapping[str, str], ...]:
        self._record_call("show job", job_id)
        return (self.jobs[job_id],) if job_id in self.jobs else ()

    def get_node_states(self, nodes: Sequence[str]) -> dict[str, str]:
        self._record_call("sinfo")
        return {name: self.nodes.get(name, "idle") for name in nodes}

    def expand_node_list(self, node_list: str) -> tuple[str, ...]:
        """Split a list of plain names at its commas."""
        self._record_call("hostnames", node_list)
        return tuple(node_list.split(",")) if node_list else ()
