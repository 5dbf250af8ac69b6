"""The parameters of a pipeline, and the order and the stages that they mean. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Params
from parbench.bench.plan.params import Param, Value
from parbench.bench.text import UserError
from parbench.workloads.model.shapes import Shape
from parbench.workloads.pipeline_parallel.order import PipelineOrder, read_order
from parbench.workloads.pipeline_parallel.schedules import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    find_schedule,
)
from parbench.workloads.pipeline_parallel.simulation import check

ALL = "all"
SCHEDULE = Param(
    name="schedule",
    kind="str",
    default=DEFAULT_SCHEDULE,
    choices=(*SCHEDULES, ALL),
    help="order of forward and backward passes; all: every schedule that can run here",
)
MICROBATCHES = Param(
    name="microbatches", kind="int", default=8, minimum=1, help="microbatches per step"
)
PARAMS = (
    SCHEDULE,
    MICROBATCHES,
    Param(
        name="chunks",
        kind="int",
        default=0,
        minimum=0,
        optional=True,
        help="stages per rank; 0 = the schedule's own",
    ),
    Param(
        name="split",
        kind="str",
        default="",
        optional=True,
        help="layers of each stage, such as 2+1+1+2; empty = equal",
    ),
    Param(
        name="order",
        kind="rows",
        default="",
        optional=True,
        help="your own schedule instead: torch's CSV, for each rank a row of actions such as 0F0",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipeline of a measured step."""

    order: PipelineOrder
    layers_by_stage: tuple[int, ...]


def make_pipeline(params: Mapping[str, Value], shape: Shape, ranks: int) -> Pipeline:
    """Return the pipeline of parameters. Raises ``UserError`` with the rule that they break."""
    order = _make_order(params, ranks)
    split = str(params.get("split", ""))
    layers_by_stage = split_layers(shape.layers, order.num_stages, split)
    return Pipeline(order=order, layers_by_stage=layers_by_stage)


def _make_order(params: Mapping[str, Value], ranks: int) -> PipelineOrder:
    name = str(params.get("schedule", DEFAULT_SCHEDULE))
    microbatches = int(params["microbatches"])
    rows = str(params.get("order", ""))
    if not rows:
        schedule = find_schedule(name)
        return schedule.make_order(schedule.size(ranks, microbatches, int(params.get("chunks", 0))))
    if name != DEFAULT_SCHEDULE:
        raise UserError(f"schedule = {name} is not allowed with order, a schedule of your own")
    order = read_order(rows.replace(";", "\n"), "order")
    if order.ranks != ranks:
        raise UserError(f"order has rows for {order.ranks} ranks != ranks({ranks})")
    if order.microbatches != microbatches:
        count = f"{order.microbatches} microbatches"
        raise UserError(f"order has {count} != microbatches({microbatches})")
    check(order)
    return order


def format_checkpointing_refusal(schedule: str, checkpointing: str) -> str:
    return (
        f"checkpointing = {checkpointing} is not allowed with schedule = {schedule}, which splits "
        "the backward pass: layers would be recomputed for the input gradient and once more for "
        "the weight gradient"
    )


@lru_cache(maxsize=4096)
def split_layers(layers: int, num_stages: int, split: str = "") -> tuple[int, ...]:
    """Return the layers of each stage: those of ``split``, such as 1+2+1+1, or as many each.

    Raises ``UserError`` if layers do not divide, or if the split does not match.
    """
    if not split:
        if layers % num_stages:
            hint = "set the layers of each stage with split = 2+1+..."
            raise UserError(f"layers({layers}) % stages({num_stages}) != 0: {hint}")
        return (layers // num_stages,) * num_stages
    words = split.split("+")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        example = "it is the layers of each stage, such as 1+2+1+1"
        raise UserError(f"split = {split!r} cannot be read: {example}")
    counts = tuple(map(int, words))
    if len(counts) != num_stages:
        raise UserError(f"split = {split!r} is for {len(counts)} stages != stages({num_stages})")
    if sum(counts) != layers:
        raise UserError(f"split = {split!r} has {sum(counts)} layers != layers({layers})")
    return counts


def expand_all_schedules(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return a case for each schedule that is possible if ``schedule = all``.

    A custom order is the only schedule.
    """
    if params.get("schedule") != ALL:
        return [params]
    if params.get("order"):
        return [{name: value for name, value in params.items() if name != "schedule"}]
    microbatches = int(params.get("microbatches", MICROBATCHES.default))
    cases: list[Params] = []
    for name, schedule in SCHEDULES.items():
        try:
            schedule.size(spec.nproc, microbatches, int(params.get("chunks", 0)))
        except UserError:
            continue
        cases.append({**params, "schedule": name})
    return cases
