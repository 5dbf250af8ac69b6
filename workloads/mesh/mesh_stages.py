"""A rank's part of a model on a mesh: its groups, tokens and stages, sums of gradients, shares of timed compute."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import record_function

from parbench.bench.results.details import Action
from parbench.bench.world.world import World
from parbench.workloads.context_parallel.context_case import ContextPlan
from parbench.workloads.costs.parameter_table import Kind, layer_weights
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe, count_expert_parameters
from parbench.workloads.expert_parallel.moe_layer import (
    ExpertPlacement,
    MoeLayer,
    make_expert_placement,
)
from parbench.workloads.mesh.axes import (
    expert_copies,
    expert_groups,
    expert_parts,
    groups_along,
    multiplied,
)
from parbench.workloads.model.shapes import Shape, num_ffn_matrices
from parbench.workloads.model.timed_compute import TimedLinear
from parbench.workloads.pipeline_parallel.stages import Chunk, Recorder
from parbench.workloads.step.layout import group_of_mine, local, make_mesh, nothing
from parbench.workloads.step.parity import count_unfilled

Loss = Callable[[Tensor, Tensor], Tensor]
"""A microbatch's part of what is to be trained on, of logits and targets."""
Begin = Callable[[Mapping[int, MoeLayer], int], None]
"""What comes before a stage's pass of a microbatch."""
Train = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor | None]
"""What takes the gradients of all microbatches' tokens and targets, and returns the sum of their losses, if known."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The mesh of all axes with several ranks, and this rank's group of each axis that carries something.

    ``dp`` are all ranks that hold the same shards for other tokens, those of ``cp`` too; ``ep`` deal out experts,
    ``etp`` split each, ``edp`` hold the same ones. ``replica_group`` hold the same layers.
    """

    mesh: DeviceMesh
    axes: Mapping[str, dist.ProcessGroup]
    replica_group: dist.ProcessGroup
    held: ExpertPlacement
    made: tuple[dist.ProcessGroup, ...]


def make_groups(world: World, spec: StepSpec) -> Groups:
    """Make the mesh and the groups; every rank of the world makes every one."""
    axes = {name: size for name, size in multiplied(spec.mesh).items() if size > 1} or {
        "dp": world.size
    }
    mesh, made = make_mesh(world, **axes)
    partitions, held = {}, ExpertPlacement()
    if spec.size("cp") > 1:
        partitions["dp"] = groups_along(spec.mesh, "dp", "cp")
    if "pp" in axes:
        partitions["replica_group"] = groups_along(spec.mesh, "dp", "fsdp", "cp", "tp")
    if spec.moe is not None:
        wanted = {
            "ep": expert_groups(spec.mesh),
            "etp": expert_parts(spec.mesh),
            "edp": expert_copies(spec.mesh),
        }
        partitions |= {name: groups for name, groups in wanted.items() if len(groups[0]) > 1}
    further = {name: group_of_mine(world, partition) for name, partition in partitions.items()}
    made = (*made, *further.values())
    replica_group = further.pop("replica_group", world.group)
    found = {name: mesh.get_group(name) for name in axes} | further
    if spec.moe is not None:
        [column] = [ranks for ranks in expert_groups(spec.mesh) if world.rank in ranks]
        copy = [next(part for part in expert_parts(spec.mesh) if rank in part) for rank in column]
        held = make_expert_placement(found, copy, world.device)
    return Groups(mesh=mesh, axes=found, replica_group=replica_group, held=held, made=made)


def plan_of(spec: StepSpec) -> ContextPlan:
    cp, sequence = spec.size("cp"), spec.shape.sequence
    ulysses = cp if spec.cp_method == "ulysses" else 1
    return ContextPlan(
        method=spec.cp_method, mask="causal", sequence=sequence, ranks=cp, ulysses=ulysses
    )


def tokens_of(spec: StepSpec, coordinate: Mapping[str, int]) -> tuple[int, ...]:
    """Return the positions of the rank at a coordinate: its run over ``tp`` of its part of ``cp``."""
    attended = plan_of(spec).tokens(coordinate["cp"])
    each = len(attended) // spec.size("tp")
    return tuple(attended[coordinate["tp"] * each :][:each])


