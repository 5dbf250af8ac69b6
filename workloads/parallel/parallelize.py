"""Applies every parallelism to a model, or to the part of it that a pipeline stage holds.

The order is that of torchtitan: experts, tensor parallelism, activation checkpointing, data
parallelism. Parts are on the meta device until FSDP has sharded them, so that no rank ever has
more than one full parameter.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_methods import install_attention
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    find_moe_layers,
    replace_ffns_with_moe,
)
from parbench.workloads.mesh.dims import compute_chunk_size
from parbench.workloads.mesh.mesh import Mesh
from parbench.workloads.model.transformer import (
    DTYPES,
    Core,
    Transformer,
    checkpoint_layers,
    initialize,
    make_meta_model,
)
from parbench.workloads.parallel import data_parallel, tensor_parallel
from parbench.workloads.parallel.gradient_reducer import GradientReducer, sum_gradients
from parbench.workloads.parallel.positions import TokenPositions
from parbench.workloads.parallel.zero1 import DistributedOptimizer


@dataclass(kw_only=True)
class ParallelPart:
    """The distributed layers of one pipeline stage, with the objects that reduce gradients.

    Without a pipeline, the stage is the complete model.
    """

    part: Transformer
    """The layers of the stage on this rank, with embedding or head where the stage has them."""
    module: nn.Module
    """The module to call in a forward pass: ``part``, or DDP around it."""
    mesh: Mesh
    """This rank's process groups and device meshes by axis."""
    reduce_dtype: torch.dtype
    """The data type in which gradients are reduced."""
    logits_width: int
    """The number of entries of the vocabulary for which this rank computes logits."""
    partial_parameters: list[nn.Parameter]
    """The parameters whose gradients are summed over ``tp`` once per step.

    See ``list_partial_names``.
    """
    reducers: list[GradientReducer | DistributedOptimizer] = field(default_factory=list)
    """The objects that reduce gradients during backward, if neither DDP nor FSDP does it."""

    @property
    def moe_layers(self) -> Mapping[int, MoeLayer]:
        """The MoE layers of the stage, keyed by number of the layer in the model."""
        return {
            int(name): layer.ffn
            for name, layer in self.part.layers.items()
            if isinstance(layer.ffn, MoeLayer)
        }

    def sync_gradients(self, *, is_synced: bool) -> AbstractContextManager[object]:
        """Return the context manager in which forward and backward of a microbatch must run.

        With ``is_synced``, backward also reduces gradients. Otherwise gradients are only added up
        on this rank.
        """
        if isinstance(self.part, FSDPModule):
            self.part.set_requires_gradient_sync(is_synced)
        if isinstance(self.module, DistributedDataParallel) and not is_synced:
            return self.module.no_sync()
        if is_synced:
            for reducer in self.reducers:
                reducer.tracker.activate()
        return nullcontext()

    def finish_gradients(self, *, is_last: bool = True) -> None:
        """Wait until all gradients that backward computed are reduced over ranks.

        After the last microbatch, they are then the gradients of the mean loss, and the gradients
        of ``partial_parameters`` are summed over ``tp`` here. ``is_last`` is False after another
        microbatch, if every microbatch reduces. The next one adds its gradients to the reduced
        ones.
        """
        for reducer in self.reducers:
            reducer.tracker.start_remaining()
            reducer.wait(is_last=is_last)
        if is_last and self.partial_parameters:
            group = self.mesh.groups["tp"]
            sum_gradients(self.partial_parameters, group, self.reduce_dtype)

    def close(self) -> None:
        """Remove the hooks by which ``reducers`` observe the backward pass."""
        for reducer in self.reducers:
            reducer.tracker.close()


def build_parts(view: RankView, mesh: Mesh) -> dict[int, Transformer]:
    """Return this rank's layers for each of its pipeline stages, keyed by number of the stage.

    ``view`` is this rank's part of the step: its position on the mesh, and from it the stages and
    their layers. The layers are on the meta device, and have no weights yet. Only their routed
    experts are already distributed over the ``mesh``.
    """
    spec = view.spec
    parts = {}
    for stage in view.stages:
        first = sum(view.layers_by_stage[:stage])
        part = make_meta_model(
            spec.shape,
            DTYPES[spec.bytes_per_element],
            range(first, first + view.layers_by_stage[stage]),
            has_embedding=stage == 0,
            has_head=stage == len(view.layers_by_stage) - 1,
        )
        if spec.moe is not None:
            replace_ffns_with_moe(part, spec.shape, spec.moe, mesh=mesh)
        parts[stage] = part
    return parts


