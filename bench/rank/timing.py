"""The timed loop. One sample is one iteration on every rank; rank 0 decides how many, and why to stop."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from parbench.bench.launch.blocks import VISITS
from parbench.bench.launch.control_channel import StatusReply
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.device_timer import Device, DeviceTimer, Stamped
from parbench.bench.results.records import Stop
from parbench.bench.results.stats import spread, within_launch
from parbench.bench.text import UserError
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.torch_compat import coalescing
from parbench.bench.world.world import Subgroup, World

ARRIVAL, EXIT, DURATION, ISSUE, HIDDEN = range(5)
_MIN_VISIT = 3  # an odd count's median is as often above the true one as below
_STOPS: tuple[Stop, ...] = get_args(Stop)

Stamps = npt.NDArray[np.int64]
Sample = Callable[[], int | None]  # takes one; returns when an asynchronous one was issued, in ns of the host's clock


class Progress:
    """Counts the steps that this rank has begun in its present case; one thread measures, another reads."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.phase = "starting"
        self.steps = 0
        self.began_ns = time.time_ns()  # the present visit

    def where(self) -> StatusReply:
        # DDP's buckets are waited for in autograd's engine, NCCL's work in a synchronize
        waits = ("torch.distributed", "torch.autograd", "torch.cuda")
        frame = sys._current_frames().get(self._thread)
        modules = [deeper.f_globals.get("__name__", "") for deeper, _ in traceback.walk_stack(frame)] if frame else []
        return StatusReply(
            phase=self.phase,
            steps=self.steps,
            communicates=any(name.startswith(waits) for name in modules),
            stack="".join(traceback.format_stack(frame)) if frame else "",
        )


def sampler(mode: str, benchmark: Benchmark, world: World | None, steps: int) -> Sample:
    """Return what takes a sample of ``steps`` steps; ``UserError`` if the benchmark cannot be measured so.

    ``world`` holds the ranks that the benchmark communicates with, None where this rank stands by.
    """

    def repeat() -> None:
        for _ in range(steps):
            benchmark.step()

    def issued() -> int:
        works = issue()
        now = time.perf_counter_ns()
        for work in works:
            work.wait()
        return now

    if mode == "async":
        if not hasattr(benchmark, "issue"):
            raise UserError("mode async: this benchmark cannot be issued and waited for apart")
        issue: Callable[[], Sequence[dist.Work]] = benchmark.issue
        return issued
    if mode == "graph":  # captured once, after a warm-up on a side stream as CUDA graphs need it
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            benchmark.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads ask for events meanwhile
            repeat()
        return graph.replay
    if mode == "coalesced" and world is not None:
        # torch 2.11 does not wait for what it gathers itself and is given a device for
        gathers = world.backend == "gloo" or getattr(benchmark, "gathered", False)
        group, device = world.group, None if gathers else world.device

        def coalesced() -> None:
            with coalescing(group, device):
                repeat()

        return coalesced
    return repeat


@dataclass(frozen=True, kw_only=True)
class Timed:
    """All measured ranks' stamps in ns, shape (4, ranks, iterations); a list of it has a value for each iteration.

    Arrival and exit are on rank 0's clock; then come the duration, and of it the time to issue (0 if not apart).
    ``visits`` are the iterations of each visit in turn. On CUDA, ``hidden`` is the share of them in which every
    measured rank had launched all before its device began.
    """

    stamps: Stamps
    stop: Stop
    steps_per_sample: int
    warmup: int
    visits: tuple[int, ...] = ()
    hidden: float | None = None

    def samples(self, hops: int = 1) -> dict[str, list[float]]:
        """Return an outcome's lists, to the nanosecond: the slowest rank's time of a step, by hops, and its parts."""
        arrivals, exits, durations, issues = self.stamps
        transfers = exits.max(axis=0) - arrivals.max(axis=0)  # from the last arrival to the last exit
        last = durations[arrivals.argmax(axis=0), np.arange(durations.shape[1])]
        return {
            "seconds": _to_seconds(durations.max(axis=0) / self.steps_per_sample, hops),
            "skew_seconds": _to_seconds(np.ptp(arrivals, axis=0)),
            "transfer_seconds": _to_seconds(transfers, hops) if self.steps_per_sample == 1 else [],
            "issue_seconds": _to_seconds(issues.max(axis=0)) if issues.any() else [],
            "last_arriver_seconds": [] if self.hidden is None else _to_seconds(last / self.steps_per_sample, hops),
        }


def _to_seconds(values_ns: npt.NDArray[Any], hops: int = 1) -> list[float]:
    return [round(float(value) / 1e9, 9) / hops for value in values_ns]


