"""DistributedDataParallel: every rank holds the whole model; gradients are summed in buckets during backward.

With ``grad_compression=bf16`` torch's communication hook halves their bytes. They are then summed once per step, after
the last microbatch: a sum after each microbatch would round the accumulated gradients each time.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

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


def lay_out(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    """Wrap the model; with ``no_sync`` only the last microbatch's backward pass sums gradients."""
    compresses = strategies.compresses_gradients(params)
    no_sync = bool(params["no_sync"]) or compresses
    ddp = wrap(model, world, float(params["bucket_mb"]), static_graph=bool(params["static_graph"]))

    def gradient_sync(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or not no_sync else ddp.no_sync()

    def compress(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return bf16_compress_hook(group, bucket)  # DDP accepts torch's own function on CUDA only

    if compresses:
        ddp.register_comm_hook(world.group, compress)
    layout = Layout.of(spec, world, model, {"dp": world.group}, module=ddp)
    return replace(
        layout,
        gradient_sync=gradient_sync,
        reduced_dtype=torch.bfloat16 if compresses else None,
        details={"bucket_mb": params["bucket_mb"]},
    )


def wrap(
    model: nn.Module, world: World, bucket_mb: float, *, static_graph: bool = False
) -> DistributedDataParallel:
    """Return the model under DDP, its gradients views of the buckets; 0 MiB means torch's default buckets."""
    return DistributedDataParallel(
        model,
        process_group=world.group,
        bucket_cap_mb=bucket_mb or None,
        static_graph=static_graph,
        gradient_as_bucket_view=True,
        device_ids=[world.device] if world.device.type == "cuda" else None,
    )


prepare = prepared(lay_out, strategies.ddp)
