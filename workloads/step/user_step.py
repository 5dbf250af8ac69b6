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

from parbench.bench.results.metrics import make_value
from parbench.bench.results.stats import median
from parbench.bench.world.benchmark import Benchmark, Explanation
from parbench.bench.world.world import World
from parbench.workloads.probes.memory_probe import peak_during
from parbench.workloads.probes.overlap import OverlapProbe
from parbench.workloads.probes.peaks import find_peak
from parbench.workloads.probes.probe import ResetFn, Step, run_probes, slowest, time_step
from parbench.workloads.probes.sent_bytes import CommBytesProbe, CommRecorder

_DEFAULT_GROUP_NAMES = ("", "undefined", "default_pg")
"""Descriptions that torch gives to process groups without a name."""
_TIMED_STEPS = 3
"""The number of steps that are timed for MFU."""


class ExplainedUserStep:
    """A user's benchmark, to which ``explain_step`` adds a breakdown of the step.

    The breakdown has communication, parts of the time, memory and FLOPs. All other attributes are
    those of the user's benchmark.
    """

    def __init__(self, world: World, benchmark: Benchmark) -> None:
        """Wrap a benchmark that has no method ``explain_step``."""
        self._world = world
        self._benchmark = benchmark

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the user's benchmark."""
        return getattr(self._benchmark, name)

    def explain_step(self, reset: ResetFn, budget_seconds: float) -> Explanation:
        """Run probes on further steps, and return their merged metrics, facts and notes.

        One step is recorded first, to find the process groups that the user's code uses. The probes
        then measure sent bytes, parts of the time, memory and FLOPs. They call ``reset`` before
        each step. All steps together should take ``budget_seconds``.
        """
        world = self._world
        step = self._benchmark.step
        reset()
        with GroupRecorder() as recorder:
            step()
        axes = dict(sorted(recorder.groups.items()))
        dtype = getattr(self._benchmark, "dtype", torch.float32)
        probes = (
            ResourceProbe(world, dtype),
            CommBytesProbe(axes, dict),
            OverlapProbe(world, axes),
        )
        return run_probes(world, probes, step, reset, budget_seconds)


class GroupRecorder(CommRecorder):  # type: ignore[no-untyped-call]
    """Records the communication calls of a user's step, and the process groups of these calls.

    It is a torch dispatch mode. The axis under which metrics count a call is the name of its
    process group, because the mesh of a user's step is not known.
    """

    def __init__(self) -> None:
        """Make a recorder without process groups, to which each recorded call adds its group."""
        super().__init__({})
        self.groups: dict[str, dist.ProcessGroup] = {}
        """The process groups of the recorded calls, keyed by name."""

    def name_axis(self, group: dist.ProcessGroup) -> str:
        """Return the name of a process group as the axis of its calls, and add it to ``groups``."""
        name = name_group(group)
        self.groups.setdefault(name, group)
        return name


def name_group(group: dist.ProcessGroup) -> str:
    """Return a name for a process group: its description, or that of its mesh dimension.

    A group with neither is ``world`` if it has all ranks. Otherwise it is named by its number of
    ranks and the distance between the first two, such as ``ranks4x2``.
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
    """The memory and FLOPs of one step on one rank, and the seconds of some steps."""

    peak_bytes: int
    """The peak of the allocated bytes above those at the start of a step."""
    flops: int
    """The FLOPs of one step on this rank, as torch's FlopCounterMode counts them."""
    seconds: list[float]
    """The seconds of each timed step on this rank."""


@dataclass(frozen=True)
class ResourceProbe:
    """Measures the memory of a user's step, its FLOPs by torch's FlopCounterMode, and its MFU."""

    world: World
    """All ranks of the step."""
    dtype: torch.dtype
    """The type of the matrix multiplications, for the peak FLOP/s."""
    share = 0.0
    """0, because this probe always runs the same number of steps and needs no time budget."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> ResourceSample:
        """Run one step for its memory, one for its FLOPs and some for their time.

        Returns the sample of this rank.
        """
        device = self.world.device
        reset()
        peak_bytes = peak_during(step, device)
        reset()
        with FlopCounterMode(display=False) as counter:
            step()
        seconds = []
        for _ in range(_TIMED_STEPS):
            reset()
            seconds.append(time_step(step, self.world))
        return ResourceSample(
            peak_bytes=peak_bytes,
            flops=int(counter.get_total_flops()),
            seconds=seconds,
        )

    def summarize(self, samples: Sequence[ResourceSample]) -> Explanation:
        """Return the maximum of memory over ranks, the FLOPs per rank, and MFU.

        ``samples`` are those of all ranks. MFU is the mean FLOPs over ranks, divided by the time of
        a step and by the device's peak FLOP/s. The time is the median over steps of the slowest
        rank's seconds. MFU is missing if the peak is unknown.
        """
        peak_bytes = max(sample.peak_bytes for sample in samples)
        metrics = {"memory_peak": make_value("memory_peak", peak_bytes, "maximum over ranks")}
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
