"""What is around the experts of a model: all other parameters, under DDP or FSDP2 over all ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.world.world import World
from workloads.costs.communication_pattern import ddp_sent_bytes, fsdp_sent_bytes, total_padded_numel
from workloads.data_parallel.ddp import wrap
from workloads.data_parallel.fsdp import what_stays_exposed
from workloads.model.shapes import BUCKET
from workloads.model.transformer import Transformer
from workloads.step.layout import make_mesh
from workloads.step.training_step import Options


@dataclass(frozen=True, kw_only=True)
class Around:
    """A model whose parameters but the experts' are averaged over ``group``, after the last microbatch alone.

    ``expected_bytes`` is the closed form of a step; ``gradient_sync(last)`` surrounds a microbatch.
    """

    module: nn.Module
    group: dist.ProcessGroup
    expected_bytes: float
    gradient_sync: Callable[[bool], AbstractContextManager[object]]
    made_groups: tuple[dist.ProcessGroup, ...] = ()
    notes: tuple[str, ...] = ()


def wrap_around(model: Transformer, world: World, options: Options, routed: Sequence[nn.Parameter]) -> Around:
    """Put the model under DDP, which leaves experts alone."""
    experts = {id(parameter) for parameter in routed}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    ddp = wrap(model, world, float(BUCKET.default))

    def gradient_sync(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else ddp.no_sync()

    rest = sum(parameter.numel() for parameter in _rest(model, experts))
    expected = ddp_sent_bytes(rest, options.dtype.itemsize, world.size)["dp"]
    return Around(module=ddp, group=world.group, expected_bytes=expected, gradient_sync=gradient_sync)


def shard_around(model: Transformer, world: World, options: Options, routed: Sequence[nn.Parameter]) -> Around:
    """Shard each layer and the rest over all ranks, experts left alone; parameters are gathered for each pass."""
    mesh, made = make_mesh(world, dp=world.size)
    psi = total_padded_numel([p.shape for p in _rest(model, {id(p) for p in routed})], world.size)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=set(routed))
    root = fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=set(routed))
    assert isinstance(root, FSDPModule)

    def gradient_sync(last: bool) -> AbstractContextManager[object]:
        root.set_requires_gradient_sync(last)
        return nullcontext()

    expected = fsdp_sent_bytes(
        psi,
        options.dtype.itemsize,
        world.size,
        num_microbatches=options.accumulation,
        num_synchronisations=1,
    )
    return Around(
        module=model,
        group=mesh.get_group("dp"),
        expected_bytes=expected["dp"],
        gradient_sync=gradient_sync,
        made_groups=made,
        notes=what_stays_exposed(world, "default"),
    )


def _rest(model: nn.Module, experts: set[int]) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if id(parameter) not in experts]
