"""Training steps with a fault that the environment plants.

`tests.support.workloads.planted_steps:step` measures the step of the plant that its parameter
names. `PLANTED=1` plants the fault. A fault that an option plants would make another case, which
is not compared.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from parbench import cli
from parbench.bench.plan.cases import load_catalogue, load_target
from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.step.train_step import TrainStep

VARIABLE = "PLANTED"
SIZE: Mapping[str, Value] = {
    "shape": "tiny",
    "layers": 2,
    "microbatch": 1,
    "sequence": 32,
}


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault that changes counts of a step."""

    workload: str
    params: Mapping[str, Value] = field(default_factory=dict)
    planted_params: Mapping[str, Value] = field(default_factory=dict)
    """The parameters that the fault changes."""
    change_step: Callable[[TrainStep, World], None] = lambda step, world: None
    cause: str
    """A regular expression of the change that a comparison has to report."""


def add_gather(step: TrainStep, world: World) -> None:
    """Let a step gather 4 KiB more."""
    train = step.step

    def train_and_gather() -> None:
        train()
        shard = torch.ones(1024, device=world.device)
        gathered = [torch.empty_like(shard) for _ in range(world.size)]
        dist.all_gather(gathered, shard, group=step.mesh.groups["dp"])

    setattr(step, "step", train_and_gather)  # noqa: B010 - mypy refuses to assign to a method


PLANTS = {
    "smaller_buckets": Plant(
        workload="ddp",
        planted_params={"bucket_mb": 0.25},
        cause=r"all_reduce on dp: \d+ -> \d+ calls a step",
    ),
    "extra_gather": Plant(
        workload="ddp", change_step=add_gather, cause=r"all_gather on dp: 0 -> 1 calls a step"
    ),
    "gathered_units": Plant(
        workload="fsdp",
        planted_params={"reshard": False},
        cause=r"all_gather on fsdp: \d+ -> \d+ calls a step",
    ),
    "sync_of_each_microbatch": Plant(
        workload="ddp",
        params={"microbatches": 2},
        planted_params={"no_sync": False},
        cause=r"all_reduce on dp: \d+ -> \d+ calls a step",
    ),
    "another_schedule": Plant(
        workload="pp",
        params={"microbatches": 4},
        planted_params={"schedule": "gpipe"},
        cause=r"schedule: 1f1b of 4 microbatches -> gpipe of 4 microbatches",
    ),
    "float32_reduction": Plant(
        workload="ddp",
        params={"precision": "bfloat16", "reduce_dtype": "bfloat16"},
        planted_params={"reduce_dtype": "float32"},
        cause=r"all_reduce on dp: .*",
    ),
}


def step(world: World, *, plant: str = "extra_gather") -> TrainStep:
    """Prepare the step of a plant."""
    planted = PLANTS[plant]
    is_planted = bool(os.environ.get(VARIABLE))
    [definition] = [
        definition
        for definition in load_catalogue(cli.DEFINITIONS)
        if definition.name == f"workload.{planted.workload}"
    ]
    params = {**SIZE, **planted.params}
    if is_planted:
        params |= planted.planted_params
    train_step = load_target(definition.target)(world, **definition.complete(params))
    assert isinstance(train_step, TrainStep)
    if is_planted:
        planted.change_step(train_step, world)
    return train_step
