"""A pipeline as it is asked for: its parameters, the schedule and split that they mean, and when not. Pure."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Params
from parbench.bench.plan.params import Param, Value
from parbench.bench.text import UserError
from parbench.workloads.model.shapes import Shape
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    Schedule,
    make_schedule,
    require_schedule,
    schedule_from_csv,
)
from parbench.workloads.pipeline_parallel.simulation import check

ALL = "all"
SCHEDULE = Param(
    name="schedule",
    kind="str",
    default="1f1b",
    choices=(*NAMES, ALL),
    help="order of forward and backward passes; all: every schedule that can run here",
)
MICROBATCHES = Param(name="microbatches", kind="int", default=8, minimum=1, help="microbatches per step")
_OWN = "your own schedule instead: torch's CSV, for each rank a row of actions such as 0F0"
PARAMS = (
    SCHEDULE,
    MICROBATCHES,
    Param(
        name="chunks", kind="int", default=0, minimum=0, optional=True, help="stages per rank; 0 = the schedule's own"
    ),
    Param(
        name="split", kind="str", default="", optional=True, help="layers of each stage, such as 2+1+1+2; empty = equal"
    ),
    Param(name="order", kind="rows", default="", optional=True, help=_OWN),
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is to run: the schedule, and the layers of each stage."""

    schedule: Schedule
    layers_by_stage: tuple[int, ...]


def pipeline_of(params: Mapping[str, Value], shape: Shape, ranks: int) -> Pipeline:
    """Return the pipeline that parameters mean; ``UserError`` with the rule and its numbers where there is none."""
    microbatches, rows = int(params["microbatches"]), str(params.get("order", ""))
    if rows:
        if (name := params.get("schedule", SCHEDULE.default)) != SCHEDULE.default:
            raise UserError(f"schedule = {name} is not allowed with order, which is a schedule of your own")
        schedule = schedule_from_csv(rows.replace(";", "\n"), "order")
        if schedule.ranks != ranks:
            raise UserError(f"order has rows for {schedule.ranks} ranks != ranks({ranks})")
        if schedule.microbatches != microbatches:
            raise UserError(f"order has {schedule.microbatches} microbatches != microbatches({microbatches})")
        check(schedule)
    else:
        chunks = int(params.get("chunks", 0))
        schedule = make_schedule(str(params["schedule"]), ranks=ranks, microbatches=microbatches, chunks=chunks)
    split = str(params.get("split", ""))
    return Pipeline(schedule=schedule, layers_by_stage=layers_of_stages(shape.layers, schedule.num_stages, split))


@lru_cache(maxsize=4096)
def layers_of_stages(layers: int, stages: int, split: str = "") -> tuple[int, ...]:
    """Return the layers of each stage; ``split`` such as ``1+2+1+1`` names them, empty is as many each.

    ``UserError`` by equation where layers do not divide, or ``split`` is not one number for each stage.
    """
    if not split:
        if layers % stages:
            raise UserError(f"layers({layers}) % stages({stages}) != 0: split = 2+1+... says how many each stage takes")
        return (layers // stages,) * stages
    words = split.split("+")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise UserError(f"split = {split!r} is not understood: it is the layers of each stage, such as 1+2+1+1")
    counts = tuple(map(int, words))
    if len(counts) != stages:
        raise UserError(f"split = {split!r} is for {len(counts)} stages, and there are {stages}")
    if sum(counts) != layers:
        raise UserError(f"split = {split!r} holds {sum(counts)} layers, and the model has layers({layers})")
    return counts


def each_schedule(given: Params, spec: WorldSpec) -> Iterable[Params]:
    """Make of ``schedule = all`` a case for each schedule that exists for so many ranks, microbatches and chunks.

    An order of one's own is the one schedule that there is then.
    """
    if given.get("schedule") != ALL:
        return (given,)
    if given.get("order"):
        return ({name: value for name, value in given.items() if name != "schedule"},)
    microbatches = int(given.get("microbatches", MICROBATCHES.default))
    made = []
    for name in NAMES:
        with suppress(UserError):
            require_schedule(name, ranks=spec.nproc, microbatches=microbatches, chunks=int(given.get("chunks", 0)))
            made.append({**given, "schedule": name})
    return made
