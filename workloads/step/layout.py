"""What a parallelism makes of the model: what its file gives, and all that a training step needs of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from parbench.bench.world.world import World, make_group
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.transformer import loss_of
from parbench.workloads.torch_internals import forget_meshes


def nothing() -> None:
    """Gradients are right as backward leaves them."""


def always(last: bool) -> AbstractContextManager[object]:
    """Synchronise gradients after every microbatch."""
    return nullcontext()


def reference_loss_of(model: nn.Module, tokens: Tensor, microbatch: int) -> Tensor:
    return loss_of(model, tokens)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model laid out over ranks: what is called, what is optimised, which groups carry it.

    ``module`` is called, ``model`` holds the parameters by their plain names. ``data_rank`` of ``data_size`` is this
    rank's part of the batch; ranks of a tensor axis share theirs. ``gradient_sync(last)`` surrounds the forward and
    backward pass of a microbatch, ``finalize_gradients`` comes after the last one's; where a rank then knows its share
    of them alone, ``gather_gradients`` shows a check all of them. ``reduced_dtype`` is that in which they are summed
    over data ranks, if it is not their own. ``made_groups`` end with it.

    ``loss`` is the mean loss of this rank's part of a microbatch (b, s + 1), where that is not what calling the module
    gives; ``forward_backward`` takes all microbatches in its own order and returns their mean loss, None on ranks that
    do not know it. Where ``holds_stage_only``, a rank holds the parameters of its own stages alone. ``exact_order`` are
    the microbatches as their gradients are accumulated: a single process that does the same gets the same bits.
    ``replica_group`` holds the same parameters as this rank: all ranks where nothing else is said, nobody where stages
    are. ``reference_model`` outlines the model of a single process and ``reference_loss`` is its mean loss over a
    global batch, where they are not the Transformer's.
    """

    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    axes: Mapping[str, dist.ProcessGroup]
    data_rank: int
    data_size: int
    gradient_sync: Callable[[bool], AbstractContextManager[object]] = always
    finalize_gradients: Callable[[], None] = nothing
    gather_gradients: Callable[[], None] = nothing
    reduced_dtype: torch.dtype | None = None
    loss: Callable[[Tensor], Tensor] | None = None
    forward_backward: Callable[[Sequence[Tensor]], Tensor | None] | None = None
    holds_stage_only: bool = False
    exact_order: Sequence[int] = ()
    replica_group: dist.ProcessGroup | None = None
    reference_model: Callable[[torch.dtype], nn.Module] | None = None
    reference_loss: Callable[[nn.Module, Tensor, int], Tensor] = reference_loss_of
    made_groups: tuple[dist.ProcessGroup, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        spec: StepSpec,
        world: World,
        model: nn.Module,
        axes: Mapping[str, dist.ProcessGroup],
        *,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> "Layout":
        """Return what follows from a step's description: this rank's part of the batch, and AdamW."""
        return Layout(
            module=module or model,
            model=model,
            optimizer=optimizer
            or make_optimizer(model.parameters(), dtype_of(spec), timed=spec.timed),
            axes=axes,
            data_rank=spec.at(world.rank).along("dp", "fsdp"),
            data_size=spec.size("dp", "fsdp"),
        )

    def loss_of(self, tokens: Tensor) -> Tensor:
        return loss_of(self.module, tokens) if self.loss is None else self.loss(tokens)

    def close(self) -> None:
        end_groups(self.made_groups)


def dtype_of(spec: StepSpec) -> torch.dtype:
    return {4: torch.float32, 2: torch.bfloat16}[spec.element_bytes]


def make_mesh(world: World, **axes: int) -> tuple[DeviceMesh, tuple[dist.ProcessGroup, ...]]:
    """Return a mesh of all ranks, outermost axis first, and the groups that were made for it."""
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    groups = [mesh.get_group(name) for name in axes]
    return mesh, tuple(group for group in groups if group is not world.group)


def group_of_mine(world: World, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group for each part of all ranks and return this rank's, a new one for all ranks too.

    Bytes are counted by group, so an axis of all ranks must not share the group of the world.
    """
    return make_group(world, partition)


def end_groups(groups: Collection[dist.ProcessGroup]) -> None:
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        # to DTensor, meshes of the same ranks and names are one: a later layout would be given the groups of this
        forget_meshes()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be distributed, gathered on every rank of its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
