"""The training steps that can be measured, declared without torch."""

from collections.abc import Callable, Iterable, Mapping

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, Params, keep_params
from parbench.bench.plan.catalogue import GLOO_HINT
from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_case import PARAMS as CONTEXT
from parbench.workloads.costs import strategies
from parbench.workloads.costs.strategies import Strategy
from parbench.workloads.expert_parallel.moe_case import LAYER_PARAMS, MOE_PARAMS
from parbench.workloads.mesh.axes import PARAMS as HYBRID
from parbench.workloads.mesh.axes import with_experts
from parbench.workloads.model.shapes import BATCH, BUCKET, COMMON, COMPUTE, MODEL, PRECISION
from parbench.workloads.pipeline_parallel.pipeline_case import PARAMS as PIPELINE
from parbench.workloads.pipeline_parallel.pipeline_case import expand_all_schedules

STATIC_GRAPH = Param(
    name="static_graph", kind="bool", default=False, optional=True, help="DDP's static graph"
)
NO_SYNC = Param(
    name="no_sync",
    kind="bool",
    default=False,
    optional=True,
    help="sum gradients after the last microbatch only",
)
GRAD_COMPRESSION = choice(
    "grad_compression",
    "bf16: sum gradients in bfloat16, once per step, by torch's communication hook",
    "none",
    "bf16",
)
OPTIMIZER = choice(
    "optimizer",
    "zero_redundancy: torch's, all_reduce then broadcasts; distributed: reduce_scatter then all_gather",
    *("zero_redundancy", "distributed"),
)
FREED = "free gathered parameters after forward and gather them again for backward"
RESHARD = Param(name="reshard", kind="bool", default=True, optional=True, help=FREED)
PREFETCH = choice(
    "prefetch", "explicit: gather each layer's parameters one layer ahead", "default", "explicit"
)
SHARD = Param(
    name="shard",
    kind="int",
    default=0,
    minimum=0,
    optional=True,
    help="ranks that share a copy; 0 = half",
)
EP_FSDP = Param(
    name="fsdp",
    kind="bool",
    default=False,
    optional=True,
    help="shard all but the experts with FSDP2, instead of DDP",
)
EP_TP = Param(
    name="tp",
    kind="int",
    default=1,
    minimum=1,
    optional=True,
    help="ranks that split attention and its sequences; 1 = data parallel",
)
TP = Param(name="tp", kind="int", default=2, minimum=1, help="ranks that split a layer")


OF_LAYERS = (*MODEL, BATCH[0], PRECISION)
OF_MICROBATCHES = tuple(param for param in COMMON if param.name != "accumulation")
GLOO_ON_GPUS = ("ddp", "zero1", "ep_dispatch", "allgather_kv", "ulysses")
"""The steps, and methods of context parallelism, that gloo carries on GPUs: others send from rank to rank, or gather by
DTensor, whose coalesced all_gather takes CPU tensors for granted."""
STRATEGIES: dict[str, Strategy] = {}
"""What describes each step, by its short name: of those that are whole steps."""


def _step(
    name: str,
    target: str,
    help_text: str,
    *more: Param,
    strategy: Strategy,
    whole: bool = True,
    expand: Callable[[Params, WorldSpec], Iterable[Params]] = keep_params,
    common: tuple[Param, ...] = COMMON,
    tags: tuple[str, ...] = (),
) -> BenchmarkDefinition:
    if whole:
        STRATEGIES[name] = strategy

    def refused(params: Mapping[str, Value], spec: WorldSpec) -> str | None:
        try:
            strategy(params, spec.nproc, spec.device)
        except UserError as error:
            return str(error)
        if (
            spec.gloo_on_gpus
            and name not in GLOO_ON_GPUS
            and params.get("method") not in GLOO_ON_GPUS
        ):
            method = f" with method={params['method']}" if "method" in params else ""
            return f"gloo carries no CUDA tensors in what {name}{method} sends, or is checked by: {GLOO_HINT}"
        return None

    return BenchmarkDefinition(
        name=f"workload.{name}",
        target=f"parbench.workloads.{target}",
        help=help_text,
        params=(*common, *more),
        tags=tags,
        refusal=refused,
        expand=expand,
    )


# fmt: off
DEFINITIONS = (
    _step(
        "ddp", "data_parallel.ddp:prepare", "DDP: gradients summed in buckets",
        BUCKET, STATIC_GRAPH, NO_SYNC, GRAD_COMPRESSION, tags=("smoke", "node"), strategy=strategies.ddp,
    ),
    _step(
        "zero1", "data_parallel.zero1:prepare",
        "ZeRO-1: data parallel, optimizer state sharded",
        BUCKET, OPTIMIZER, strategy=strategies.zero1,
    ),
    _step(
        "fsdp", "data_parallel.fsdp:fsdp",
        "FSDP2: parameters and all state sharded; ZeRO-3, or ZeRO-2 with reshard=false",
        RESHARD, PREFETCH, NO_SYNC, tags=("smoke",), strategy=strategies.fsdp,
    ),
    _step(
        "hsdp", "data_parallel.fsdp:hsdp", "FSDP2, sharded within groups and replicated",
        PREFETCH, SHARD, strategy=strategies.hsdp,
    ),
    _step(
        "tp", "tensor_parallel.tensor_parallel:tp", "tensor parallel; activations between blocks are whole",
        strategy=strategies.tp,
    ),
    _step(
        "tp_sp", "tensor_parallel.tensor_parallel:tp_sp", "tensor and sequence parallel",
        tags=("smoke",), strategy=strategies.tp_sp,
    ),
    _step(
        "tp_fsdp", "tensor_parallel.tensor_parallel:tp_fsdp", "tensor parallel layers inside FSDP2",
        TP, tags=("smoke",), strategy=strategies.tp_fsdp,
    ),
    _step(
        "ep_dispatch", "expert_parallel.layer_step:prepare_dispatch",
        "expert parallel: tokens to experts and back; dispatch and combine alone",
        *LAYER_PARAMS, common=OF_LAYERS, strategy=strategies.ep_step, whole=False,
    ),
    _step(
        "ep_layer", "expert_parallel.layer_step:prepare",
        "expert parallel: one layer, both passes",
        *LAYER_PARAMS, common=(*OF_LAYERS, COMPUTE), strategy=strategies.ep_step, whole=False,
    ),
    _step(
        "ep_step", "expert_parallel.expert_step:prepare",
        "expert parallel inside data parallel; attention split with tp=",
        *MOE_PARAMS, EP_FSDP, EP_TP, tags=("smoke",), strategy=strategies.ep_step,
    ),
    _step(
        "pp", "pipeline_parallel.pipeline_step:prepare",
        "pipeline parallel; schedules from GPipe to DualPipeV, or your own with order=",
        *PIPELINE, tags=("smoke",), expand=expand_all_schedules, common=OF_MICROBATCHES,
        strategy=strategies.pp,
    ),
    _step(
        "cp", "context_parallel.context_step:prepare",
        "context parallel: sequences split over ranks",
        *CONTEXT, tags=("smoke",),
        strategy=strategies.cp,
    ),
    _step(
        "hybrid", "mesh.mesh_step:prepare",
        "any of these on one mesh; --mesh dp=2,pp=2,tp=2",
        *HYBRID, expand=with_experts, common=OF_MICROBATCHES, strategy=strategies.mesh,
    ),
)
# fmt: on
