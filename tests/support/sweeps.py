"""Sweeps for tests: small folders, and a Slurm that says what the test tells it to."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parbench.bench.plan.plan import Entry
from parbench.slurm.sweep.folder import FOLDERS, Job, Point, Sweep, append_job, write_sweep
from parbench.slurm.system import Partition, QueuedJob, Slurm, SlurmError


def make_point(number: int = 0, *, nodes: int = 2, seconds: float = 20.0, **more: Any) -> Point:
    given = {
        "ntasks_per_node": 1,
        "placement": "block",
        "repeat": 1,
        "environment": "",
        "variables": {},
    }
    case = Entry(name="collective.all_reduce", set={"size_bytes": "1K"})
    names = {
        "id": f"{number:04}abcdef{nodes:02}",
        "label": f"{nodes} nodes x 1, r{number}",
        "cases": (case,),
    }
    return Point(**{**given, **names, "nodes": nodes, "seconds": seconds, **more})


def make_sweep(points: Sequence[Point], **more: Any) -> Sweep:
    given = {
        "name": "test",
        "file": "test.toml",
        "created": "2026-01-01T00:00:00.000Z",
        "mode": "one",
    }
    where = {"time_seconds": 600, "python": "python", "working_directory": "/"}
    return Sweep(**{**given, **where, "points": tuple(points), **more})


def make_folder(out: Path, sweep: Sweep, *jobs: Job) -> Path:
    folder = out / "sweep"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_sweep(folder, sweep)
    for one in jobs:
        append_job(folder, one)
    return folder


def make_job(number: str, points: Sequence[Point], **more: Any) -> Job:
    given = {"name": "sweep", "nodes": 2, "submitted": "2026-01-01T00:00:00.000Z"}
    return Job(
        **{**given, "id": number, "points": tuple(make_point.id for make_point in points), **more}
    )


def queued_job(
    number: str, state: str = "RUNNING", *, own: str | None = None, reason: str = "None"
) -> QueuedJob:
    return QueuedJob(id=number, own_id=own or number, state=state, reason=reason)


class FakeSlurm(Slurm):
    """A Slurm whose queue, jobs and nodes the test decides; ``down`` lets no program answer."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(
            waiting=[], jobs={}, nodes={}, parts=(), told=[], down=False, on_call=lambda words: None
        )

    waiting: list[QueuedJob]
    jobs: dict[str, Mapping[str, str]]
    nodes: dict[str, str]
    parts: tuple[Partition, ...]
    told: list[tuple[str, ...]]
    down: bool
    on_call: Callable[[tuple[str, ...]], None]

    def set(self, **values: Any) -> "FakeSlurm":
        self.__dict__.update(values)
        return self

    def _answer(self, *words: str) -> None:
        self.told.append(words)
        self.on_call(words)
        if self.down:
            raise SlurmError(f"{words[0]} did not answer within 30 s")

    def check_program(self, name: str) -> None:
        """Find every program."""

    def partitions(self) -> tuple[Partition, ...]:
        self._answer("sinfo")
        return self.parts

    def sbatch(self, script: Path) -> str:
        self._answer("sbatch", str(script))
        return str(100 + sum(words[0] == "sbatch" for words in self.told))

    def scancel(self, ids: Sequence[str]) -> None:
        self._answer("scancel", *ids)

    def requeue(self, job_id: str) -> None:
        self._answer("requeue", job_id)

    def queue(self) -> tuple[QueuedJob, ...]:
        self._answer("squeue")
        return tuple(self.waiting)

    def show_job(self, job_id: str) -> tuple[Mapping[str, str], ...]:
        self._answer("show job", job_id)
        return (self.jobs[job_id],) if job_id in self.jobs else ()

    def node_states(self, nodes: Sequence[str] = ()) -> dict[str, str]:
        self._answer("sinfo")
        return {name: state for name, state in self.nodes.items() if not nodes or name in nodes}

    def host_names(self, node_list: str) -> tuple[str, ...]:
        self._answer("hostnames", node_list)
        return tuple(node_list.split(",")) if node_list else ()
