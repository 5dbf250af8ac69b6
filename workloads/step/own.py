"""A step that does not explain itself, explained: what it sends by process group, where its time goes, what it takes.

It needs no more than ``step()``. A process group is called by the name that it was given (``group_desc``, or that of a
mesh's dimension), else by its size and the distance of its ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo  # which torch would import within the first step that is watched, and count as a hang
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from parbench.bench.results.metrics import MetricValue, make_value, make_values
from parbench.bench.results.records import PHASE
from parbench.bench.results.stats import median
from parbench.bench.results.step_trace import OPTIMIZER
from parbench.bench.world.benchmark import Benchmark, Explanation
from parbench.bench.world.world import World
from parbench.workloads.step.memory import OverTime, peak_during
from parbench.workloads.step.overlap import Overlap
from parbench.workloads.step.peaks import peak_of
from parbench.workloads.step.probe import Begin, Step, run_probes, timed
from parbench.workloads.step.sent_bytes import Counted, SentBytes

_UNNAMED = ("", "undefined", "default_pg")
_TIMED_STEPS = 3


@dataclass(frozen=True)
class Groups:
    """The process groups of a step, by name."""

    axes: Mapping[str, dist.ProcessGroup]
    holds_stage_only: bool


class OwnStep:
    """A benchmark and what looks into it; what is not here is the benchmark's own."""

    def __init__(self, world: World, benchmark: Benchmark) -> None:
        self._world, self._benchmark = world, benchmark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._benchmark, name)

    def explain_step(self, begin: Begin, budget_seconds: float) -> Explanation:
        begin()
        with Found() as found:
            self._benchmark.step()
        # ranks of a pipeline make calls of their own, of which one rank's tell nothing of another's
        made = tuple((call.axis, call.op, call.num_bytes) for call in found.calls)
        differ = len(set(self._world.gather(made))) > 1
        groups = Groups(dict(sorted(found.groups.items())), holds_stage_only=differ)
        dtype = getattr(self._benchmark, "dtype", torch.float32)
        probes = (
            Taken(self._world, dtype), SentBytes(groups, {}), Overlap(self._world, groups), OverTime(self._world.device)
        )  # fmt: skip
        said = run_probes(self._world, probes, self._benchmark.step, begin, budget_seconds)
        return replace(said, metrics=said.metrics | _optimizer_time(said))


class Found(Counted):  # type: ignore[no-untyped-call]
    """Counts calls by the names of their groups, and keeps the groups."""

    def __init__(self) -> None:
        super().__init__({})
        self.groups: dict[str, dist.ProcessGroup] = {}

    def axis_of(self, group: dist.ProcessGroup) -> str:
        name = name_of(group)
        self.groups.setdefault(name, group)
        return name


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name that a group was given, else ``world`` or its ranks: how many, and how far apart."""
    given = str(group.group_desc).removeprefix("mesh_")
    if given not in _UNNAMED:
        return given.replace(".", "_")
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return "world"
    return f"ranks{len(ranks)}x{ranks[1] - ranks[0] if len(ranks) > 1 else 1}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank's: bytes at the peak above those at the step's start, bytes at its start, FLOPs, seconds of steps."""

    peak_bytes: int | None
    kept_bytes: int | None
    flops: int
    seconds: list[float]


class Taken:
    """The probe of what a step takes: memory, and FLOPs as torch counts them."""

    share = 0.0

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world, self._dtype = world, dtype

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> Seen:
        device = self._world.device
        begin()
        kept = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        peak = peak_during(step, device)
        begin()
        with FlopCounterMode(display=False) as counter:
            step()
        seconds = []
        for _ in range(_TIMED_STEPS):
            begin()
            seconds.append(timed(step, self._world))
        return Seen(
            peak_bytes=peak, kept_bytes=kept, flops=int(counter.get_total_flops()), seconds=seconds
        )

    def summarise(self, told: Sequence[Seen]) -> Explanation:
        """Return the fullest rank's memory, and MFU where the peak of the device is known."""
        metrics: dict[str, MetricValue] = {}
        for name, found in (("memory_peak", "peak_bytes"), ("memory_kept", "kept_bytes")):
            known = [taken for one in told if (taken := getattr(one, found)) is not None]
            metrics |= make_values({name: float(max(known))} if known else {}, "largest over ranks")
        flops = sum(one.flops for one in told) / len(told)
        seconds = median([max(one.seconds[i] for one in told) for i in range(_TIMED_STEPS)])
        peak = peak_of(self._world.device, self._dtype)
        if flops and peak is not None:
            how = f"FLOPs by torch's FlopCounterMode, peak by {peak.source}, {str(self._dtype).removeprefix('torch.')}"
            metrics |= {"mfu": make_value("mfu", flops / seconds / peak.flops_per_second, how)}
        return Explanation(metrics=metrics, details={"flops_per_rank": flops} if flops else {})


def _optimizer_time(said: Explanation) -> dict[str, Any]:
    """Return the seconds in optimizers' steps on the slowest rank, by the ranges that torch names after them."""
    if said.timeline is None:
        return {}
    taken = [
        sum(
            one.stop_us - one.start_us
            for one in rank.intervals
            if (one.stream, one.name) == (PHASE, OPTIMIZER)
        )
        for rank in said.timeline.ranks
    ]
    return (
        make_values({"optimizer_time": max(taken) / 1e6}, "the slowest rank's, traced")
        if any(taken)
        else {}
    )
