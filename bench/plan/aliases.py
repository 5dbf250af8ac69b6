"""Former names that users have in files, scripts and records: each stands here once, and is read as its present name.

The id of a case is taken over its first names, so that a renaming orphans no record, history or noise floor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from parbench.bench.text import UserError


@dataclass(frozen=True, kw_only=True)
class Former:
    """What a former name of a case means: its present name, and the parameters that the name alone used to say.

    ``defaults`` are those that are as everyone has them today, ``params`` those that are not.
    """

    name: str
    params: Mapping[str, bool] = field(default_factory=dict)
    defaults: Mapping[str, bool] = field(default_factory=dict)
    target: str = ""


CASES = {
    "p2p.round": Former(name="p2p.pairwise"),
    "workload.zero2": Former(name="workload.fsdp", params={"reshard": False}, target="parbench.workloads.fsdp:zero2"),
    "workload.zero3": Former(name="workload.fsdp", defaults={"reshard": True}, target="parbench.workloads.fsdp:zero3"),
}
"""Of several that are one case today, the one without ``params`` comes last."""
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
REASONS = {"left out: the run's time was spent": "out of time"}
GRADES = {"quiet": "stable", "wild": "very noisy"}
TARGETS = {  # how they begin
    "bench.collectives:": "parbench.bench.operations.collectives:",
    "parbench.bench.compute:gemm": "parbench.bench.operations.local:gemm",
    "parbench.bench.memory:copy": "parbench.bench.operations.local:copy",
    "bench.p2p:": "parbench.bench.operations.p2p:",
    "parbench.workloads.data_parallel.ddp_bf16:prepare": "parbench.workloads.data_parallel.ddp:bf16",
    "workloads.ddp:": "parbench.workloads.data_parallel.ddp:",
    "workloads.zero1:": "parbench.workloads.data_parallel.zero1:",
    "parbench.workloads.fsdp:zero2": "parbench.workloads.data_parallel.fsdp:fsdp",
    "parbench.workloads.fsdp:zero3": "parbench.workloads.data_parallel.fsdp:fsdp",
    "workloads.fsdp:": "parbench.workloads.data_parallel.fsdp:",
    "workloads.tp:": "parbench.workloads.tensor_parallel.tensor_parallel:",
    "workloads.pipeline.pp:": "parbench.workloads.pipeline_parallel.pipeline_step:",
    "workloads.context.cp:": "parbench.workloads.context_parallel.context_step:",
    "workloads.experts.ep:": "parbench.workloads.expert_parallel.expert_step:",
    "parbench.workloads.experts.ep_dispatch:prepare": "parbench.workloads.expert_parallel.layer_step:prepare_dispatch",
    "workloads.experts.ep_layer:": "parbench.workloads.expert_parallel.layer_step:",
    "workloads.hybrid.hybrid:": "parbench.workloads.mesh.mesh_step:",
}

_V = TypeVar("_V")


def matches(name: str, pattern: str) -> bool:
    """Say whether a name fits a pattern; one without a dot is for the part after the name's dot."""
    return fnmatchcase(name if "." in pattern else name.rpartition(".")[2], pattern)


def meanings(name: str, pattern: str) -> list[dict[str, str]]:
    """Return with which parameters a pattern names a case: none by its present name, else those of its former ones."""
    if matches(name, pattern):
        return [{}]
    formers = [now for old, now in CASES.items() if now.name == name and matches(old, pattern)]
    return [{key: str(value).lower() for key, value in {**now.params, **now.defaults}.items()} for now in formers]


def is_named(name: str, params: Mapping[str, object], patterns: Sequence[str]) -> bool:
    """Say whether a case of these parameters fits any pattern, by its present name or its first."""
    return any(matches(either, pattern) for pattern in patterns for either in (name, _first_name(name, params)))


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
    targets, keys = ({new: old for old, new in table.items()} for table in (TARGETS, PARAMS))
    first = _first_name(name, params)
    former = CASES.get(first, Former(name=name))
    return {
        "name": first,
        "target": former.target or present_target(target, targets),
        "params": {keys.get(key, key): value for key, value in params.items() if key not in former.params},
    }


def _first_name(name: str, params: Mapping[str, object]) -> str:
    formers = (old for old, now in CASES.items() if now.name == name and now.params.items() <= params.items())
    return next(formers, name)