class Timing:
    """Times a benchmark on a subgroup of the world in one visit or several, this rank late where that was asked for.

    Every rank, measured or not, takes part; what was seen is on rank 0. A sample may be ``many`` steps.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        world: World,
        progress: Progress,
        measure: Measure,
        subgroup: Subgroup,
        *,
        mode: str = "blocking",
        late_seconds: float = 0.0,
        beside: bool = False,
        device: Device | None = None,
    ) -> None:
        self.benchmark, self.world, self.progress, self._measure = benchmark, world, progress, measure
        self._ranks, self._subgroup_world = subgroup.ranks, subgroup.world
        self._mode, self._late_seconds, self._beside = mode, late_seconds, beside
        if device is None and world.device.type == "cuda":
            device = Device(world)
        self._timer = None if device is None else DeviceTimer(device, apart=mode == "async")
        self._hidden: list[bool] = []
        self.many = mode in ("pipelined", "coalesced", "graph")
        self._sample: Sample | None = None
        self._replay: Sample | None = None
        self._steps, self._warmup, self._each_seconds = 1, 0, 0.0
        self._visits: list[int] = []
        self._stamps: Stamps = np.empty((HIDDEN, len(self._ranks), 0), dtype=np.int64)
        self._reason: Stop = "visits"
        self._precise = False

    @property
    def timed(self) -> Timed | None:
        """What rank 0 has seen so far; None on other ranks."""
        if self.world.global_rank != 0:
            return None
        return Timed(
            stamps=self._stamps,
            stop=self._reason,
            steps_per_sample=self._steps,
            warmup=self._warmup,
            visits=tuple(self._visits),
            hidden=float(np.mean(self._hidden)) if self._hidden else None,
        )

    @property
    def full(self) -> bool:
        """Whether there are as many samples as there may be, or the usual visits have told enough."""
        return self._precise or sum(self._visits) >= self._measure.max_iterations

    @property
    def replay(self) -> Sample:
        """A graph of one step, captured once."""
        if self._replay is None:
            self._replay = sampler("graph", self.benchmark, self._subgroup_world, 1)
        return self._replay

    def close(self) -> None:
        """Let go of graphs, which hold their group's communicator."""
        self._sample = self._replay = None

    def run(self, seconds: float) -> Timed | None:
        """Take samples in one go until the median is known well enough, or the time is spent."""
        began = time.perf_counter()
        sample = self._warm_up(seconds)
        measure, widths = self._measure, list[float | None]()
        # the least count, or what there is time for where steps are long: two tell at least how they differ
        left = max(seconds - (time.perf_counter() - began), 5.0)
        affordable = max(2, int(left / self._each_seconds))
        batch, stop = int(self.world.decide([min(measure.min_iterations, affordable)])[0]), -1
        while stop < 0:
            self._gather(sample, batch)
            if self.world.global_rank == 0:
                left, done = seconds - (time.perf_counter() - began), self._stamps.shape[2]
                widths.append(width_in_one_go(self._durations()))
                reason = _why_stop(done, widths, measure, left)
                stop = -1 if reason is None else _STOPS.index(reason)
                affordable = max(int(left / self._each_seconds), 1)
                batch = max(1, min(done, affordable, measure.max_iterations - done))  # done doubles
            batch, stop = (int(value) for value in self.world.decide([batch, stop]))
        self._visits, self._reason = [self._stamps.shape[2]], _STOPS[stop]
        return self.timed

    def visit(self, seconds: float, left: int) -> None:
        """Take this visit's samples; ``left`` visits more are to come.

        As many as make the interval as narrow as asked if samples are independent. Where they are not, more of them at
        once would not narrow it, and visits of unlike length would not be alike.
        """
        sample = self._warm_up(seconds)
        affordable, decides = max(1, int(seconds / self._each_seconds)), self.world.global_rank == 0
        [count] = map(int, self.world.decide([min(self._wanted(left), affordable) if decides else 0]))
        self._gather(sample, count)
        self._visits.append(count)
        if decides:
            self._reason = self._why_end(affordable)
        if left and len(self._visits) >= VISITS:
            self._precise = bool(self.world.decide([float(self._reason == "precision")])[0])

    def _wanted(self, left: int) -> int:
        seconds, limit = self._durations(), self._measure.max_iterations - sum(self._visits)
        if not seconds:
            return min(_MIN_VISIT, limit)
        sigma = spread(seconds) / 1.349  # of a normal: its interquartile range is 1.349 sigma
        # the second of ten medians of k samples is one standard error from the middle, 1.25 sigma / sqrt(k); scatter
        # of few samples reads a little high where it reads high, so a little less is asked for
        wanted = math.ceil((1.2 * sigma / self._measure.precision) ** 2)
        # three or so say little of scatter: a second visit is a little longer, and all after it are alike
        most = limit // (left + 1) if len(self._visits) > 1 else 3 * _MIN_VISIT
        if len(self._visits) >= VISITS:  # samples that were fewer did not tell enough
            wanted = most
        return min(max(_MIN_VISIT, min(wanted, most)), limit)

    def _why_end(self, affordable: int) -> Stop:
        """Say why there are no more samples than these, should this be the last visit."""
        seconds = self._durations()
        width = within_launch(seconds, self._visits).half_width
        if width is not None and width <= self._measure.precision:
            return "precision"
        if self.full:
            return "max-iters"
        return "budget" if self._visits[-1] == affordable else "visits"

    def _warm_up(self, seconds: float) -> Sample:
        """Take steps that are not timed: all that were asked for at first, one where caches may hold another's data."""
        world, measure, began = self.world, self._measure, time.perf_counter()
        self.progress.phase = "warm-up"
        warming = sampler("blocking" if self.many else self._mode, self.benchmark, self._subgroup_world, 1)
        first_ns = int(self.take(warming, 1)[DURATION, 0])
        if self._sample is None:
            each_seconds = time.perf_counter() - began
            # a fifth of the time at most for warm-up; a sample of many steps lasts about 5 ms
            warmup = max(0, min(measure.warmup - 1, int(0.2 * seconds / each_seconds)))
            steps = min(max(int(5e6 / max(first_ns, 1)), 4), 64) if self.many else 1
            warmup, self._steps = (int(value) for value in world.decide([warmup, steps]))
            self.take(warming, warmup)
            self._warmup, self._each_seconds = warmup + 1, each_seconds * self._steps
            self._sample = sampler(self._mode, self.benchmark, self._subgroup_world, self._steps)
        self.progress.phase = "timed"
        return self._sample

    def _gather(self, sample: Sample, count: int) -> None:
        began = time.perf_counter()
        gathered = gather_stamps(self.take(sample, count, self._steps), self.world, self._ranks)
        self._each_seconds = (time.perf_counter() - began) / count
        if gathered is None:
            return
        self._stamps = np.concatenate([self._stamps, gathered[:HIDDEN]], axis=2)
        if self._timer is not None:
            # The time of an iteration is that of its slowest rank, so one launch that shows is enough.
            self._hidden += gathered[HIDDEN].all(axis=0).tolist()

    def _durations(self) -> list[float]:
        durations: list[float] = self._stamps[DURATION].max(axis=0).tolist()
        return durations

    def take(self, sample: Sample, count: int, steps: int = 1) -> torch.Tensor:
        """Take ``count`` samples of so many steps; return this rank's stamps, shape (5, count).

        The rows are ``ARRIVAL`` to ``ISSUE`` in ns, and ``HIDDEN``, 1 for a launch that was hidden.
        """
        timer, rows = self._timer, []
        for _ in range(count):
            self.start_line(steps)
            rows.append(_timed_on_host(sample) if timer is None else timer.timed(sample, steps))
        return torch.tensor(rows, dtype=torch.int64).reshape(count, HIDDEN + 1).T

    def start_line(self, steps: int = 0) -> None:
        """Bring all ranks to the beginning of a step, and come late to it where that was asked for.

        On CUDA, what is to be timed begins at a line on the device: ``steps`` says how many are to be launched there.
        """
        self.benchmark.reset()
        (self.world.sync_stream if self._beside else self.world.sync)()
        self.progress.steps += 1
        self.world.barrier()
        if self._timer is not None and steps:
            self._timer.line(steps, late=self._late_seconds > 0)
        if self._late_seconds:
            time.sleep(self._late_seconds)


