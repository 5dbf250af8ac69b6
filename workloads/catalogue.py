"""The training steps that can be measured, declared without torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Definition, Params, only_itself
from bench.plan.params import Param, Value
from bench.text import UserError
from workloads.context_parallel.context_case import PARAMS as CONTEXT
from workloads.context_parallel.context_case import refuse_context, refuse_place
from workloads.costs import strategies
from workloads.costs.strategies import Strategy
from workloads.expert_parallel.moe_case import LAYER_PARAMS, STEP_PARAMS, refuse_moe
from workloads.mesh.mesh_case import PARAMS as HYBRID
from workloads.mesh.mesh_case import refuse_hybrid, with_experts
from workloads.model.shapes import BATCH, BUCKET, COMMON, COMPUTE, MODEL, PRECISION, Shape, parse_compute, shape_of
from workloads.pipeline_parallel.pipeline_case import PARAMS as PIPELINE
from workloads.pipeline_parallel.pipeline_case import each_schedule, refuse_pipeline

Refuse = Callable[[Shape, Mapping[str, Value], int], str | None]

STATIC_GRAPH = Param(name="static_graph", kind="bool", default=False, optional=True, help="DDP's static graph")
NO_SYNC = Param(
    name="no_sync", kind="bool", default=False, optional=True, help="sum gradients after the last microbatch alone"
)
OPTIMIZER = Param(
    name="optimizer",
    kind="str",
    default="zero_redundancy",
    choices=("zero_redundancy", "distributed"),
    optional=True,
    help="torch's: all_reduce, then broadcasts; distributed: reduce_scatter, then all_gather, as the literature has it",
)
RESHARD = Param(
    name="reshard",
    kind="bool",
    default=True,
    optional=True,
    help="free gathered parameters after forward and gather them again for backward",
)
PREFETCH = Param(
    name="prefetch",
    kind="str",
    default="default",
    choices=("default", "explicit"),
    optional=True,
    help="explicit: gather each layer's parameters one layer ahead",
)
SHARD = Param(name="shard", kind="int", default=0, minimum=0, optional=True, help="ranks of a copy; 0 = half of all")
TP = Param(name="tp", kind="int", default=2, minimum=1, help="ranks that split a layer")


def refuse_split(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Refuse layers that do not divide among the ranks that split them; the equation with its numbers."""
    tp = int(params.get("tp", nproc))
    for name in ("heads", "kv_heads", "hidden", "ffn"):
        if getattr(shape, name) % tp:
            return f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    return None


