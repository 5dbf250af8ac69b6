"""FSDP with a fault that the environment plants: `--target tests.support.planted_steps:fsdp`.

A fault that an option plants would make another case, which is not compared.
"""

import os
from typing import Any

from torch import nn

from parbench import cli
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.parallel import data_parallel
from parbench.workloads.step.train_step import TrainStep

VARIABLE = "PLANTED"


def fsdp(world: World) -> TrainStep:
    """Prepare a step of FSDP; `PLANTED=unsharded` never frees its parameters after forward."""
    [definition] = [
        definition
        for definition in load_catalogue(cli.DEFINITIONS)
        if definition.name == "workload.fsdp"
    ]
    if os.environ.get(VARIABLE) == "unsharded":
        plant_gathered_units()
    size = {"shape": "tiny", "layers": 2, "microbatch": 1, "sequence": 32}
    step = load_target(definition.target)(world, **definition.complete(size))
    assert isinstance(step, TrainStep)
    return step


def plant_gathered_units() -> None:
    """Let FSDP keep the parameters of every unit from forward to backward."""
    shard_modules = data_parallel.shard_modules

    def shard(modules: list[nn.Module], mesh: Any, **options: Any) -> Any:
        return shard_modules(modules, mesh, **{**options, "reshard": False})

    data_parallel.shard_modules = shard
