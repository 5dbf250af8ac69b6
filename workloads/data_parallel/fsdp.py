"""FSDP2: parameters, gradients and optimizer state are sharded, and gathered layer by layer when they are needed.

``fsdp`` gives a layer's parameters back after its forward pass and gathers them again for the backward pass (ZeRO-3),
or keeps them where it does not ``reshard`` (ZeRO-2); ``hsdp`` shards within groups and replicates across them.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.transformer import Transformer, materialise
from parbench.workloads.step.gate import prepared
from parbench.workloads.step.layout import Layout, make_mesh

Begin = Callable[[nn.Module, str], object]
"""What comes before a part of the model, of a name, is sharded."""


def drawing(world: World) -> Begin:
    """Return what puts an outlined part on the device, with its weights."""
    return lambda part, name: materialise(part, world.seed, world.device, name)


def lay_out_fsdp(
    model: Transformer,
    world: World,
    spec: StepSpec,
    params: Mapping[str, Value],
    ignored: Iterable[nn.Parameter] = (),
) -> Layout:
    """Shard all but ``ignored`` over all ranks; with ``reshard`` it is gathered for each pass, the root's too."""
    mesh, made = make_mesh(world, dp=world.size)
    prefetch = str(params["prefetch"])
    shard(
        model,
        mesh,
        drawing(world),
        reshard=bool(params["reshard"]),
        prefetch=prefetch,
        ignored=ignored,
    )

    def gradient_sync(last: bool) -> AbstractContextManager[object]:
        if params["no_sync"]:
            cast(FSDPModule, model).set_requires_gradient_sync(last)
        return nullcontext()

    return replace(
        Layout.of(spec, world, model, {"dp": mesh.get_group("dp")}),
        gradient_sync=gradient_sync,
        made_groups=made,
        notes=what_stays_exposed(world, prefetch),
    )


def lay_out_hsdp(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    """Shard over the inner axis, replicate over the outer; the root keeps its parameters gathered, as by default."""
    mesh, made = make_mesh(world, replicate=spec.mesh["dp"], shard=spec.mesh["fsdp"])
    shard(
        model,
        mesh,
        drawing(world),
        reshard=True,
        prefetch=str(params["prefetch"]),
        keeps_root=spec.keeps_root,
    )
    return replace(
        Layout.of(
            spec, world, model, {name: mesh.get_group(name) for name in ("replicate", "shard")}
        ),
        made_groups=made,
        notes=(
            "hsdp: the root keeps its parameters gathered, as torch does by default",
            *what_stays_exposed(world, str(params["prefetch"])),
        ),
    )


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    begin: Begin,
    *,
    reshard: bool,
    prefetch: str,
    keeps_root: bool = False,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Shard each layer and the rest over a mesh; ``prefetch`` explicit gathers the next layer while one computes.

    Right before, each is begun: one of them at most is whole.
    """
    on = partial(fully_shard, mesh=mesh, ignored_params=set(ignored))
    layers = []
    for i, layer in enumerate(model.layers):
        begin(layer, f"layers.{i}")
        layers.append(on(layer, reshard_after_forward=reshard))
    begin(model, "")
    root = on(model, reshard_after_forward=reshard and not keeps_root)
    if prefetch != "explicit":
        return
    # asynchronously, one layer ahead: on a CPU torch does neither itself; on CUDA it would give up FSDP's own streams
    if mesh.device_type == "cpu":
        root._set_unshard_async_op(async_op=True)
    root.set_modules_to_forward_prefetch(layers[:1])
    root.set_modules_to_backward_prefetch(layers[-1:])
    for before, after in pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def what_stays_exposed(world: World, prefetch: str) -> tuple[str, ...]:
    """Return why a step cannot hide all of its communication here; nothing where it can."""
    if world.backend != "gloo":
        return ()
    if prefetch == "explicit":
        return (
            "exposed on gloo: reduce_scatter, which blocks where it is issued, and the first all_gather",
        )
    return (
        "exposed on gloo: reduce_scatter blocks where it is issued, and torch prefetches no all_gather on a CPU",
    )


fsdp = prepared(lay_out_fsdp, strategies.fsdp, outlined=True)
hsdp = prepared(lay_out_hsdp, strategies.hsdp, outlined=True)
