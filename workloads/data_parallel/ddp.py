"""DistributedDataParallel: every rank holds the whole model; gradients are summed in buckets under backward.

In bfloat16 they travel by torch's compressing communication hook, half the bytes of float32, and are summed once a
step, after the last microbatch: summed after each, what is there already would be rounded anew.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.transformer import Transformer
from parbench.workloads.step.gate import prepared
from parbench.workloads.step.layout import Layout


def lay_out(model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
    """Wrap the model; with ``no_sync`` only the last microbatch's backward pass sums gradients."""
    no_sync = bool(params["no_sync"])
    ddp = wrap(model, world, float(params["bucket_mb"]), static_graph=bool(params["static_graph"]))

    def gradient_sync(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or not no_sync else ddp.no_sync()

    layout = Layout.of(spec, world, model, {"dp": world.group}, module=ddp)
    return replace(layout, gradient_sync=gradient_sync, details={"bucket_mb": params["bucket_mb"]})


def lay_out_bf16(model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
    layout = lay_out(model, world, spec, {**params, "no_sync": True})

    def compress(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return bf16_compress_hook(group, bucket)  # which DDP takes by its own name on CUDA alone

    cast(DistributedDataParallel, layout.module).register_comm_hook(world.group, compress)
    return replace(layout, reduced_dtype=torch.bfloat16)


def wrap(model: nn.Module, world: World, bucket_mb: float, *, static_graph: bool = False) -> DistributedDataParallel:
    """Return the model under DDP, its gradients views of the buckets."""
    return DistributedDataParallel(
        model,
        process_group=world.group,
        bucket_cap_mb=bucket_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=True,
        device_ids=[world.device] if world.device.type == "cuda" else None,
    )


prepare = prepared(lay_out, strategies.ddp)
bf16 = prepared(lay_out_bf16, strategies.ddp_bf16)
