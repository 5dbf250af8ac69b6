"""The timed loop: a sample is one iteration on every rank, and rank 0 decides how many to take."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from parbench.bench.launch.budget import BLOCKS
from parbench.bench.launch.messages import HangReport
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.device_timer import DeviceQueue, DeviceTimer, Stamp
from parbench.bench.results.records import MIN_HIDDEN, Stop
from parbench.bench.results.stats import compute_relative_iqr, estimate_median
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.torch_compat import coalesce_calls
from parbench.bench.world.world import Subgroup, World

ARRIVAL, EXIT, DURATION, ISSUE, HIDDEN = range(5)
"""The rows of stamps. Only a device has ``HIDDEN``, which is 1 if the launch was hidden."""
_MIN_BLOCK = 3  # the median of an odd number is as often above the true one as below
_MANY_STEPS_NS = 5_000_000  # duration of a sample of many steps
_MIN_MANY_STEPS = 4
_MAX_MANY_STEPS = 64

Stamps = npt.NDArray[np.int64]
Sampler = Callable[[], int | None]
"""Takes a sample. Returns the host's time in ns at which an asynchronous operation was issued,
otherwise None."""


class Progress:
    """The phase and the step count of this rank in its current case, which the watchdog reports."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.phase = "starting"
        self.steps = 0
        self.began_ns = time.time_ns()  # of the current block

    def make_hang_report(self) -> HangReport:
        """Return a report of the measuring thread's position, from its stack.

        Another thread calls it.
        """
        # DDP waits for its buckets in autograd's engine, and NCCL's work in a synchronize.
        waiting_modules = ("torch.distributed", "torch.autograd", accelerator.WAITING_MODULE)
        frame = sys._current_frames().get(self._thread)
        frames = [frame for frame, _ in traceback.walk_stack(frame)] if frame else []
        modules = [frame.f_globals.get("__name__", "") for frame in frames]
        return HangReport(
            phase=self.phase,
            steps=self.steps,
            communicates=any(name.startswith(waiting_modules) for name in modules),
            stack="".join(traceback.format_stack(frame)) if frame else "",
        )


def make_sampler(mode: str, benchmark: Benchmark, world: World | None, steps: int) -> Sampler:
    """Return a function that takes one sample of ``steps`` steps in a mode such as ``graph``.

    ``world`` has the ranks that communicate with each other. It is None on an idle rank.
    """

    def repeat() -> None:
        for _ in range(steps):
            benchmark.step()

    if mode == "async":
        issue: Callable[[], Sequence[dist.Work]] = cast(Any, benchmark).issue

        def issue_and_wait() -> int:
            works = issue()
            issued_ns = time.perf_counter_ns()
            for work in works:
                work.wait()
            return issued_ns

        return issue_and_wait
    if mode == "graph":
        return accelerator.capture_graph(benchmark.step, repeat)
    if mode == "coalesced" and world is not None:
        # torch 2.11 does not wait for tensors that it gathers itself if it has a device.
        gathers = world.backend == "gloo" or getattr(benchmark, "has_batched_call", False)
        group = world.group
        device = None if gathers else world.device

        def repeat_coalesced() -> None:
            with coalesce_calls(group, device):
                repeat()

        return repeat_coalesced
    return repeat


@dataclass(kw_only=True)
class TimedSamples:
    """The samples of a case so far: the stamps of all measured ranks in ns, and their origin."""

    stamps: Stamps
    """The arrival and the exit on rank 0's clock, the duration, and the time to issue.

    The time to issue is a part of the duration, and 0 unless it is timed. The shape is
    (4, ranks, samples). Ranks other than 0 have no stamps.
    """
    stop: Stop = "visits"
    """The reason why no more samples were taken."""
    steps_per_sample: int = 1
    warmup: int = 0  # untimed steps before the first sample
    samples_per_block: list[int] = field(default_factory=list)
    has_hidden_launch: list[bool] = field(default_factory=list)
    """On CUDA, True for each sample that all ranks had launched before their device began."""

    @property
    def hidden(self) -> float | None:
        """The share of samples with a hidden launch, None if the host measured the time."""
        return float(np.mean(self.has_hidden_launch)) if self.has_hidden_launch else None

    def compute_durations(self) -> list[float]:
        """Return the duration of each sample in ns, the maximum over the ranks."""
        durations: list[float] = self.stamps[DURATION].max(axis=0).tolist()
        return durations

    @property
    def has_arrivals(self) -> bool:
        """True if arrivals show when the ranks began.

        False if the devices began together, because then arrivals only show when their hosts woke
        up.
        """
        return self.hidden is None or self.hidden < MIN_HIDDEN

    def compute_seconds(self, hops: int = 1) -> dict[str, list[float]]:
        """Return the seconds of each sample by metric name, such as ``time`` and ``skew``.

        The ``time`` of a sample is the maximum over the ranks, divided by its steps and ``hops``.
        """
        arrivals, exits, durations, issues = self.stamps
        times = _to_seconds(durations.max(axis=0) / self.steps_per_sample, hops)
        seconds = {"time": times}
        if issues.any():
            issue_times = _to_seconds(issues.max(axis=0))
            seconds["issue_time"] = issue_times
            pairs = zip(times, issue_times, strict=True)
            seconds["wait_time"] = [time - issue_time for time, issue_time in pairs]
        if self.has_arrivals:
            seconds["skew"] = _to_seconds(np.ptp(arrivals, axis=0))
            if self.steps_per_sample == 1:
                transfers = exits.max(axis=0) - arrivals.max(axis=0)
                seconds["transfer"] = _to_seconds(transfers, hops)
        rank_means = durations.mean(axis=0) / self.steps_per_sample
        seconds["rank_mean_time"] = _to_seconds(rank_means, hops)
        return seconds


