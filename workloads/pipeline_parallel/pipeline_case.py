"""The parameters of a pipeline, and the order and the stages that they mean. Pure."""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from parbench.bench.plan.params import Param
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.order import PipelineOrder, PipelineSize
from parbench.workloads.pipeline_parallel.schedule import Schedule
from parbench.workloads.pipeline_parallel.schedules import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    find_schedule,
)

DEFAULT_MICROBATCHES = 8  # enough that a pipeline of a few ranks has small bubbles
SCHEDULE = Param(
    "schedule",
    "str",
    DEFAULT_SCHEDULE,
    "order of forward and backward passes",
    choices=tuple(SCHEDULES),
)
PARAMS = (
    SCHEDULE,
    Param(
        "virtual_stages",
        "int",
        0,
        "virtual stages per rank; 0 = the schedule's own",
        minimum=0,
        optional=True,
    ),
    Param(
        "layers_per_stage",
        "str",
        "",
        "layers of each stage, such as 2+1+1+2; empty = equal",
        optional=True,
    ),
)
"""The parameters of a pipeline that a user can set."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The schedule and the stages that a user chooses, before they are checked."""

    schedule: str = DEFAULT_SCHEDULE
    """The name of a schedule in ``SCHEDULES``."""
    stages_per_rank: int = 0
    """The number of stages on each rank. 0 means the schedule's default."""
    layers_per_stage: str = ""
    """The number of layers of each stage, such as 2+1+1+2. Empty means equal numbers."""

    def get_size(self, ranks: int, microbatches: int) -> PipelineSize:
        """Return the numbers of ranks, microbatches and stages of a pipeline with these options.

        They are not checked: the schedule may be unable to run with them.
        """
        stages_per_rank = self.stages_per_rank or find_schedule(self.schedule).stages_per_rank
        return PipelineSize(ranks, microbatches, stages_per_rank)

    def build(self, ranks: int, microbatches: int, layers: int) -> "Pipeline":
        """Return the pipeline of a model with ``layers`` layers on ``ranks`` ranks.

        ``microbatches`` is their number in a step. Raises ``UserError`` if the schedule cannot run
        with these sizes, with the violation, such as ``layers(4) < pp(8) * virtual_stages(1)``.
        """
        schedule = find_schedule(self.schedule)
        size = schedule.size(ranks, microbatches, self.stages_per_rank)
        if layers < size.num_stages:
            stages = size.stages_per_rank
            raise UserError(f"layers({layers}) < pp({ranks}) * virtual_stages({stages})")
        layers_by_stage = split_layers(layers, size.num_stages, self.layers_per_stage)
        return Pipeline(schedule=schedule, size=size, layers_by_stage=layers_by_stage)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline that can run: its schedule, its size, and the layers of its stages."""

    schedule: Schedule
    """The schedule, which decides the order of forward and backward passes."""
    size: PipelineSize
    """The numbers of ranks, microbatches and stages per rank."""
    layers_by_stage: tuple[int, ...]
    """The number of layers of each stage, first stage first."""

    @cached_property
    def order(self) -> PipelineOrder:
        """The actions of all ranks in the order in which each rank runs them."""
        return self.schedule.make_order(self.size)

    def list_stages(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stages on a rank of the pipeline, in ascending order."""
        return self.schedule.list_stages(rank, self.size)


@lru_cache(maxsize=4096)
def split_layers(layers: int, num_stages: int, layers_per_stage: str = "") -> tuple[int, ...]:
    """Return the number of layers of each stage, first stage first.

    ``layers_per_stage`` is the numbers as text, such as 1+2+1+1 or 1+2+2x1. If it is empty, all
    stages have equal numbers. Raises ``UserError`` if the layers do not divide equally, if the text
    cannot be read, or if it does not have ``num_stages`` numbers with the sum ``layers``.
    """
    if not layers_per_stage:
        if layers % num_stages:
            raise UserError(
                f"layers({layers}) % stages({num_stages}) != 0: "
                "set the layers of each stage with layers_per_stage=2+1+..."
            )
        return (layers // num_stages,) * num_stages
    counts: tuple[int, ...] = ()
    for part in layers_per_stage.split("+"):
        match = re.fullmatch(r"(?:(\d{1,4})x)?(0*[1-9]\d*)", part.strip())
        if match is None:
            raise UserError(
                f"layers_per_stage = {layers_per_stage!r} is not allowed: write layers, such as 1+2+1+1"
            )
        counts += (int(match[2]),) * int(match[1] or 1)
    if (len(counts), sum(counts)) != (num_stages, layers):
        raise UserError(
            f"layers_per_stage = {layers_per_stage!r} has {len(counts)} stages with {sum(counts)} layers instead of "
            f"{num_stages} with {layers}"
        )
    return counts
