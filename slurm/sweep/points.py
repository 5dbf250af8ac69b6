"""The points of a sweep, and the sweep as it was submitted: the same values for every process that reads them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from bench.plan.plan import Entry
from bench.text import counted

SCHEMA = 1
Mode = Literal["one", "array", "each"]
Placement = Literal["block", "cyclic"]
OnDeadNode = Literal["fail", "go-on"]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the sweep; ``cases`` empty means the preset's, ``seconds`` is what it is expected to take.

    ``id`` is the hash of what is measured and where: neither of the label nor of the expectation. ``environment`` is
    empty where the sweep compares none; ``repeat`` counts from 1.
    """

    id: str
    label: str
    nodes: int
    ntasks_per_node: int
    placement: Placement
    repeat: int
    environment: str
    variables: dict[str, str]
    cases: tuple[Entry, ...]
    seconds: float

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.ntasks_per_node


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """``sweep.json``: what was submitted; ``points`` stand in the order of execution, large to small.

    The index of a point in ``points`` is its task in an array job. ``budget``, ``timeout`` and ``link`` are texts as
    ``parbench run`` takes them, None where the preset decides. ``time_seconds`` is what each job may take, None
    where the expectation decides. ``options`` are sbatch's long options without dashes, ``srun_options`` words that
    every srun gets. ``python`` starts parbench in the job, from the folder ``working_directory``, after the lines of
    ``prologue``.
    """

    schema: int = SCHEMA
    name: str
    file: str
    created: str
    mode: Mode
    points: tuple[Point, ...]
    preset: str | None = None
    launches: int | None = None
    budget: str | None = None
    timeout: str | None = None
    backend: str | None = None
    device: str | None = None
    link: str | None = None
    partition: str | None = None
    time_seconds: int | None = None
    options: dict[str, str | bool] = {}
    srun_options: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    python: str
    working_directory: str
    requeue: bool = True
    on_dead_node: OnDeadNode = "fail"
    warning_seconds: int = 120


def point_label(nodes: int, ntasks_per_node: int, words: Sequence[str] = ()) -> str:
    """Return what people read of a point: ``4 nodes x 2, cyclic, dtype=float32``."""
    return ", ".join([f"{counted(nodes, 'node')} x {ntasks_per_node}", *words])


def make_point(
    *,
    nodes: int,
    ntasks_per_node: int,
    placement: Placement,
    repeat: int,
    environment: str,
    variables: Mapping[str, str],
    cases: tuple[Entry, ...],
    seconds: float,
    words: Sequence[str] = (),
) -> Point:
    """Return the point with its id, and a label that ends in ``words``."""
    measured = {
        "nodes": nodes,
        "ntasks_per_node": ntasks_per_node,
        "placement": placement,
        "repeat": repeat,
        "environment": environment,
        "variables": dict(variables),
        "cases": cases,
    }
    canonical = msgspec.json.encode(measured, order="deterministic")
    return Point(
        id=hashlib.sha256(canonical).hexdigest()[:12],
        label=point_label(nodes, ntasks_per_node, words),
        nodes=nodes,
        ntasks_per_node=ntasks_per_node,
        placement=placement,
        repeat=repeat,
        environment=environment,
        variables=dict(variables),
        cases=cases,
        seconds=seconds,
    )