def width_in_one_go(values: Sequence[float]) -> float | None:
    """Return the half-width that ten parts, one after another, would tell if they were independent."""
    n = len(values)
    parts = [n * (i + 1) // 10 - n * i // 10 for i in range(10)]
    return within_launch(values, parts).half_width if n >= 20 else None


def _why_stop(done: int, widths: Sequence[float | None], measure: Measure, left_seconds: float) -> Stop | None:
    """Return why to stop after ``done`` iterations, from the interval's half-width after each batch; None to go on."""
    width = widths[-1]
    if width is not None and width <= measure.precision:
        return "precision"
    if done >= measure.max_iterations:
        return "max-iters"
    # two doublings hardly narrowed the interval: more samples of this launch will not
    known = [width for width in widths[-3:] if width]
    if done >= 100 and len(known) == 3 and all(b / a > 0.95 for a, b in pairwise(known)):
        return "converged"
    return "budget" if left_seconds <= 0 else None


def _timed_on_host(sample: Sample) -> Stamped:
    arrival = time.perf_counter_ns()
    issued = sample()
    done = time.perf_counter_ns()
    return arrival, done, done - arrival, issued - arrival if issued else 0, 0


def gather_stamps(stamps: torch.Tensor, world: World, ranks: Sequence[int]) -> Stamps | None:
    """Return the stamps of ``ranks`` on rank 0, shape (rows, ranks, count), arrivals and exits on its clock."""
    contiguous = stamps.contiguous()
    parts = [torch.empty_like(contiguous) for _ in world.hosts] if world.global_rank == 0 else None
    dist.gather(contiguous, parts, group=world.control, group_dst=0)
    if parts is None:
        return None
    together: Stamps = torch.stack(parts, dim=1).numpy()
    together[[ARRIVAL, EXIT]] -= np.array(world.clock.offsets_ns, dtype=np.int64)[None, :, None]
    return together[:, list(ranks)]
