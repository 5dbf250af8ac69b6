"""The explanation of a user's own step, which needs only a ``step()``.

It has the bytes of each process group, the parts of the step's time, its memory and its FLOPs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # torch would import it within the first instrumented step, and time it
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from parbench.bench.results.metrics import MetricValue, make_value, make_values
from parbench.bench.results.stats import median
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Benchmark, Explanation
from parbench.bench.world.world import World
from parbench.workloads.step.memory import peak_during
from parbench.workloads.step.overlap import OverlapProbe
from parbench.workloads.step.peaks import find_peak
from parbench.workloads.step.probe import ResetFn, Step, run_probes, time_step
from parbench.workloads.step.sent_bytes import CommBytesProbe, CommRecorder
from parbench.workloads.step.turns import slowest

_DEFAULT_GROUP_NAMES = ("", "undefined", "default_pg")
_TIMED_STEPS = 3


class ExplainedUserStep:
    """Adds ``explain`` to a user's benchmark, and delegates all else to it."""

    def __init__(self, world: World, benchmark: Benchmark) -> None:
        self._world = world
        self._benchmark = benchmark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._benchmark, name)

    def explain_step(self, reset: ResetFn, budget_seconds: float) -> Explanation:
        world = self._world
        step = self._benchmark.step
        reset()
        with GroupRecorder() as recorder:
            step()
        axes = dict(sorted(recorder.groups.items()))
        calls = tuple((call.axis, call.op, call.num_bytes) for call in recorder.calls)
        ranks_differ = len(set(world.gather(calls))) > 1
        dtype = getattr(self._benchmark, "dtype", torch.float32)
        probes = (
            ResourceProbe(world, dtype),
            CommBytesProbe(axes, dict),
            OverlapProbe(world, axes, ranks_differ=ranks_differ),
        )
        return run_probes(world, probes, step, reset, budget_seconds)


class GroupRecorder(CommRecorder):  # type: ignore[no-untyped-call]
    """Records calls, with the name of a process group as axis, and the groups by name."""

    def __init__(self) -> None:
        super().__init__({})
        self.groups: dict[str, dist.ProcessGroup] = {}

    def name_axis(self, group: dist.ProcessGroup) -> str:
        """Return the name of a group, and keep the group by this name in ``groups``."""
        name = name_group(group)
        self.groups.setdefault(name, group)
        return name


def name_group(group: dist.ProcessGroup) -> str:
    """Return the description of a group or the name of its mesh dimension.

    A group without both is named ``world``, or by its size and the distance between its ranks.
    """
    name = str(group.group_desc).removeprefix("mesh_")
    if name not in _DEFAULT_GROUP_NAMES:
        return name.replace(".", "_")
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return "world"
    distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return f"ranks{len(ranks)}x{distance}"


@dataclass(frozen=True, kw_only=True)
class ResourceSample:
    """The memory in bytes and the FLOPs of a step on one rank, and the seconds of several steps."""

    memory_bytes: dict[str, int | None]
    """The peak above the start of the step (``memory_peak``), and the bytes at the start
    (``memory_kept``). None is unknown."""
    flops: int
    seconds: list[float]


@dataclass(frozen=True)
class ResourceProbe:
    """Measures the memory of a step, and its FLOPs by torch's FlopCounterMode."""

    world: World
    dtype: torch.dtype
    share = 0.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> ResourceSample:
        device = self.world.device
        reset()
        allocated = accelerator.count_allocated_bytes(device) if device.type == "cuda" else None
        peak = peak_during(step, device)
        reset()
        with FlopCounterMode(display=False) as counter:
            step()
        seconds = []
        for _ in range(_TIMED_STEPS):
            reset()
            seconds.append(time_step(step, self.world))
        return ResourceSample(
            memory_bytes={"memory_peak": peak, "memory_kept": allocated},
            flops=int(counter.get_total_flops()),
            seconds=seconds,
        )

    def summarize(self, samples: Sequence[ResourceSample]) -> Explanation:
        """Return the maximum of memory over ranks, and MFU if the peak of the device is known."""
        metrics: dict[str, MetricValue] = {}
        for name in samples[0].memory_bytes:
            values = [sample.memory_bytes[name] for sample in samples]
            known_values = [value for value in values if value is not None]
            if known_values:
                metrics |= make_values({name: max(known_values)}, "maximum over ranks")
        flops = sum(sample.flops for sample in samples) / len(samples)
        if not flops:
            return Explanation(metrics=metrics)
        peak = find_peak(self.world.device, self.dtype)
        if peak is not None:
            seconds = median(slowest([sample.seconds for sample in samples]))
            mfu = flops / seconds / peak.flops_per_second
            method = f"FLOPs by torch's FlopCounterMode, peak by {peak.source}"
            metrics["mfu"] = make_value("mfu", mfu, method)
        return Explanation(metrics=metrics, details={"flops_per_rank": flops})
