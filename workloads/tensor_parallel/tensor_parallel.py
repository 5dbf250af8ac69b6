"""Tensor parallelism by torch's styles: attention and FFN split by columns, then by rows.

``tp`` keeps activations whole between them, four all_reduces a layer; ``tp_sp`` shards them along the sequence, four
all_gathers and four reduce_scatters a layer, the same bytes. Embeddings and head are not split. ``tp_fsdp`` is ``tp``
inside FSDP's shards, on a mesh of two axes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.data_parallel.fsdp import Begin, drawing, shard
from parbench.workloads.model.transformer import Transformer
from parbench.workloads.step.gate import prepared
from parbench.workloads.step.layout import Layout, make_mesh

_SEQUENCE = Shard(1)


def lay_out_tp(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    """Split every layer over all ranks, and where the step is sequence parallel what lies between."""
    mesh, made = make_mesh(world, tp=world.size)
    split_model(model, mesh, drawing(world), along_sequence=spec.sequence_parallel)
    layout = Layout.of(spec, world, model, {"tp": mesh.get_group("tp")})
    return replace(
        layout, finalize_gradients=partial(sum_partial_gradients, model), made_groups=made
    )


def lay_out_tp_fsdp(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    mesh, made = make_mesh(world, dp=spec.mesh["fsdp"], tp=spec.mesh["tp"])
    draw = drawing(world)

    def begin(part: nn.Module, name: str) -> None:
        draw(part, name)
        if part is not model:
            split_layer(part, mesh["tp"])

    shard(model, mesh["dp"], begin, reshard=True, prefetch="default")
    layout = Layout.of(spec, world, model, {name: mesh.get_group(name) for name in ("dp", "tp")})
    return replace(layout, made_groups=made)


def split_layer(layer: nn.Module, mesh: DeviceMesh, *, along_sequence: bool = False) -> None:
    """Split attention and FFN by torch's styles; along the sequence, shard what lies between too."""
    norms = (
        {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        if along_sequence
        else {}
    )
    styles = _styles(layer, along_sequence=along_sequence, as_dtensors=along_sequence)
    parallelize_module(layer, mesh, {**styles, **norms})


def split_model(
    model: Transformer, mesh: DeviceMesh, begin: Begin, *, along_sequence: bool
) -> None:
    """Split each layer, begun right before."""
    for i, layer in enumerate(model.layers):
        begin(layer, f"layers.{i}")
        split_layer(layer, mesh, along_sequence=along_sequence)
    begin(model, "")
    if not along_sequence:
        return

    def scatter(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[_SEQUENCE]), *args[1:])

    def gather(module: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
        return output.redistribute(placements=[Replicate()]).to_local()

    parallelize_module(model, mesh, {"norm": SequenceParallel()})
    # each rank keeps its part of the sequence, until the head, which is not split, has the whole again
    model.layers[0].register_forward_pre_hook(scatter)
    model.norm.register_forward_hook(gather)


def split_blocks(layers: Iterable[nn.Module], mesh: DeviceMesh, *, mixtures: bool) -> None:
    """Split attention, and FFNs where they are no mixtures; blocks take and give plain tensors (b, s / tp, h).

    Attention and FFN gather the positions of their group and scatter sums over heads and columns. Embeddings, norms,
    mixtures, head and loss see a rank's own positions alone, so that their gradients are of those: they are summed over
    ``tp`` once a step, as those of other tokens are over the data axes.
    """
    for layer in layers:
        parallelize_module(layer, mesh, _styles(layer, along_sequence=True, ffn=not mixtures))


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum over ranks, once, the gradients of which each has its sequence's part; the optimizer would at every use."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(
            placement.is_partial() for placement in gradient.placements
        ):
            parameter.grad = gradient.redistribute(placements=[Replicate()])


def _styles(
    layer: nn.Module, *, along_sequence: bool, as_dtensors: bool = False, ffn: bool = True
) -> dict[str, ParallelStyle]:
    """Return the styles of a layer whose blocks take and give whole activations, or their part of the sequence."""
    outside = _SEQUENCE if along_sequence else Replicate()
    gathered = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    rows = partial(RowwiseParallel, output_layouts=outside, use_local_output=not as_dtensors)
    blocks: dict[str, tuple[str, ...]] = {"attention": ("q", "k", "v", "out")}
    if ffn:
        blocks["ffn"] = ("up", "down") if layer.ffn.gate is None else ("gate", "up", "down")  # type: ignore[union-attr]
    styles: dict[str, ParallelStyle] = {}
    for block, (*columns, last) in blocks.items():
        styles |= {block: gathered, **{f"{block}.{name}": ColwiseParallel() for name in columns}}
        styles[f"{block}.{last}"] = rows()
    return styles


tp = prepared(lay_out_tp, strategies.tp, outlined=True)
tp_sp = prepared(lay_out_tp, strategies.tp_sp, outlined=True)
tp_fsdp = prepared(lay_out_tp_fsdp, strategies.tp_fsdp, outlined=True)