def _to_seconds(values_ns: npt.NDArray[Any], hops: int = 1) -> list[float]:
    """Convert ns to seconds and divide by ``hops``."""
    return [round(float(value) / 1e9, 9) / hops for value in values_ns]


@dataclass(kw_only=True)
class Stopwatch:
    """Takes samples of a benchmark, each from a start line that all ranks reach together."""

    benchmark: Benchmark
    world: World
    progress: Progress
    late_seconds: float = 0.0
    """An injected delay of this rank."""
    has_load: bool = False
    """True if a background load runs, which is not waited for."""
    timer: DeviceTimer | None = None
    """The timer of a CUDA device, None on a CPU."""

    def start_line(self, steps: int = 0) -> None:
        """Reset the benchmark, wait for all ranks, and then wait for an injected delay.

        ``steps`` is the number of steps in the sample that follows. On CUDA, a start line is also
        queued on the device, unless ``steps`` is 0.
        """
        self.benchmark.reset()
        if self.has_load:
            self.world.sync_stream()
        else:
            self.world.sync()
        self.progress.steps += 1
        self.world.barrier()
        if self.timer is not None and steps > 0:
            self.timer.queue_start_line(steps, is_late=self.late_seconds > 0)
        if self.late_seconds > 0:
            time.sleep(self.late_seconds)

    def take(self, sampler: Sampler, count: int, steps: int = 1) -> torch.Tensor:
        """Take ``count`` samples of ``steps`` steps and return the stamps of this rank.

        The shape is (5, count). Rows ``ARRIVAL`` to ``ISSUE`` are in ns. Row ``HIDDEN`` is 1 if the
        launch was hidden.
        """
        timer = self.timer
        stamps = []
        for _ in range(count):
            self.start_line(steps)
            if timer is None:
                stamps.append(_time_on_host(sampler))
            else:
                stamps.append(timer.measure(sampler, steps))
        return torch.tensor(stamps, dtype=torch.int64).reshape(count, HIDDEN + 1).T


def _time_on_host(sampler: Sampler) -> Stamp:
    """Take one sample and return its stamp by the host's clock."""
    arrival = time.perf_counter_ns()
    issued = sampler()
    done = time.perf_counter_ns()
    return arrival, done, done - arrival, issued - arrival if issued else 0, 0


