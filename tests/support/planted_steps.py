"""FSDP with a fault that the environment plants: `--target tests.support.planted_steps:fsdp`.

A fault that an option plants would make another case, which is not compared.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from parbench import cli
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.data_parallel.fsdp import lay_out_fsdp
from parbench.workloads.model.transformer import Transformer, materialise
from parbench.workloads.step.gate import prepared
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.training_step import TrainingStep

VARIABLE = "PLANTED"


def fsdp(world: World) -> TrainingStep:
    """Prepare a step of FSDP; `PLANTED=unsharded` leaves its embedding unsharded."""
    is_planted = os.environ.get(VARIABLE) == "unsharded"
    lay_out = lay_out_with_full_embedding if is_planted else lay_out_fsdp
    prepare = prepared(lay_out, strategies.fsdp, outlined=True)
    [definition] = [
        definition
        for definition in load_catalogue(cli.DEFINITIONS)
        if definition.name == "workload.fsdp"
    ]
    size = {"shape": "tiny", "layers": 2, "microbatch": 1, "sequence": 32}
    return prepare(world, **definition.complete(size))


def lay_out_with_full_embedding(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    """Leave the embedding on every rank, and average its gradient as DDP does."""
    materialise(model.tokens, world.seed, world.device, "tokens")
    [embedding] = model.tokens.parameters()

    def average_gradient() -> None:
        assert embedding.grad is not None
        dist.all_reduce(embedding.grad, group=world.group)
        embedding.grad.div_(world.size)

    layout = lay_out_fsdp(model, world, spec, params, [embedding])
    return replace(layout, finalize_gradients=average_gradient)
