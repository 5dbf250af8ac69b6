"""The ranks that share experts and their copies, and those that share sequences and split attention over them.

Ranks of ``tp`` take the same sequences, and each its own positions of them. Embeddings, norms, mixtures, head and loss
see those alone, so that their gradients are averaged over all ranks, as those of other tokens are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.expert_parallel.moe_layer import ExpertPlacement, make_expert_placement
from parbench.workloads.model.timed_compute import TimedLinear
from parbench.workloads.model.transformer import Transformer
from parbench.workloads.step.layout import group_of_mine
from parbench.workloads.tensor_parallel.tensor_parallel import split_blocks

TP_NOTE = "attention over tp: all else is whole on every rank, its mean over dp, all ranks; adp are copies of attention"


@dataclass(frozen=True, kw_only=True)
class Axes:
    """This rank's group of each axis that has several ranks, never the world's own.

    ``tp`` are neighbours that split attention, ``adp`` hold the same heads for other sequences. A copy of the experts
    are ``ep`` times ``etp`` neighbours in order: blocks of ``etp`` hold the same experts, a part of each;
    ranks of the same place in their blocks exchange tokens (``ep``); ``edp`` hold the same part in other copies.
    """

    groups: Mapping[str, dist.ProcessGroup]
    placement: ExpertPlacement
    ep_groups: Sequence[Sequence[int]]
    etp_groups: Sequence[Sequence[int]]


def make_axes(world: World, moe: Moe, tp: int) -> Axes:
    """Make the groups; every rank of the world makes every one."""
    ranks = torch.arange(world.size)
    copies = ranks.view(-1, moe.ep, moe.etp)
    copy = copies[world.rank // (moe.ep * moe.etp)]
    partitions = {
        "tp": ranks.view(-1, tp),
        "adp": ranks.view(-1, tp).T if tp > 1 else ranks.view(-1, 1),
        "ep": copies.transpose(1, 2).reshape(-1, moe.ep),
        "etp": copies.reshape(-1, moe.etp),
        "edp": copies.permute(1, 2, 0).reshape(moe.ep * moe.etp, -1),
    }
    wanted = {
        name: partition.tolist() for name, partition in partitions.items() if partition.shape[1] > 1
    }
    groups = {name: group_of_mine(world, partition) for name, partition in wanted.items()}
    return Axes(
        groups=groups,
        placement=make_expert_placement(groups, copy.tolist(), world.device),
        ep_groups=partitions["ep"].tolist(),
        etp_groups=partitions["etp"].tolist(),
    )


def split_attention(
    model: Transformer, group: dist.ProcessGroup, positions: Sequence[int], device: torch.device
) -> list[nn.Parameter]:
    """Split each layer's attention over a group, and let the model stand at this rank's positions.

    Returns the parameters of attention: those gradients are sums over the group of what each rank's loss asks for.
    """
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",))
    split_blocks(model.layers, mesh, mixtures=True)
    if model.positions is not None:
        model.places = torch.tensor(positions, device=device)
    return [parameter for name, parameter in model.named_parameters() if ".attention." in name]


def fill_sums(model: nn.Module, tp: int) -> None:
    """Let timed attention fill in what a sum over ``tp`` would: as often its number as there are ranks."""
    for name, module in model.named_modules():
        if ".attention." in name and isinstance(module, TimedLinear):
            module.fill *= tp
