"""Attention split over neighbouring ranks by heads, the sequence sharded between layers; torch's styles.

The ranks of a group take the same sequences, and each its own positions of them. Embeddings, norms, mixtures, head and
loss see those alone, so that their gradients are averaged over all ranks, as those of other tokens are. Attention
gathers the positions of its group, and scatters sums over heads.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from bench.world.world import World
from workloads.costs.communication_pattern import sent_bytes
from workloads.expert_parallel.expert_axis import group_of_mine
from workloads.model.timed_compute import TimedLinear
from workloads.model.transformer import Transformer
from workloads.step.training_step import Options

NOTE = "attention over tp: all else is whole on every rank, its mean over dp, all ranks; adp are copies of attention"
BYTES_FORMULA = "tp: 4 b s h e (t-1)/t a layer and microbatch, 6 where backward computes a layer again"
_SEQUENCE = Shard(1)


@dataclass(frozen=True, kw_only=True)
class AttentionAxis:
    """This rank's place among the ``size`` neighbours that split attention; a group is None where it would be of one.

    ``group`` are those neighbours, ``replicas`` hold the same heads for other sequences.
    """

    size: int
    place: int
    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process groups by the name of their axis."""
        named = (("tp", self.group), ("adp", self.replicas))
        return {name: group for name, group in named if group is not None}

    def positions(self, sequence: int) -> range:
        """Return where this rank's tokens stand in their sequence."""
        each = sequence // self.size
        return range(self.place * each, (self.place + 1) * each)

    def part_of(self, tokens: Tensor) -> Tensor:
        """Return this rank's positions of sequences (b, s + 1), and the token after them, (b, s / tp + 1)."""
        mine = self.positions(tokens.shape[1] - 1)
        return tokens[:, mine.start : mine.stop + 1]


def make_attention_axis(world: World, tp: int) -> AttentionAxis:
    """Return the axes of a mesh (dp, tp) of all ranks; every rank makes every group, none where ``tp`` is 1."""
    place = world.rank % tp
    if tp == 1:
        return AttentionAxis(size=1, place=0, group=None, replicas=None)
    ranks = torch.arange(world.size).view(-1, tp)
    return AttentionAxis(
        size=tp,
        place=place,
        group=group_of_mine(world, ranks.tolist()),
        replicas=group_of_mine(world, ranks.T.tolist()),
    )


def split_attention(model: Transformer, axis: AttentionAxis, device: torch.device) -> list[nn.Parameter]:
    """Split each layer's attention over the axis, and let the model stand at this rank's positions.

    Returns the parameters of attention: those gradients are sums over the axis of what each rank's loss asks for.
    Nothing is split over one rank.
    """
    if axis.group is None:
        return []
    mesh = DeviceMesh.from_group(axis.group, device.type, mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, _plan())
    if model.positions is not None:
        model.places = torch.tensor(axis.positions(model.positions.num_embeddings), device=device)
    return [parameter for name, parameter in model.named_parameters() if ".attention." in name]


def _plan() -> dict[str, ParallelStyle]:
    """Return the styles of attention that takes and gives (b, s / tp, h), plain tensors."""
    return {
        "attention": PrepareModuleInput(input_layouts=(_SEQUENCE,), desired_input_layouts=(Replicate(),)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=_SEQUENCE),
    }


def fill_sums(model: nn.Module, axis: AttentionAxis) -> None:
    """Let timed attention fill in what a sum over the axis would: as often its number as there are ranks."""
    for name, module in model.named_modules():
        if ".attention." in name and isinstance(module, TimedLinear):
            module.fill *= axis.size


def attention_sent_bytes(options: Options, tp: int) -> float:
    """Return 4 b s h e (t-1)/t a layer and microbatch: an all_gather and a reduce_scatter each way.

    That is attention's half of ``costs.tp_sent_bytes``; 6 in place of 4 where backward computes the layer again. The
    ends send nothing: a rank embeds its own positions, and takes its loss of them.
    """
    shape = options.shape
    activation = options.microbatch * shape.sequence * shape.hidden * options.dtype.itemsize
    flights = 4 if options.checkpointing == "none" else 6
    return flights * shape.layers * options.accumulation * sent_bytes("all_gather", activation, tp)