def train_alone(chunk: Chunk, loss: Loss, begin: Begin) -> Train:
    """Return what trains a rank that has all layers: forward and backward of one microbatch after the other."""

    def train(tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        losses = []
        for i, (given, wanted) in enumerate(zip(tokens, targets, strict=True)):
            if isinstance(chunk, FSDPModule):
                chunk.set_requires_gradient_sync(
                    i == len(tokens) - 1
                )  # FSDP reduces after the last one alone
            begin(mixtures_in(chunk), i)
            with record_function("parbench:forward"):
                part = loss(chunk(given), wanted)
            with record_function("parbench:backward"):
                part.backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        return torch.stack(losses).sum()

    return train


class RoutingRecorder(Recorder):
    """Stamps actions, and lets its stage's mixtures know before which microbatch comes, for backward computes again."""

    def __init__(
        self, device: torch.device, begin: Begin, before: Callable[[], None] = nothing
    ) -> None:
        super().__init__(device, before)
        self._begin = begin
        self.chunks: Mapping[int, Chunk] = {}

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        if action.kind in ("F", "B"):
            self._begin(mixtures_in(self.chunks[action.stage]), action.microbatch)
        with super().running(action):
            yield


def mixtures_in(chunk: Chunk) -> dict[int, MoeLayer]:
    return {
        int(name): layer.ffn
        for name, layer in chunk.layers.items()
        if isinstance(layer.ffn, MoeLayer)
    }


def shard(module: nn.Module, groups: Groups, mixtures: Iterable[MoeLayer], *, kept: bool) -> None:
    """Shard a layer, or what is left of a stage, by FSDP2, but for its mixtures' experts; ``kept`` stays gathered."""
    ignored: set[Any] = {p for mixture in mixtures for p in mixture.experts.parameters()}
    fully_shard(
        module, mesh=groups.mesh["fsdp"], reshard_after_forward=not kept, ignored_params=ignored
    )


def by_kind(model: nn.Module, *, split: bool) -> dict[Kind, list[nn.Parameter]]:
    """Return parameters by what sums their gradients are; see ``ParameterPart``."""
    found: dict[Kind, list[nn.Parameter]] = {"split": [], "whole": [], "routed": []}
    for name, parameter in model.named_parameters():
        mixture = ".ffn.router." in name or ".ffn.shared." in name
        block = ".attention." in name or (".ffn." in name and not mixture)
        whole_or_split: Kind = "split" if split and block else "whole"
        found["routed" if ".ffn.experts." in name else whole_or_split].append(parameter)
    return found


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums of gradients by axis, one all_reduce each; ``shards`` are the ranks whose mean FSDP has taken already."""

    parameters: Mapping[Kind, Sequence[nn.Parameter]]
    groups: Mapping[str, dist.ProcessGroup]
    shards: int

    def take(self) -> None:
        """Sum over ``tp`` what it does not split, over ``dp`` all but experts, over ``edp`` those; see ``by_kind``."""
        whole, split, routed = (
            _gradients_of(self.parameters[kind]) for kind in ("whole", "split", "routed")
        )
        for axis, gradients in (("tp", whole), ("dp", [*split, *whole]), ("edp", routed)):
            if axis in self.groups and gradients:
                sum_together(gradients, self.groups[axis])
        if self.shards > 1:
            for gradient in routed:
                gradient /= self.shards


def _gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of gradients, those of no elements too: all ranks must call alike."""
    found = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    assert len(found) == len(parameters), "every parameter is used in every step"
    return found


def sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors of one type over a group, as one."""
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(together, group=group)
    summed = torch.split(together, [gradient.numel() for gradient in gradients])
    for gradient, values in zip(gradients, summed, strict=True):
        gradient.copy_(values.view_as(gradient))


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Parts of a rank's whole forward pass of a microbatch, T, which add up to 1, by what products take.

    Each has the share of its multiply-adds a token: linear layers their weights, routed experts those of the k that a
    token meets, causal attention h (s + 1), of q k^T and of what comes out over (s + 1) / 2 keys. Attention counts
    where ``cp`` cuts it into blocks, which wait; elsewhere it costs nothing, as in other timed steps.
    """

    linear: float
    experts: float
    attention: float


def shares_of(shape: Shape, moe: Moe | None, *, cp: int) -> Shares:
    linear, experts = layer_weights(shape), 0.0
    if moe is not None:
        each = count_expert_parameters(shape, moe)
        linear += moe.shared * each - num_ffn_matrices(shape) * shape.hidden * shape.ffn
        experts = float(moe.top_k * each)
    attention = shape.hidden * (shape.sequence + 1) if cp > 1 else 0.0
    whole = linear + experts + attention
    return Shares(linear=linear / whole, experts=experts / whole, attention=attention / whole)


def count_wrong_fills(model: nn.Module, times: float, *, tp: int, num_ranks: int) -> int:
    """Return how many weight gradients of linear layers are not ``times`` the mean of what data ranks fill in.

    Where ``tp`` splits none they are ``tp`` times that; ``num_ranks`` add to them at most.
    """
    wrong = 0
    for name, module in model.named_modules():
        if isinstance(module, TimedLinear):
            expected = (
                times * module.mean_fill * (tp if name == "head" or ".ffn.shared." in name else 1)
            )
            gradient = None if module.weight.grad is None else local(module.weight.grad)
            wrong += count_unfilled(gradient, expected, num_ranks)
    return wrong
