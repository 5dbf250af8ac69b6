"""DDP whose gradients travel in bfloat16: torch's compressing communication hook, half the bytes of float32.

They are summed once a step, after the last microbatch: summed after each, what is there already would be rounded anew.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.plan.params import Value
from bench.world.world import World
from workloads.catalogue import STRATEGIES
from workloads.costs.step_spec import StepSpec
from workloads.data_parallel import ddp
from workloads.model.transformer import Transformer
from workloads.step.layout import Layout
from workloads.step.training_step import TrainingStep


def prepare(world: World, **params: Value) -> TrainingStep:
    """Return the step."""
    return TrainingStep(world, params, lay_out, STRATEGIES["ddp_bf16"])


def lay_out(model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
    """Wrap the model in DDP, and let its hook round gradients."""
    layout = ddp.lay_out(model, world, spec, {**params, "no_sync": True})
    cast(DistributedDataParallel, layout.module).register_comm_hook(world.group, _compress)
    return replace(layout, reduced_dtype=torch.bfloat16)


def _compress(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Do as torch's hook, which DDP takes by its own name on CUDA alone."""
    return bf16_compress_hook(group, bucket)
