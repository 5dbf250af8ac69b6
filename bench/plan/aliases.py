"""Former names that users have in files, scripts and records: each stands here once, and is read as its present name.

The id of a case is taken over its first names, so that a renaming orphans no record, history or noise floor.
"""

from collections.abc import Mapping
from typing import TypeVar

from bench.text import UserError

CASES = {"p2p.round": "p2p.pairwise"}
PARAMS = {"beside": "background", "member": "group_index", "together": "concurrent", "ways": "direction"}
METRICS = {
    "contention": "compute_slowdown",
    "comm_skew": "straggler_wait",
    "dispatched_even": "dispatch_bytes_even",
    "dispatched": "dispatch_bytes",
    "imbalance_lost": "imbalance_time",
    "outside_pipeline": "non_pipeline_time",
    "balance": "load_balance",
}
GRADES = {"quiet": "stable", "wild": "very noisy"}
TARGETS = {  # how they begin
    "bench.collectives:": "bench.operations.collectives:",
    "bench.compute:gemm": "bench.operations.local:gemm",
    "bench.memory:copy": "bench.operations.local:copy",
    "bench.p2p:": "bench.operations.p2p:",
    "workloads.ddp:": "workloads.data_parallel.ddp:",
    "workloads.zero1:": "workloads.data_parallel.zero1:",
    "workloads.fsdp:": "workloads.data_parallel.fsdp:",
    "workloads.tp:": "workloads.tensor_parallel.tensor_parallel:",
    "workloads.pipeline.pp:": "workloads.pipeline_parallel.pipeline_step:",
    "workloads.context.cp:": "workloads.context_parallel.context_step:",
    "workloads.experts.ep:": "workloads.expert_parallel.expert_step:",
    "workloads.experts.ep_dispatch:prepare": "workloads.expert_parallel.layer_step:prepare_dispatch",
    "workloads.experts.ep_layer:": "workloads.expert_parallel.layer_step:",
    "workloads.hybrid.hybrid:": "workloads.mesh.mesh_step:",
}

_V = TypeVar("_V")


def present_name(name: str) -> str:
    """Return the present name of a case, or of the part of its name after the dot."""
    short = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in CASES.items()}
    return CASES.get(name, name) if "." in name else short.get(name, name)


def present_params(params: Mapping[str, _V], where: str) -> dict[str, _V]:
    """Return parameters by their present names; ``UserError`` if one is there by both its names."""
    for old, new in PARAMS.items():
        if old in params and new in params:
            raise UserError(f"{where}: {old} is the former name of {new}: give one of them")
    return {PARAMS.get(name, name): value for name, value in params.items()}


def present_target(target: str, table: Mapping[str, str] = TARGETS) -> str:
    """Return a target whose beginning is in ``table`` with the beginning that stands there for it."""
    found = next((old for old in table if target.startswith(old)), None)
    return target if found is None else table[found] + target.removeprefix(found)


def first_names(name: str, target: str, params: Mapping[str, _V]) -> dict[str, object]:
    """Return what the id of a case is taken over: its name, target and parameters as they were called at first."""
    names, targets, keys = ({new: old for old, new in table.items()} for table in (CASES, TARGETS, PARAMS))
    return {
        "name": names.get(name, name),
        "target": present_target(target, targets),
        "params": {keys.get(key, key): value for key, value in params.items()},
    }
