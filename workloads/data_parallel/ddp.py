"""DistributedDataParallel: every rank holds the whole model; gradients are summed in buckets under backward."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.plan.params import Value
from bench.world.world import World
from workloads.costs import strategies
from workloads.costs.step_spec import StepSpec
from workloads.model.optimizer import make_optimizer
from workloads.model.transformer import Transformer
from workloads.step.layout import Layout, dtype_of
from workloads.step.training_step import TrainingStep


def prepare(world: World, **params: Value) -> TrainingStep:
    """Return the step."""
    return TrainingStep(world, params, lay_out, strategies.ddp)


def lay_out(model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
    """Wrap the model; with ``no_sync`` only the last microbatch's backward pass sums gradients."""
    no_sync = bool(params["no_sync"])
    ddp = wrap(model, world, float(params["bucket_mb"]), static_graph=bool(params["static_graph"]))

    def gradient_sync(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or not no_sync else ddp.no_sync()

    return Layout(
        module=ddp,
        model=model,
        optimizer=make_optimizer(model.parameters(), dtype_of(spec), timed=spec.timed),
        axes={"dp": world.group},
        data_rank=world.rank,
        data_size=world.size,
        gradient_sync=gradient_sync,
        details={"bucket_mb": params["bucket_mb"]},
    )


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
