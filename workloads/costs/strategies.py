"""The measured steps as descriptions: which mesh each is on, and what its layout does otherwise. Pure.

Each raises ``UserError``, by equation, where its parameters cannot run on so many ranks.
"""

from collections.abc import Callable
from dataclasses import replace

from parbench.bench.plan.cases import Params
from parbench.bench.plan.groups import INSIDE
from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_case import plan_of
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.mesh.axes import PARAMS as MESH
from parbench.workloads.mesh.axes import mesh_of, refuse_heads, refuse_sequence
from parbench.workloads.model.shapes import BUCKET
from parbench.workloads.pipeline_parallel.pipeline_case import (
    format_checkpointing_refusal,
    make_pipeline,
)

Strategy = Callable[[Params, int, str], StepSpec]
"""Of a case's parameters, the ranks, and the kind of device."""


def ddp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    spec = StepSpec.of(params, device)
    compresses = compresses_gradients(params)
    return replace(
        spec,
        mesh={"dp": ranks},
        reduced_bytes=2 if compresses else 0,
        bucket_bytes=int(float(params.get("bucket_mb", BUCKET.default)) * 2**20),
        each_microbatch=not params.get("no_sync") and not compresses,
        drawn=ranks * spec.num_sequences,
        overlaps=True,
        prefetches=params.get("prefetch") == "explicit",
    )


def compresses_gradients(params: Params) -> bool:
    """Return True where DDP sums gradients in bfloat16."""
    return params.get("grad_compression") == "bf16"


def zero1(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    spec = ddp(params, ranks, device)
    if params.get("optimizer") == "distributed":
        return replace(spec, zero1="reduce_scatter", each_microbatch=False)
    return replace(spec, zero1="broadcast")


def fsdp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    return replace(
        ddp(params, ranks, device),
        mesh={"fsdp": ranks},
        reshard=bool(params.get("reshard", True)),
        axis_names={"fsdp": "dp"},
    )


def hsdp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    """FSDP within replicas, the root kept gathered."""
    shards = int(params["shard"]) or max(2, ranks // 2)
    if ranks % shards:
        raise UserError(f"replicate({ranks // shards}) * shard({shards}) != world size({ranks})")
    return replace(
        ddp(params, ranks, device),
        mesh={"dp": ranks // shards, "fsdp": shards},
        keeps_root=True,
        axis_names={"fsdp": "shard", "dp": "replicate"},
    )


def tp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    spec = StepSpec.of(params, device)
    _require(refuse_heads(spec.shape, {"tp": ranks}))
    return replace(spec, mesh={"tp": ranks}, drawn=spec.num_sequences)


def tp_sp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    spec = replace(tp(params, ranks, device), sequence_parallel=True)
    _require(refuse_sequence(spec.shape, spec.mesh))
    return spec


def tp_fsdp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    inner = int(params["tp"])
    if ranks % inner:
        raise UserError(f"dp({ranks // inner}) * tp({inner}) != world size({ranks})")
    spec = ddp(params, ranks // inner, device)
    _require(refuse_heads(spec.shape, {"tp": inner}))
    return replace(spec, mesh={"fsdp": ranks // inner, "tp": inner}, axis_names={"fsdp": "dp"})


def pp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    spec = StepSpec.of(params, device)
    pipeline = make_pipeline(params, spec.shape, ranks)
    if pipeline.order.splits_backward and spec.checkpointing != "none":
        raise UserError(format_checkpointing_refusal(pipeline.order.name, spec.checkpointing))
    return replace(spec, mesh={"pp": ranks}, pipeline=pipeline)


def cp(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    spec = StepSpec.of(params, device)
    plan = plan_of(spec.shape, params, ranks)
    return replace(
        spec, mesh={"cp": ranks}, cp_method=plan.method, ulysses=plan.ulysses, each_microbatch=True
    )


def ep_step(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    """Mixtures of experts inside data parallelism, attention split where asked; one layer's are described alike."""
    spec = StepSpec.of(params, device)
    tp = int(params.get("tp", 1))
    moe = make_moe(params, spec.shape, ranks, tp)
    inside = {"ep": moe.ep, "etp": moe.etp}
    if params.get("fsdp"):
        return replace(spec, mesh={"fsdp": ranks, **inside}, moe=moe, axis_names={"fsdp": "dp"})
    return replace(spec, mesh={"dp": ranks // tp, "tp": tp, **inside}, moe=moe, own_tokens=tp > 1)


def mesh(params: Params, ranks: int, device: str = "cpu") -> StepSpec:
    given = {**{param.name: param.default for param in MESH}, **params}
    experts = int(given["experts"])
    spec = replace(
        StepSpec.of(given, device),
        mesh=mesh_of(str(given["mesh"]), ranks),
        schedule=str(given["schedule"]),
        chunks=int(given["chunks"]),
        split=str(given["split"]),
        cp_method=str(given["cp_method"]),
        sequence_parallel=True,
        ends="tokens",
    )
    _require(spec.refusal(ranks, experts))
    if experts:
        names = (
            "experts",
            "top_k",
            "routing",
            "checkpointing",
        )  # its chunks are not the pipeline's
        inside = {axis: spec.size(axis) for axis in INSIDE}
        mixture = make_moe(
            {**inside, **{name: given[name] for name in names if name in given}}, spec.shape, ranks
        )
        spec = replace(spec, moe=mixture)
    stages = spec.size("pp")
    return replace(spec, pipeline=make_pipeline(given, spec.shape, stages)) if stages > 1 else spec


def _require(refused: str | None) -> None:
    if refused is not None:
        raise UserError(refused)