class CaseTimer:
    """Takes the samples of a case, in one block or in several, until they are precise enough.

    All ranks of the world call its methods together, also those that are not measured. Rank 0
    gathers the stamps and decides how many samples to take.
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
        has_load: bool = False,
        device: DeviceQueue | None = None,
    ) -> None:
        if device is None and world.device.type == "cuda":
            device = DeviceQueue(world)
        self._timer = None if device is None else DeviceTimer(device, times_issue=mode == "async")
        self.stopwatch = Stopwatch(
            benchmark=benchmark,
            world=world,
            progress=progress,
            late_seconds=late_seconds,
            has_load=has_load,
            timer=self._timer,
        )
        self.samples = TimedSamples(
            stamps=np.empty((HIDDEN, len(subgroup.ranks), 0), dtype=np.int64)
        )
        self.takes_many_steps = mode in ("pipelined", "coalesced", "graph")
        self._benchmark = benchmark
        self._world = world
        self._progress = progress
        self._measure = measure
        self._subgroup = subgroup
        self._mode = mode
        self._sampler: Sampler | None = None  # None before the warm-up
        self._replay: Sampler | None = None
        self._sample_seconds = 0.0  # with reset and barrier, as last measured
        self._is_precise = False

    @property
    def is_complete(self) -> bool:
        """True if the median is precise or max_iterations is reached, so that no block follows."""
        return self._is_precise or self._count_remaining() <= 0

    @property
    def replay(self) -> Sampler:
        """Replays the CUDA graph of one step, which is captured at the first use."""
        if self._replay is None:
            self._replay = make_sampler("graph", self._benchmark, self._subgroup.world, 1)
        return self._replay

    def close(self) -> None:
        """Release the CUDA graphs, because they use the communicator of their group."""
        self._sampler = None
        self._replay = None

    def measure_until_precise(self, seconds: float) -> None:
        """Take samples until the median is precise enough or ``seconds`` are over."""
        end = time.perf_counter() + seconds
        sampler = self._warm_up(seconds)
        # Long steps may not leave time for more, but two samples show whether they differ.
        affordable = max(2, self._count_affordable(max(end - time.perf_counter(), 5.0)))
        batch = self._broadcast_from_rank_0(min(self._measure.min_iterations, affordable))
        while batch > 0:
            self._take_samples(sampler, batch)
            if self._world.global_rank == 0:
                batch = self._choose_batch(end - time.perf_counter())
            batch = self._broadcast_from_rank_0(batch)
        self.samples.samples_per_block = [self.samples.stamps.shape[2]]

    def _choose_batch(self, remaining_seconds: float) -> int:
        """Return the number of samples to take next, 0 to stop, and note the reason to stop.

        Each batch doubles the samples, if there is time.
        """
        samples = self.samples
        num_samples: int = samples.stamps.shape[2]
        num_remaining = self._measure.max_iterations - num_samples
        if self._is_narrow(compute_half_width(samples.compute_durations())):
            samples.stop = "precision"
        elif num_remaining <= 0:
            samples.stop = "max-iters"
        elif remaining_seconds <= 0:
            samples.stop = "budget"
        else:
            return min(num_samples, self._count_affordable(remaining_seconds), num_remaining)
        return 0

    def _is_narrow(self, half_width: float | None) -> bool:
        """Return True if the half-width of an interval is at most the required one."""
        return half_width is not None and half_width <= self._measure.precision

    def _count_affordable(self, seconds: float) -> int:
        """Return the number of samples that this time suffices for, at least 1."""
        return max(1, int(seconds / self._sample_seconds))

    def _count_remaining(self) -> int:
        """Return the number of samples that later blocks may take."""
        return self._measure.max_iterations - sum(self.samples.samples_per_block)

    def measure_block(self, seconds: float, num_later: int) -> None:
        """Take the samples of one block in about ``seconds``.

        ``num_later`` is the number of blocks to come. The number of samples suffices for the
        required precision if samples are independent. If samples of a block resemble each other,
        more samples would not help, and blocks should have equal length.
        """
        sampler = self._warm_up(seconds)
        samples = self.samples
        is_rank_0 = self._world.global_rank == 0
        affordable = self._count_affordable(seconds)
        count = min(self._choose_count(num_later), affordable) if is_rank_0 else 0
        count = self._broadcast_from_rank_0(count)
        self._take_samples(sampler, count)
        samples.samples_per_block.append(count)
        if is_rank_0:
            samples.stop = self._find_block_stop(affordable)
        if num_later > 0 and len(samples.samples_per_block) >= BLOCKS:
            self._is_precise = bool(self._broadcast_from_rank_0(samples.stop == "precision"))

    def _broadcast_from_rank_0(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        [decision] = self._world.broadcast_from_rank_0([value])
        return int(decision)

    def _choose_count(self, num_later: int) -> int:
        """Return the number of samples for this block, from the variation of the samples so far."""
        durations = self.samples.compute_durations()
        num_blocks = len(self.samples.samples_per_block)
        limit = self._count_remaining()
        if not durations:
            return min(_MIN_BLOCK, limit)
        # The interquartile range of a normal distribution is 1.349 sigma.
        sigma = compute_relative_iqr(durations) / 1.349
        # The second of ten medians of k samples is one standard error, 1.25 sigma / sqrt(k), from
        # the middle. The factor is a little less, because sigma of few samples is often too large.
        count = math.ceil((1.2 * sigma / self._measure.precision) ** 2)
        # The few samples of the first block do not show the variation.
        max_count = limit // (num_later + 1) if num_blocks > 1 else 3 * _MIN_BLOCK
        if num_blocks >= BLOCKS:
            # Fewer samples than affordable were not enough in the planned blocks.
            count = max_count
        return min(max(_MIN_BLOCK, min(count, max_count)), limit)

    def _find_block_stop(self, affordable: int) -> Stop:
        """Return the stop reason to record if no block follows.

        ``affordable`` is the number of samples for which this block had time.
        """
        counts = self.samples.samples_per_block
        half_width = estimate_median(self.samples.compute_durations(), counts).half_width
        if self._is_narrow(half_width):
            return "precision"
        if self.is_complete:
            return "max-iters"
        return "budget" if counts[-1] == affordable else "visits"

    def _warm_up(self, seconds: float) -> Sampler:
        """Take untimed steps and return the sampler.

        The first block takes all requested warm-up steps. Each later block takes one, because the
        caches may hold the data of another case.
        """
        began = time.perf_counter()
        self._progress.phase = "warm-up"
        mode = "blocking" if self.takes_many_steps else self._mode
        single_step = make_sampler(mode, self._benchmark, self._subgroup.world, 1)
        step_ns = int(self.stopwatch.take(single_step, 1)[DURATION, 0])
        if self._sampler is None:
            step_seconds = time.perf_counter() - began
            # The warm-up takes at most a fifth of the time.
            max_warmup = int(0.2 * seconds / step_seconds)
            warmup = max(0, min(self._measure.warmup - 1, max_warmup))
            warmup = self._broadcast_from_rank_0(warmup)
            self.stopwatch.take(single_step, warmup)
            self.samples.warmup = warmup + 1
            steps = self._broadcast_from_rank_0(self._choose_steps(step_ns))
            self.samples.steps_per_sample = steps
            self._sample_seconds = step_seconds * steps
            own_world = self._subgroup.world
            self._sampler = make_sampler(self._mode, self._benchmark, own_world, steps)
        self._progress.phase = "timed"
        return self._sampler

    def _choose_steps(self, step_ns: int) -> int:
        """Return the number of steps of a sample.

        If possible they are few enough that a spin hides their launches.
        """
        if not self.takes_many_steps:
            return 1
        limit = _MAX_MANY_STEPS
        if self._timer is not None and self._mode != "graph":  # a graph has a single launch
            limit = min(limit, self._timer.count_hideable_steps())
        return max(min(_MANY_STEPS_NS // max(step_ns, 1), limit), _MIN_MANY_STEPS)

    def _take_samples(self, sampler: Sampler, count: int) -> None:
        """Take ``count`` samples and, on rank 0, append the stamps of all measured ranks."""
        began = time.perf_counter()
        samples = self.samples
        stamps = self.stopwatch.take(sampler, count, samples.steps_per_sample)
        gathered = gather_stamps(stamps, self._world, self._subgroup.ranks)
        self._sample_seconds = (time.perf_counter() - began) / count
        if gathered is None:
            return
        samples.stamps = np.concatenate([samples.stamps, gathered[:HIDDEN]], axis=2)
        if self._timer is not None:
            # The slowest rank is the sample's time, so the launch must be hidden on all ranks.
            samples.has_hidden_launch += gathered[HIDDEN].all(axis=0).tolist()


def compute_half_width(values: Sequence[float]) -> float | None:
    """Return the half-width of the median's 95 % interval relative to the median.

    Ten successive parts of the values are assumed to be independent. Returns None for fewer than 20
    values.
    """
    n = len(values)
    if n < 20:
        return None
    counts = [n * (part + 1) // 10 - n * part // 10 for part in range(10)]
    return estimate_median(values, counts).half_width


def gather_stamps(stamps: torch.Tensor, world: World, ranks: Sequence[int]) -> Stamps | None:
    """Return the stamps of ``ranks`` on rank 0, shape (rows, ranks, samples), None on other ranks.

    Arrivals and exits are converted to rank 0's clock. Every rank of the world calls it.
    """
    contiguous = stamps.contiguous()
    parts = None
    if world.global_rank == 0:
        parts = [torch.empty_like(contiguous) for _ in world.hosts]
    dist.gather(contiguous, parts, group=world.control, group_dst=0)
    if parts is None:
        return None
    gathered: Stamps = torch.stack(parts, dim=1).numpy()
    offsets_ns = np.array(world.clock.offsets_ns, dtype=np.int64)
    gathered[[ARRIVAL, EXIT]] -= offsets_ns[None, :, None]
    return gathered[:, list(ranks)]
