"""Presets: one dial that sets the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.plan import Measure


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


def _communication(**settings: str) -> tuple[Entry, Entry]:
    return Entry(name="collective.*", set=settings), Entry(name="p2p.*", set=settings)


PRESETS = {
    "smoke": Preset(
        help="does everything work? every case once, small, under 30 s on two cores",
        entries=_communication(size_bytes="1K,1M"),
        launches=1,
        budget_seconds=15,
        timeout_seconds=30,
        measure=Measure(precision=0.05, max_iterations=200),
    ),
    "node": Preset(
        help="how does this node communicate, and what does a step cost? five launches, under 2 min on two cores",
        entries=(
            *_communication(size_bytes="1K:16M:x4", mode="blocking"),
            *_communication(size_bytes="1K,256K,16M", mode="pipelined"),
        ),
        # the least with which a regression gate can decide
        launches=5,
        budget_seconds=90,
        timeout_seconds=60,
        measure=Measure(),
    ),
    "full": Preset(
        help="every size to 64M, three types, both modes, ten launches: about 10 min",
        entries=(
            *_communication(size_bytes="1K:64M:x2", mode="blocking"),
            *_communication(size_bytes="1K:64M:x4", mode="pipelined"),
            *_communication(size_bytes="64K,1M,16M", dtype="bfloat16,float8_e4m3fn"),
        ),
        launches=10,
        budget_seconds=600,
        timeout_seconds=120,
        measure=Measure(precision=0.01, max_iterations=2000),
    ),
}
