"""Presets: one dial that sets the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.plan.plan import Measure


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Parameters, as the text of ``--set``, for the cases whose names fit a glob."""

    name: str
    set: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is measured and for how long; ``budget_seconds`` includes the starting of ranks, not the report."""

    help: str
    entries: tuple[Entry, ...]
    launches: int
    budget_seconds: float
    timeout_seconds: float
    measure: Measure
    omit: tuple[str, ...] = ()


_MAIN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
_SIZED = (
    *("all_to_all_v", "reduce", "gather", "scatter", "all_reduce_two_step"),
    *("pingpong", "unidirectional", "bidirectional", "matrix"),
)


_GROUPED = ("all_reduce", "all_to_all")


def _main(**settings: str) -> tuple[Entry, ...]:
    return tuple(Entry(name=name, set=settings) for name in _MAIN)


def _sized(**settings: str) -> tuple[Entry, ...]:
    return tuple(Entry(name=name, set=settings) for name in _SIZED)


PRESETS = {
    "smoke": Preset(
        help="does everything work? every operation and kind of step once, small, about 90 s on two cores",
        entries=(*_main(size_bytes="1K,1M"), *_sized(size_bytes="64K")),
        omit=("matrix", "round", "gemm", "zero1", "zero2", "hsdp", "tp", "ep_dispatch", "ep_layer", "hybrid"),
        launches=1,
        budget_seconds=85,
        timeout_seconds=60,  # eight ranks on two cores take half of it to explain a step of a hybrid mesh
        measure=Measure(precision=0.05, max_iterations=200),
    ),
    "node": Preset(
        help="how does this node communicate, and what does a step cost? five launches, under 2 min on two cores",
        entries=(
            *_main(size_bytes="1K:16M:x4", mode="blocking"),
            *_main(size_bytes="1K,16M", mode="pipelined"),
            *_sized(size_bytes="1M"),
            Entry(name="copy", set={"size_bytes": "16M"}),
        ),
        omit=("matrix", "round", "gemm", "zero*", "hsdp", "tp*", "pp", "cp", "ep_*", "hybrid"),
        # the least with which a regression gate can decide
        launches=5,
        budget_seconds=95,
        timeout_seconds=60,
        measure=Measure(),
    ),
    "full": Preset(
        help="every size to 64M, four types, all modes, groups, interference, ten launches: about 10 min",
        entries=(
            *_main(size_bytes="1K:64M:x2", mode="blocking"),
            *_main(size_bytes="1K:64M:x8", mode="pipelined"),
            *_main(size_bytes="64K,16M", mode="async"),
            *_main(size_bytes="1M", dtype="bfloat16,int32,float8_e4m3fn"),
            *_sized(size_bytes="1K:64M:x16"),
            Entry(name="copy", set={"size_bytes": "1K:64M:x8"}),
            Entry(name="matrix", set={"size_bytes": "1M"}),
            Entry(name="all_reduce", set={"size_bytes": "1M", "redop": "avg,min,max,product"}),
            Entry(name="all_reduce", set={"size_bytes": "1M", "placement": "out_of_place"}),
            Entry(name="all_to_all_v", set={"size_bytes": "1M", "skew": "0.5"}),
            *(Entry(name=name, set={"size_bytes": "1M", "group": "node,across,pairs"}) for name in _GROUPED),
            Entry(name="all_reduce", set={"size_bytes": "1M", "beside": "gemm,all_reduce,all_to_all"}),
            Entry(name="gemm", set={"beside": "nothing,all_reduce,all_to_all"}),
        ),
        launches=10,
        budget_seconds=600,
        timeout_seconds=120,
        measure=Measure(precision=0.01, max_iterations=2000),
    ),
}