def parallelize(
    part: Transformer,
    world: World,
    mesh: Mesh,
    spec: StepSpec,
    positions: TokenPositions,
    attention: Core | None,
) -> ParallelPart:
    """Distribute the layers of one pipeline stage over the mesh, and initialize their weights.

    ``part`` is on the meta device and is changed. ``positions`` are the positions of this rank's
    tokens. ``attention(q, k, v)`` computes attention over the ranks of ``cp``. With None, each
    layer has its own. Weights depend only on ``world.seed``, not on the mesh.
    """
    dims = spec.dims
    part.positions = torch.tensor(positions.between_blocks, device=world.device)
    if positions.split is not None:
        attended = torch.tensor(positions.attended, device=world.device)
        install_attention(part, attention, attended)
    partial_names: set[str] = set()
    if mesh.tensor is not None:
        tensor_parallel.split_model(part, mesh.tensor, sequence_parallel=spec.sequence_parallel)
        if spec.sequence_parallel:
            partial_names = list_partial_names(part)
    checkpoint_layers(part, spec.checkpointing, spec.checkpoint_every)
    if dims.is_sharded:
        apply_fsdp(part, mesh, spec)
    initialize(part, world.seed, world.device)
    if mesh.tensor is not None and mesh.shards is None and part.token_embedding is not None:
        tensor_parallel.split_embedding_gradient(part.token_embedding)
    parallel_part = ParallelPart(
        part=part,
        module=part,
        mesh=mesh,
        reduce_dtype=DTYPES[spec.reduce_bytes],
        logits_width=compute_chunk_size(
            spec.shape.vocabulary, dims.tp, dims.index(world.rank, "tp")
        ),
        partial_parameters=[p for name, p in part.named_parameters() if name in partial_names],
    )
    if spec.zero1 != "distributed":
        apply_replication(parallel_part, spec, world.device)
    return parallel_part


def list_partial_names(part: Transformer) -> set[str]:
    """Return the names of the parameters that every ``tp`` rank holds in full.

    They are norms, learned positions, routers and shared experts. Routed experts are left out. With
    sequence parallelism, each rank has the gradients of these parameters for its part of the
    sequence only. They are therefore later summed over ``tp``. Call it before FSDP makes all
    parameters DTensors.
    """
    dense, _ = split_experts(part)
    replicated = {parameter for parameter in dense if not isinstance(parameter, DTensor)}
    return {name for name, parameter in part.named_parameters() if parameter in replicated}


def split_experts(part: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two lists: the parameters outside of routed experts, and those of routed experts.

    ``part`` is the model, or the part of it that one pipeline stage holds.
    """
    experts = [p for layer in find_moe_layers(part) for p in layer.experts.parameters()]
    expert_set = set(experts)
    return [p for p in part.parameters() if p not in expert_set], experts


def apply_fsdp(part: Transformer, mesh: Mesh, spec: StepSpec) -> None:
    """Shard a part of the model with FSDP2, in units that are gathered and reduced together.

    The units are the embeddings, each layer, each layer's experts, and the last norm with the head.
    The norm and the head stay gathered until their backward pass, which follows at once. In a
    pipeline, all parameters stay gathered until the end of the step.
    """
    assert mesh.shards is not None
    reduce_dtype = DTYPES[spec.reduce_bytes]
    reshard = spec.reshard and mesh.dims.pp == 1
    embedding_modules = (part.token_embedding, part.position_embedding)
    embeddings: list[nn.Module] = [module for module in embedding_modules if module is not None]
    head = [module for module in (part.norm, part.head) if module is not None]
    units: list[list[FSDPModule]] = []
    ignored = split_experts(part)[1] if mesh.expert_shards is None else []
    shard = partial(data_parallel.shard_modules, reduce_dtype=reduce_dtype, ignored=ignored)
    if embeddings:
        units.append([shard(embeddings, mesh.shards, reshard=reshard)])
    for layer in part.layers.values():
        nested = []
        if isinstance(layer.ffn, MoeLayer) and mesh.expert_shards is not None:
            experts = shard([layer.ffn.experts], mesh.expert_shards, reshard=reshard)
            # Tokens of several ranks meet in an expert, so that its replicas are fewer.
            experts.set_gradient_divide_factor(mesh.dims.data_ranks)
            experts.set_force_sum_reduction_for_comms(True)
            nested.append(experts)
        units.append([shard([layer], mesh.shards, reshard=reshard), *nested])
    if head:
        units.append([shard(head, mesh.shards, reshard=False)])
    root = shard([part], mesh.shards, reshard=reshard)
    if spec.prefetch:
        data_parallel.prefetch_units(root, units, mesh.shards.device_type)


def apply_replication(parallel_part: ParallelPart, spec: StepSpec, device: torch.device) -> None:
    """Set up the averaging over data ranks of the gradients that FSDP does not reduce.

    For a dense model without ``tp`` and ``pp``, ``parallel_part.module`` becomes DDP. Otherwise
    gradient reducers are added to ``parallel_part.reducers``.
    """
    part, mesh = parallel_part.part, parallel_part.mesh
    dims = mesh.dims
    dense, experts = split_experts(part)
    group = mesh.groups.get("dp")
    is_replicated = group is not None and not dims.is_sharded
    if is_replicated and dims.tp == dims.pp == 1 and not experts:
        parallel_part.module = data_parallel.wrap_in_ddp(
            part,
            mesh.groups["dp"],
            device,
            bucket_bytes=spec.bucket_bytes,
            reduce_dtype=parallel_part.reduce_dtype,
        )
        return
    make_reducer = partial(
        GradientReducer,
        divisor=dims.data_ranks,
        dtype=parallel_part.reduce_dtype,
        bucket_bytes=spec.bucket_bytes,
    )
    if is_replicated:
        parallel_part.reducers.append(make_reducer(dense, group))
    if experts and mesh.expert_shards is None:
        # With FSDP, ranks with the same experts differ along dp only.
        replicas = group if dims.is_sharded else mesh.groups.get("edp")
        if replicas is not None or dims.data_ranks > 1:
            parallel_part.reducers.append(make_reducer(experts, replicas))
