"""The training steps that can be measured, declared without torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, Params
from parbench.bench.plan.catalogue import GLOO_HINT
from parbench.bench.plan.params import Param, Value
from parbench.bench.text import UserError
from parbench.workloads import presets
from parbench.workloads.expert_parallel.moe_case import LAYER_PARAMS, MOE_PARAMS
from parbench.workloads.layers.tp_layer_case import FFN_STYLE, LINEAR_STYLE, make_tp_layer
from parbench.workloads.model.shapes import (
    COMMON,
    MICROBATCH,
    MICROBATCHES,
    MODEL,
    PRECISION,
)
from parbench.workloads.pipeline_parallel.pipeline_case import (
    DEFAULT_MICROBATCHES,
)
from parbench.workloads.pipeline_parallel.pipeline_case import PARAMS as PIPELINE
from parbench.workloads.presets import (
    BUCKET,
    CONTEXT,
    HYBRID,
    NO_SYNC,
    OPTIMIZER,
    PREFETCH,
    PRESETS,
    RESHARD,
)

ONE_LAYER = (*MODEL, MICROBATCH, PRECISION)
"""The parameters that the benchmarks of one layer share with training steps."""
GLOO_ON_GPUS = ("ddp", "zero1", "ep_dispatch")
"""The names of the steps that can run on GPUs with gloo.

The other steps send from rank to rank, or gather by DTensor, whose coalesced all_gather needs
tensors on the CPU.
"""


def _list_common_params(microbatches: int) -> tuple[Param, ...]:
    """Return the settings that all training steps have, such as the shape of the model.

    ``microbatches`` is the default number of microbatches.
    """
    default = replace(MICROBATCHES, default=microbatches)
    return tuple(default if param is MICROBATCHES else param for param in COMMON)


def _define_step(
    name: str,
    help_text: str,
    *more: Param,
    common: tuple[Param, ...] = COMMON,
    target: str = "",
    preset: Callable[[Params, int], object] | None = None,
    tags: tuple[str, ...] = (),
) -> BenchmarkDefinition:
    """Return the definition of the benchmark ``workload.NAME``, a training step or a layer.

    The definition has the benchmark's parameters, its help, and a function that returns why a case
    cannot run. Users set its parameters ``common`` and ``more``. ``target`` is the
    ``module:function`` within ``parbench.workloads`` that builds the benchmark on a rank, empty for
    the function ``name`` of ``step.train_step``.

    ``preset`` is a function of the values of the parameters and the number of ranks. It is called
    only to check them: it raises ``UserError`` if the benchmark cannot run with them, and its
    result is not used. None means ``PRESETS[name]``.

    ``tags`` are names such as ``smoke``: ``parbench run --preset smoke`` runs the benchmarks that
    have this tag. These presets of a run are independent of the argument ``preset``.
    """
    build: Callable[[Params, int], object] = preset or PRESETS[name]

    def refuse(params: Mapping[str, Value], world: WorldSpec) -> str | None:
        """Return the reason why a case cannot run in ``world``, None if it can run."""
        try:
            build(params, world.nproc)
        except UserError as error:
            return str(error)
        if world.gloo_on_gpus and name not in GLOO_ON_GPUS:
            return f"gloo cannot send the CUDA tensors of {name}: {GLOO_HINT}"
        return None

    return BenchmarkDefinition(
        name=f"workload.{name}",
        target=f"parbench.workloads.{target or f'step.train_step:{name}'}",
        help=help_text,
        params=(*common, *more),
        tags=tags,
        refusal=refuse,
    )


ONE_OF_EACH_KIND = ("smoke", "node")
"""The tags of the steps that represent a kind of parallelism in the default run."""

# fmt: off
DEFINITIONS = (
    _define_step(
        "ddp", "DDP: gradients are all-reduced in buckets",
        BUCKET, NO_SYNC, tags=ONE_OF_EACH_KIND,
    ),
    _define_step(
        "zero1", "ZeRO-1: data parallel, optimizer state sharded",
        BUCKET, OPTIMIZER,
    ),
    _define_step(
        "fsdp", "FSDP2: parameters and all state sharded; ZeRO-3, or ZeRO-2 with reshard=false",
        RESHARD, PREFETCH, NO_SYNC, tags=ONE_OF_EACH_KIND,
    ),
    _define_step(
        "hsdp", "FSDP2, sharded within groups and replicated",
        RESHARD, PREFETCH, NO_SYNC,
    ),
    _define_step("tp", "tensor parallel without sequence parallelism"),
    _define_step("tp_sp", "tensor and sequence parallel", tags=ONE_OF_EACH_KIND),
    _define_step(
        "tp_fsdp", "tensor parallel layers on two ranks, inside FSDP2",
        RESHARD, PREFETCH, NO_SYNC, tags=("smoke",),
    ),
    _define_step(
        "ep_dispatch", "expert parallel: dispatch and combine of tokens, without experts",
        *LAYER_PARAMS, common=ONE_LAYER,
        target="layers.moe_layers:DispatchBenchmark", preset=presets.build_ep_step,
    ),
    _define_step(
        "ep_layer", "expert parallel: forward and backward of one layer",
        *LAYER_PARAMS, common=ONE_LAYER,
        target="layers.moe_layers:MoeLayerBenchmark", preset=presets.build_ep_step,
    ),
    _define_step(
        "ep_step", "expert parallel inside data parallel",
        *MOE_PARAMS, BUCKET, NO_SYNC, tags=ONE_OF_EACH_KIND,
    ),
    _define_step(
        "pp", "pipeline parallel; schedules from GPipe to DualPipeV",
        *PIPELINE, common=_list_common_params(DEFAULT_MICROBATCHES), tags=ONE_OF_EACH_KIND,
    ),
    _define_step(
        "cp", "context parallel: sequences split over ranks",
        *CONTEXT, BUCKET, NO_SYNC, tags=ONE_OF_EACH_KIND,
    ),
    _define_step(
        "hybrid", "any combination on one mesh, such as --mesh dp=2,pp=2,tp=2",
        *HYBRID, common=_list_common_params(4),
    ),
    _define_step(
        "tp_linear", "tensor parallel: forward and backward of one matrix",
        LINEAR_STYLE, common=ONE_LAYER,
        target="layers.tensor_parallel_layers:TpLayerBenchmark", preset=make_tp_layer,
    ),
    _define_step(
        "tp_ffn", "tensor parallel: forward and backward of one FFN",
        FFN_STYLE, common=ONE_LAYER,
        target="layers.tensor_parallel_layers:TpLayerBenchmark", preset=make_tp_layer,
    ),
)
# fmt: on
