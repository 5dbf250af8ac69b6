"""Our own steps with a fault that the environment plants, measured with ``--target tests.support.planted_steps:NAME``.

A fault that a setting would plant is another case, which is not compared: ``PLANTED`` is no part of any.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from parbench import cli
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.data_parallel import ddp as of_ddp
from parbench.workloads.data_parallel.fsdp import lay_out_fsdp
from parbench.workloads.model.transformer import Transformer, materialise
from parbench.workloads.pipeline_parallel import pipeline_step
from parbench.workloads.step.gate import prepared
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.training_step import TrainingStep

VARIABLE = "PLANTED"
PLANTS = {
    "smaller buckets": ("ddp", r"all_reduce on dp: 1 -> \d+ calls a step, as many bytes"),
    "an extra all_gather": ("ddp", r"all_gather on dp: 0 -> 1 calls a step, \+4.00 KiB"),
    "no reshard": ("fsdp", r"all_gather on dp: \d+ -> \d+ calls a step, -\S+ [KM]iB"),
    "an unsharded parameter": ("fsdp", r"parameters in memory: \S+ \S+ -> \S+ \S+"),
    "another schedule": (
        "pipeline",
        r"schedule: 1f1b of 4 microbatches -> gpipe of 4 microbatches",
    ),
    "float32 on the wire": (
        "halved",
        r"all_reduce on dp: .* a step in 1 calls, each 2.00 times as large",
    ),
}
"""By name the step that a fault is planted in, and the cause that a comparison has to tell."""
TARGETS = tuple(dict.fromkeys(target for target, _ in PLANTS.values()))


def _planted(name: str) -> bool:
    assert name in PLANTS, name
    return os.environ.get(VARIABLE) == name


def _params(name: str, **given: Value) -> dict[str, Value]:
    [definition] = [
        one for one in load_catalogue(cli.DEFINITIONS) if one.name == f"workload.{name}"
    ]
    return definition.whole(
        {"shape": "tiny", "layers": 2, "microbatch": 1, "sequence": 32, **given}
    )


def ddp(world: World) -> TrainingStep:
    params = _params("ddp", bucket_mb=0.25 if _planted("smaller buckets") else 25.0)
    step = of_ddp.prepare(world, **params)
    if _planted("an extra all_gather"):
        usual = step.step

        def more() -> None:
            usual()
            shard = torch.ones(1024, device=world.device)
            dist.all_gather(
                [torch.empty_like(shard) for _ in range(world.size)], shard, group=world.group
            )

        setattr(step, "step", more)  # noqa: B010 - a method is not assigned to
    return step


def halved(world: World) -> TrainingStep:
    """DDP whose gradients are summed in bfloat16."""
    params = _params("ddp", grad_compression="bf16", no_sync=True)
    prepare: Callable[..., TrainingStep] = of_ddp.prepare
    if _planted("float32 on the wire"):
        prepare = prepared(_lay_out_uncompressed, strategies.ddp)
    return prepare(world, **params)


def _lay_out_uncompressed(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    return of_ddp.lay_out(model, world, spec, {**params, "grad_compression": "none"})


def fsdp(world: World) -> TrainingStep:
    lay_out = _with_one_unsharded if _planted("an unsharded parameter") else lay_out_fsdp
    prepare = prepared(lay_out, strategies.fsdp, outlined=True)
    return prepare(world, **_params("fsdp", reshard=not _planted("no reshard")))


def pipeline(world: World) -> Any:
    schedule = "gpipe" if _planted("another schedule") else "1f1b"
    return pipeline_step.prepare(world, **_params("pp", schedule=schedule, microbatches=4))


def _with_one_unsharded(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    """Leave the embedding whole on every rank, and sum its gradient as DDP would."""
    materialise(model.tokens, world.seed, world.device, "tokens")
    [whole] = model.tokens.parameters()

    def sum_gradient() -> None:
        assert whole.grad is not None, "a step has gone backward"
        dist.all_reduce(whole.grad, group=world.group)
        whole.grad.div_(world.size)

    return replace(
        lay_out_fsdp(model, world, spec, params, [whole]), finalize_gradients=sum_gradient
    )
