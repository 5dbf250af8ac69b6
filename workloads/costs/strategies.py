"""The measured steps as descriptions: which mesh each is on, and what its layout does otherwise. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from bench.plan.params import Value
from workloads.context_parallel.context_case import ulysses_of
from workloads.costs.step_spec import StepSpec
from workloads.expert_parallel.moe_case import moe_of
from workloads.mesh.mesh_case import hybrid_of
from workloads.model.shapes import BUCKET
from workloads.pipeline_parallel.pipeline_case import pipeline_of

Strategy = Callable[[Mapping[str, Value], int, str], StepSpec]
"""Of a case's parameters, the ranks, and the kind of device."""

_MEBI = 2**20


def ddp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """DDP; ZeRO-1 is on it."""
    spec = StepSpec.of(params, device)
    return replace(
        spec,
        mesh={"dp": ranks},
        bucket_bytes=int(float(params.get("bucket_mb", BUCKET.default)) * _MEBI),
        each_microbatch=not params.get("no_sync"),
        drawn=ranks * spec.num_sequences,
        overlaps=True,
        prefetches=params.get("prefetch") == "explicit",
    )


def ddp_bf16(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    return replace(ddp(params, ranks, device), reduced_bytes=2, each_microbatch=False)


def zero1(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """Data parallel whose optimizer is sharded: torch's own broadcasts parameters, the distributed one gathers them."""
    spec = ddp(params, ranks, device)
    if params.get("optimizer") == "distributed":
        return replace(spec, zero1="reduce_scatter", each_microbatch=False)
    return replace(spec, zero1="broadcast")


def fsdp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """FSDP over all ranks, parameters given back after forward or kept gathered."""
    return replace(
        ddp(params, ranks, device),
        mesh={"fsdp": ranks},
        reshard=bool(params.get("reshard", True)),
        axis_names={"fsdp": "dp"},
    )


def hsdp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """FSDP within replicas, the root kept gathered."""
    shards = int(params["shard"]) or max(2, ranks // 2)
    return replace(
        ddp(params, ranks, device),
        mesh={"dp": ranks // shards, "fsdp": shards},
        keeps_root=True,
        axis_names={"fsdp": "shard", "dp": "replicate"},
    )


def tp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """Layers split, activations whole between them."""
    spec = StepSpec.of(params, device)
    return replace(spec, mesh={"tp": ranks}, drawn=spec.num_sequences)


def tp_sp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """Layers split, the sequence sharded between them."""
    return replace(tp(params, ranks, device), sequence_parallel=True)


def tp_fsdp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    inner = int(params["tp"])
    spec = ddp(params, ranks // inner, device)
    return replace(spec, mesh={"fsdp": ranks // inner, "tp": inner}, axis_names={"fsdp": "dp"})


def pp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    spec = StepSpec.of(params, device)
    return replace(spec, mesh={"pp": ranks}, pipeline=pipeline_of(params, spec.shape, ranks))


def cp(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """Parts of sequences on all ranks, weights under DDP."""
    method = str(params["method"])
    return replace(
        StepSpec.of(params, device),
        mesh={"cp": ranks},
        cp_method=method,
        ulysses=ulysses_of(method, int(params["ulysses"]), ranks),
        each_microbatch=True,
    )


def ep_step(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    """Mixtures of experts inside data parallelism, attention split where asked."""
    spec = StepSpec.of(params, device)
    moe = moe_of(params, spec.shape, ranks)
    inside = {"ep": moe.ep, "etp": moe.etp}
    if params["fsdp"]:
        return replace(spec, mesh={"fsdp": ranks, **inside}, moe=moe, axis_names={"fsdp": "dp"})
    return replace(spec, mesh={"dp": ranks // moe.tp, "tp": moe.tp, **inside}, moe=moe, own_tokens=moe.tp > 1)


def mesh(params: Mapping[str, Value], ranks: int, device: str = "cpu") -> StepSpec:
    spec = StepSpec.of(params, device)
    hybrid = hybrid_of(params, spec.shape, ranks)
    return replace(
        spec,
        mesh=hybrid.mesh,
        schedule=str(params["schedule"]),
        pipeline=hybrid.pipeline,
        cp_method=hybrid.cp_method,
        moe=hybrid.moe,
        sequence_parallel=True,
        ends="tokens",
    )
