"""The named training steps: each is a mesh and a few parameters of ``StepSpec``. Pure.

A preset is a function of a case's parameters and the number of ranks. It raises ``UserError`` with
the equation that does not hold if the step cannot run there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from parbench.bench.plan.cases import Params
from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import CP_METHOD, ULYSSES
from parbench.workloads.costs.step_spec import StepSpec, ZeroOne, parse_checkpointing
from parbench.workloads.expert_parallel.moe_case import MOE_PARAMS, make_moe
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import (
    COMMON,
    PRECISIONS,
    build_shape,
    parse_compute,
)
from parbench.workloads.pipeline_parallel.pipeline_case import PARAMS as PIPELINE
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions

Preset = Callable[[Params, int], StepSpec]
"""A function from the values of parameters and the number of ranks to a training step.

It raises ``UserError`` if the step cannot run on these ranks.
"""


def _make_switch(name: str, default: bool, help_text: str) -> Param:
    """Return an optional parameter of training steps whose value is true or false."""
    return Param(name, "bool", default, help_text, optional=True)


BUCKET = Param(
    "bucket_mb",
    "float",
    0.0,
    "MiB of a gradient bucket; 0 = torch's default: 1 for the first bucket, 25 for others",
    minimum=0.0,
    maximum=1e6,
)
NO_SYNC = _make_switch("no_sync", True, "reduce gradients in the last microbatch only")
RESHARD = _make_switch(
    "reshard", True, "free parameters after forward and gather them for backward"
)
PREFETCH = choice(
    "prefetch", "explicit: gather each layer's parameters one layer ahead", "default", "explicit"
)
OPTIMIZER = choice(
    "optimizer",
    "distributed: reduce_scatter and all_gather; zero_redundancy: torch's, with broadcasts",
    "distributed",
    "zero_redundancy",
)
SEQUENCE_PARALLEL = _make_switch(
    "sequence_parallel", True, "shard the tokens between the blocks of a layer over tp"
)
CONTEXT = (replace(CP_METHOD, default="zigzag"), ULYSSES)
MESH = Param(
    "mesh",
    "mesh",
    "",
    "ranks of each axis, outermost first: dp, fsdp, pp, cp, tp; ep and etp lie inside others; "
    "empty = dp over all ranks",
)
_NOT_IN_HYBRID = ("ep", "experts")
"""The parameters of experts that ``hybrid`` takes from its mesh, or has with another default."""
HYBRID = (
    MESH,
    *(replace(param, optional=True) for param in PIPELINE),
    *CONTEXT,
    SEQUENCE_PARALLEL,
    BUCKET,
    NO_SYNC,
    RESHARD,
    PREFETCH,
    *(replace(param, optional=True) for param in MOE_PARAMS if param.name not in _NOT_IN_HYBRID),
    Param("experts", "int", 0, "routed experts per layer; 0 = dense", minimum=0, optional=True),
)
"""The parameters of the step ``hybrid``, without those that all steps have."""


def build_step(params: Params, dims: ParallelDims) -> StepSpec:
    """Return the training step of a dense model with the user's settings, on the mesh ``dims``.

    ``params`` has the values of settings such as ``microbatch`` by name. Settings of experts are
    ignored, and missing ones have their defaults. The step is not checked and may be unable to run.
    """
    defaults = {param.name: param.default for param in (*COMMON, *HYBRID)}
    values: dict[str, Value] = {**defaults, **params}
    checkpointing, every = parse_checkpointing(str(values["checkpointing"]))
    return StepSpec(
        shape=build_shape(values),
        dims=dims,
        name=str(values["shape"]),
        microbatch=int(values["microbatch"]),
        microbatches=int(values["microbatches"]),
        bytes_per_element=PRECISIONS[str(values["precision"])],
        reduce_bytes=PRECISIONS[str(values["reduce_dtype"])],
        checkpointing=checkpointing,
        checkpoint_every=every,
        sequence_parallel=bool(values["sequence_parallel"]),
        zero1=cast(ZeroOne, values.get("optimizer", "")),
        reshard=bool(values["reshard"]),
        no_sync=bool(values["no_sync"]),
        bucket_bytes=int(float(values["bucket_mb"]) * 2**20),
        prefetch=values["prefetch"] == "explicit",
        pipeline_options=PipelineOptions(
            schedule=str(values["schedule"]),
            stages_per_rank=int(values["virtual_stages"]),
            layers_per_stage=str(values["layers_per_stage"]),
        ),
        cp_method=str(values["cp_method"]),
        ulysses=int(values["ulysses"]),
        padding=float(values["padding"]),
        simulated_seconds=parse_compute(str(values["compute"])),
    )


def _build_on_mesh(params: Params, ranks: int, **sizes: int) -> StepSpec:
    """Return a dense model's training step on a mesh with these ``sizes``, 1 for other axes.

    Raises ``UserError`` if it cannot run on ``ranks`` ranks.
    """
    return build_step(params, ParallelDims().resize(**sizes)).require_valid(ranks)


def _span_ranks(axis: str, **defaults: Value) -> Preset:
    """Return the preset of a training step in which the mesh axis ``axis`` has all ranks.

    ``defaults`` has values of settings that the user does not set, keyed by name.
    """

    def build(params: Params, ranks: int) -> StepSpec:
        """Return the training step on ``ranks`` ranks, all of which lie along ``axis``."""
        return _build_on_mesh({**defaults, **params}, ranks, **{axis: ranks})

    return build


def build_hsdp(params: Params, ranks: int) -> StepSpec:
    """Return the training step with HSDP: FSDP within replicas, gradient all_reduces between them.

    There are two replicas, or one with fewer than four ranks. Other numbers are meshes of
    ``hybrid``.
    """
    replicas = 2 if ranks >= 4 else 1
    return _build_on_mesh(params, ranks, dp=replicas, fsdp=ranks // replicas)


def build_tp_fsdp(params: Params, ranks: int) -> StepSpec:
    """Return the training step in which two ranks split each layer, and FSDP shards over others."""
    return _build_on_mesh(params, ranks, fsdp=max(1, ranks // 2), tp=min(2, ranks))


def build_pp(params: Params, ranks: int) -> StepSpec:
    """Return the training step with one pipeline over all ranks, which must be at least two."""
    if ranks == 1:
        raise UserError("ranks(1) < 2: one rank is not a pipeline")
    return _build_on_mesh(params, ranks, pp=ranks)


def build_ep_step(params: Params, ranks: int) -> StepSpec:
    """Return the training step of a MoE model with expert parallelism inside data parallelism."""
    return _build_expert_step(params, ParallelDims(dp=ranks), ranks)


def build_hybrid(params: Params, ranks: int) -> StepSpec:
    """Return the training step on the mesh that the setting ``mesh`` describes.

    An empty ``mesh`` means ``dp`` over all ranks. The model is dense if the setting ``experts`` is
    0. In a MoE model, a ``mesh`` without ``etp`` gets as many ``etp`` ranks as ``tp`` ranks
    where ranks and experts allow, otherwise 1.
    """
    text = str(params.get("mesh", ""))
    dims = ParallelDims.parse(text, ranks)
    if not int(params.get("experts", 0)):
        return build_step(params, dims).require_valid(ranks)
    etp = dims.etp if "etp" in text else 0
    return _build_expert_step({**params, "ep": dims.ep, "etp": etp}, dims, ranks)


def _build_expert_step(params: Params, dims: ParallelDims, ranks: int) -> StepSpec:
    """Return the training step of a MoE model on a mesh.

    ``ep`` and ``etp`` in ``params`` replace those of ``dims``. The default of ``etp``, for a value
    of 0 or none, is the size of ``tp`` if that divides the ranks and the expert width, and
    otherwise 1. The default of ``ep`` is the number of ranks of a pipeline stage divided by
    ``etp``. Raises ``UserError`` if the step cannot run on ``ranks`` ranks.
    """
    spec = build_step(params, dims)
    moe = make_moe(params, spec.shape, max(1, ranks // dims.pp), dims.tp)
    return replace(spec, moe=moe, dims=dims.resize(ep=moe.ep, etp=moe.etp)).require_valid(ranks)


PRESETS: Mapping[str, Preset] = {
    "ddp": _span_ranks("dp"),
    "zero1": _span_ranks("dp", optimizer=OPTIMIZER.default),
    "fsdp": _span_ranks("fsdp"),
    "hsdp": build_hsdp,
    "tp": _span_ranks("tp", sequence_parallel=False),
    "tp_sp": _span_ranks("tp"),
    "tp_fsdp": build_tp_fsdp,
    "pp": build_pp,
    "cp": _span_ranks("cp"),
    "ep_step": build_ep_step,
    "hybrid": build_hybrid,
}
"""The presets of the training steps, keyed by the step's name without its kind."""