def refuse_sequence(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Refuse what cannot be split, and sequences that do not divide."""
    reason = refuse_split(shape, params, nproc)
    return reason or (f"sequence({shape.sequence}) % tp({nproc}) != 0" if shape.sequence % nproc else None)


def refuse_mesh(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Refuse a tensor axis that does not divide the ranks."""
    tp = int(params["tp"])
    if nproc % tp:
        return f"dp({nproc // tp}) * tp({tp}) != world size({nproc})"
    return refuse_split(shape, params, nproc)


def refuse_shards(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Refuse shards that do not divide the ranks."""
    shard = int(params["shard"]) or max(2, nproc // 2)
    if nproc % shard:
        return f"replicate({nproc // shard}) * shard({shard}) != world size({nproc})"
    return None


STRATEGIES: dict[str, Strategy] = {}
"""What describes each step, by its short name: of those that are whole steps."""


def _step(
    name: str,
    target: str,
    help_text: str,
    *more: Param,
    strategy: Strategy | None = None,
    refuse: Refuse | None = None,
    place: Callable[[Params, WorldSpec], str | None] | None = None,
    expand: Callable[[Params, WorldSpec], Iterable[Params]] = only_itself,
    common: tuple[Param, ...] = COMMON,
    tags: tuple[str, ...] = (),
) -> Definition:
    if strategy is not None:
        STRATEGIES[name] = strategy

    def refused(params: Mapping[str, Value], spec: WorldSpec) -> str | None:
        try:
            shape = shape_of(params)
            parse_compute(str(params.get("compute", COMPUTE.default)))
        except UserError as error:
            return str(error)
        reason = None if refuse is None else refuse(shape, params, spec.nproc)
        return reason or (None if place is None else place(params, spec))

    return Definition(
        name=f"workload.{name}",
        target=f"workloads.{target}",
        help=help_text,
        params=(*common, *more),
        tags=tags,
        refuse=refused,
        expand=expand,
    )


DEFINITIONS = (
    _step(
        "ddp",
        "data_parallel.ddp:prepare",
        "DDP: gradients summed in buckets under backward",
        BUCKET,
        STATIC_GRAPH,
        NO_SYNC,
        tags=("smoke", "node"),
        strategy=strategies.ddp,
    ),
    _step(
        "ddp_bf16",
        "data_parallel.ddp_bf16:prepare",
        "DDP whose gradients are summed in bfloat16, by torch's compressing hook",
        BUCKET,
        STATIC_GRAPH,
        strategy=lambda *case: replace(strategies.ddp(*case), reduced_bytes=2, each_microbatch=False),
    ),
    _step(
        "zero1",
        "data_parallel.zero1:prepare",
        "ZeRO-1: data parallel with the optimizer's state sharded, by torch or by flat buckets",
        BUCKET,
        OPTIMIZER,
        strategy=strategies.zero1,
    ),
    _step(
        "fsdp",
        "data_parallel.fsdp:fsdp",
        "FSDP2: parameters, gradients and optimizer state sharded; ZeRO-3, or ZeRO-2 by reshard=false",
        RESHARD,
        PREFETCH,
        NO_SYNC,
        tags=("smoke",),
        strategy=strategies.fsdp,
    ),
    _step(
        "hsdp",
        "data_parallel.fsdp:hsdp",
        "FSDP2 sharded within groups, replicated across them",
        PREFETCH,
        SHARD,
        refuse=refuse_shards,
        strategy=strategies.hsdp,
    ),
    _step(
        "tp",
        "tensor_parallel.tensor_parallel:tp",
        "tensor parallel attention and FFN, activations whole between them",
        refuse=refuse_split,
        strategy=strategies.tp,
    ),
    _step(
        "tp_sp",
        "tensor_parallel.tensor_parallel:tp_sp",
        "tensor parallel, the sequence sharded between blocks",
        refuse=refuse_sequence,
        tags=("smoke",),
        strategy=strategies.tp_sp,
    ),
    _step(
        "tp_fsdp",
        "tensor_parallel.tensor_parallel:tp_fsdp",
        "tensor parallel layers inside FSDP2's shards",
        TP,
        refuse=refuse_mesh,
        tags=("smoke",),
        strategy=strategies.tp_fsdp,
    ),
    _step(
        "ep_dispatch",
        "expert_parallel.layer_step:prepare_dispatch",
        "expert parallel dispatch and combine alone: tokens to their experts' ranks and back",
        *LAYER_PARAMS,
        refuse=refuse_moe,
        common=(*MODEL, BATCH[0], PRECISION),
    ),
    _step(
        "ep_layer",
        "expert_parallel.layer_step:prepare",
        "one expert parallel mixture of experts, forward and backward",
        *LAYER_PARAMS,
        refuse=refuse_moe,
        common=(*MODEL, BATCH[0], PRECISION, COMPUTE),
    ),
    _step(
        "ep_step",
        "expert_parallel.expert_step:prepare",
        "a step with mixtures of experts, expert parallel inside data parallel, attention split where asked",
        *STEP_PARAMS,
        tags=("smoke",),
        refuse=refuse_moe,
        strategy=strategies.ep_step,
    ),
    _step(
        "pp",
        "pipeline_parallel.pipeline_step:prepare",
        "pipeline parallel: layers on ranks, microbatches through them, by any of ten schedules or your own",
        *PIPELINE,
        tags=("smoke",),
        refuse=refuse_pipeline,
        expand=each_schedule,
        common=tuple(param for param in COMMON if param.name != "accumulation"),
        strategy=strategies.pp,
    ),
    _step(
        "cp",
        "context_parallel.context_step:prepare",
        "context parallel: each rank holds a part of every sequence, attention reaches all of it",
        *CONTEXT,
        tags=("smoke",),
        refuse=refuse_context,
        place=refuse_place,  # its methods are not all there on every device
        strategy=strategies.cp,
    ),
    _step(
        "hybrid",
        "mesh.mesh_step:prepare",
        "several parallelisms on one mesh: data, shards, pipeline, context, tensor and expert parallel in one step",
        *HYBRID,
        refuse=refuse_hybrid,
        expand=with_experts,
        common=tuple(param for param in COMMON if param.name != "accumulation"),
        strategy=strategies.mesh,
    ),
)
