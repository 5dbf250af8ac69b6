"""Builders of sweeps for tests, and a Slurm whose answers the test decides."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parbench.bench.plan.plan import Entry
from parbench.slurm.sweep.folder import FOLDERS, Job, Point, Sweep, append_job, write_sweep
from parbench.slurm.system import Partition, QueuedJob, Slurm, SlurmError

SUBMITTED = "2026-01-01T00:00:00.000Z"


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
    """Build a sweep with a time limit of ten minutes per job."""
    defaults = {
        "name": "test",
        "file": "test.toml",
        "created": SUBMITTED,
        "mode": "one",
        "time_seconds": 600,
        "python": "python",
        "working_directory": "/",
    }
    return Sweep(**{**defaults, "points": tuple(points), **fields})


def make_job(job_id: str, points: Sequence[Point], **fields: Any) -> Job:
    """Build a job of two nodes that measures points."""
    ids = tuple(point.id for point in points)
    defaults = {"name": "sweep", "nodes": 2, "submitted": SUBMITTED}
    return Job(**{**defaults, "id": job_id, "points": ids, **fields})


def make_folder(parent: Path, sweep: Sweep, *jobs: Job) -> Path:
    """Write a sweep and its jobs to ``parent/sweep`` and return that folder."""
    folder = parent / "sweep"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_sweep(folder, sweep)
    for job in jobs:
        append_job(folder, job)
    return folder


def queue_job(job_id: str, state: str = "RUNNING", *, task_id: str | None = None) -> QueuedJob:
    """Build a line of squeue; ``task_id`` is the id of the task of an array."""
    return QueuedJob(id=job_id, own_id=task_id or job_id, state=state, reason="None")


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
        partitions: Sequence[Partition] = (),
        is_down: bool = False,
        refused_from: Mapping[str, int] | None = None,
        refusal: BaseException | None = None,
    ) -> None:
        super().__init__()
        self.queued = queued
        self.jobs = jobs or {}
        self.nodes = nodes or {}
        self.known_partitions = partitions
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
            raise self.refusal or SlurmError(f"{program} did not answer within 30 s")

    def check_program(self, name: str) -> None:
        """Accept every program as installed."""

    def partitions(self) -> tuple[Partition, ...]:
        self._record_call("sinfo")
        return tuple(self.known_partitions)

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

    def node_states(self, nodes: Sequence[str] = ()) -> dict[str, str]:
        self._record_call("sinfo")
        return {name: self.nodes.get(name, "idle") for name in nodes or self.nodes}

    def host_names(self, node_list: str) -> tuple[str, ...]:
        """Split a list of plain names at its commas."""
        self._record_call("hostnames", node_list)
        return tuple(node_list.split(",")) if node_list else ()
