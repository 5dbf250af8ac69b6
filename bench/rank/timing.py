"""The timed loop of a case, in which rank 0 decides how many samples all ranks take.

A sample is the time of one or more steps of a benchmark, from a start line: a barrier that all
ranks pass together. A block is a run of samples of one case without other cases between. A stamp
holds the times of one sample on one rank.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from parbench.bench.plan.plan import Measure
from parbench.bench.rank.device_timer import DeviceTimer, Stamp
from parbench.bench.rank.progress import Progress
from parbench.bench.results.records import MIN_HIDDEN, Stop
from parbench.bench.results.stats import compute_relative_iqr, estimate_median
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.world import Subgroup, World

ARRIVAL, EXIT, DURATION, ISSUE, HIDDEN = range(5)
"""The indices of the values in a stamp, which holds the times of one sample on one rank.

``ARRIVAL`` is the time in ns at which the rank began the sample and ``EXIT`` the time at which it
ended. ``DURATION`` is the time between them in ns. ``ISSUE`` is the part of the duration in ns
until an asynchronous call had returned, 0 if that is not timed. ``HIDDEN`` is 1 if the host had
launched the whole sample before the device began it, otherwise 0.
"""
_MIN_BLOCK = 3
"""The least number of samples in one of several blocks of a case, if limits allow so many.

The limits are the time of the block and ``max_iterations``.
"""
_MANY_STEPS_NS = 5_000_000
"""The intended duration in ns of a sample in the modes pipelined and graph.

These modes have many steps per sample.
"""
_MIN_MANY_STEPS = 4
"""The least number of steps per sample in a mode with many steps per sample."""
_MAX_MANY_STEPS = 32
"""The largest number of steps per sample in a mode with many steps per sample."""

Stamps = npt.NDArray[np.int64]
"""The times of samples as an array of 64-bit integers.

The first axis is the kind of value: ``ARRIVAL``, ``EXIT``, ``DURATION``, ``ISSUE`` and
``HIDDEN``. The last axis is the sample.
"""
Sampler = Callable[[], int | None]
"""A function that runs the steps of one sample on this rank.

In mode async it returns the time at which the asynchronous call had returned, in ns of
``time.perf_counter_ns()``. In other modes it returns None.
"""


def make_sampler(mode: str, benchmark: Benchmark, steps: int) -> Sampler:
    """Return a function that takes one sample of ``steps`` steps of the benchmark on this rank.

    Args:
        mode: ``blocking`` takes one step. ``pipelined`` queues the steps one after the other.
            ``graph`` replays a CUDA graph of the steps. ``async`` takes one step, and notes when
            its asynchronous call has returned.
        benchmark: the benchmark whose steps are taken.
        steps: the number of steps in a sample.
    """

    def repeat() -> None:
        """Take all steps of a sample, one after the other."""
        for _ in range(steps):
            benchmark.step()

    if mode == "async":
        issue: Callable[[], Sequence[dist.Work]] = cast(Any, benchmark).issue

        def issue_and_wait() -> int:
            """Issue one operation, wait for it, and return the time in ns when it was issued."""
            works = issue()
            issued_ns = time.perf_counter_ns()
            for work in works:
                work.wait()
            return issued_ns

        return issue_and_wait
    if mode == "graph":
        return accelerator.capture_graph(benchmark.step, repeat)
    return repeat


@dataclass(kw_only=True)
class TimedSamples:
    """The samples of a case so far, each with the time of its steps on every measured rank.

    Only rank 0 has the samples. On other ranks the arrays are empty.
    """

    stamps: Stamps
    """The times of the samples on all measured ranks, in the order of ranks and of measurement.

    The shape is (5, ranks, samples). The first axis is ``ARRIVAL``, ``EXIT``, ``DURATION``,
    ``ISSUE`` and ``HIDDEN``. Arrivals and exits are in ns on the clock of rank 0. Durations and
    issue times are in ns.
    """
    is_on_device: bool = False
    """True if CUDA events measured the times, False if the host's clock did."""
    stop: Stop = "blocks"
    """The reason why no more samples were taken.

    ``precision``: the interval of the median is narrow enough. ``max-iters``: the largest number of
    samples is reached. ``budget``: the time was over. ``blocks``: all planned blocks were measured.
    """
    steps_per_sample: int = 1
    """The number of steps of the benchmark in each sample."""
    warmup: int = 0
    """The number of untimed steps before the first sample, without the check of the results."""
    samples_per_block: list[int] = field(default_factory=list)
    """The number of samples in each block so far, in the order of measurement.

    Between two blocks the ranks measured other cases.
    """

    @property
    def hidden(self) -> float | None:
        """The fraction of samples that all hosts had launched before the devices began them.

        None if the host's clock measured the times.
        """
        # The slowest rank is the sample's time, so the launch must be hidden on all ranks.
        return float(self.stamps[HIDDEN].all(axis=0).mean()) if self.is_on_device else None

    def compute_durations(self) -> list[float]:
        """Return the duration of each sample in ns: the maximum over ranks, for all its steps."""
        durations: list[float] = self.stamps[DURATION].max(axis=0).tolist()
        return durations

    @property
    def has_arrivals(self) -> bool:
        """True if the arrivals in ``stamps`` are the times at which each rank began a sample.

        ``stamps`` holds the times of all samples on each rank. The result is False if the hosts had
        launched at least 90 % of the samples before the devices began them. Then the devices began
        each sample together, and an arrival only shows when the host noticed the sample's end.
        """
        return self.hidden is None or self.hidden < MIN_HIDDEN

    def compute_seconds(self, hops: int = 1) -> dict[str, list[float]]:
        """Return lists with the seconds of each sample, in the order of samples, by metric name.

        They are rounded to 1 ns.

        - ``time``: the maximum duration over the ranks, divided by the number of steps of a sample
          and by ``hops``.
        - ``rank_mean_time``: like ``time``, but with the mean over the ranks.
        - ``issue_time``: the time until an asynchronous call has returned, maximum over ranks. Only
          in mode async.
        - ``skew``: the last arrival less the first one. Only if ``has_arrivals``.
        - ``transfer``: the last exit less the last arrival, divided by ``hops``. Only if
          ``has_arrivals`` and a sample has one step.

        ``hops`` is 2 for a benchmark whose step is a round trip, of which the time of one direction
        counts. Otherwise it is 1.
        """
        arrivals, exits, durations, issues, _ = self.stamps
        divisor = self.steps_per_sample * hops
        times_ns = {"time": durations.max(axis=0) / divisor}
        if issues.any():
            times_ns["issue_time"] = issues.max(axis=0)
        if self.has_arrivals:
            times_ns["skew"] = np.ptp(arrivals, axis=0)
            if self.steps_per_sample == 1:
                times_ns["transfer"] = (exits.max(axis=0) - arrivals.max(axis=0)) / hops
        times_ns["rank_mean_time"] = durations.mean(axis=0) / divisor
        return {name: (values.round() / 1e9).tolist() for name, values in times_ns.items()}


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Takes samples of a benchmark on this rank. Each begins after a barrier of all ranks."""

    benchmark: Benchmark
    """The benchmark whose steps are timed."""
    world: World
    """All ranks of the run, which meet before each sample even if they are not measured."""
    progress: Progress
    """The position of this rank in its case, with the number of samples, to report a hang."""
    late_seconds: float = 0.0
    """The seconds that a fault delays this rank after each barrier, 0 without a fault."""
    has_load: bool = False
    """True if a background load runs on the device during the samples.

    Before a sample the host then waits only for the rank's own stream, because the load never ends.
    """
    timer: DeviceTimer | None = None
    """The timer with CUDA events, None if the host's clock times the samples."""

    def start_line(self, steps: int = 0) -> None:
        """Reset the benchmark, wait for all ranks, and then sleep for this rank's injected delay.

        ``steps`` is the number of steps in the sample that follows. On CUDA a barrier is also
        queued on the device. If ``steps`` is 0, the step that follows is not timed and no barrier
        is queued.
        """
        self.benchmark.reset()
        if self.has_load:
            self.world.sync_stream()
        else:
            self.world.sync()
        self.progress.steps += 1
        self.world.barrier()
        self.progress.restart()
        if self.timer is not None and steps > 0:
            self.timer.queue_start_line(steps)
        if self.late_seconds > 0:
            time.sleep(self.late_seconds)

    def take(self, sampler: Sampler, count: int, steps: int = 1) -> torch.Tensor:
        """Take ``count`` samples of ``steps`` steps each and return their times on this rank.

        The result has the shape (5, count), with a column for each sample. Its rows are the time at
        which the rank began the sample, the time at which it ended, the duration of all ``steps``,
        and the part of the duration until asynchronous calls had returned, in ns on this rank's own
        clock. The fifth row is 1 if the host had launched the whole sample before the device began
        it, otherwise 0. ``sampler`` runs the steps of one sample.
        """
        timer = self.timer
        stamps = []
        for _ in range(count):
            self.start_line(steps)
            stamp = timer.measure(sampler, steps) if timer else _time_on_host(sampler)
            stamps.append(stamp)
        return torch.tensor(stamps, dtype=torch.int64).reshape(count, HIDDEN + 1).T


def _time_on_host(sampler: Sampler) -> Stamp:
    """Take one sample and return its times by the host's clock, see ``Stamp``.

    The times are in ns of ``time.perf_counter_ns()``. ``sampler`` runs the steps of the sample.
    """
    arrival = time.perf_counter_ns()
    issued = sampler()
    done = time.perf_counter_ns()
    return arrival, done, done - arrival, issued - arrival if issued else 0, 0


class CaseTimer:
    """Takes the samples of a case in one block or in several, as many as a precise median needs.

    A case is a benchmark with values for its parameters. Between two blocks the ranks measure other
    cases. All ranks of the run call the methods at the same point, including ranks that are not
    measured. Rank 0 gathers the times and decides on the number of samples.
    """

    def __init__(
        self, stopwatch: Stopwatch, measure: Measure, subgroup: Subgroup, mode: str = "blocking"
    ) -> None:
        """Prepare the timing without taking a step.

        Args:
            stopwatch: takes single samples of the benchmark of this rank.
            measure: the limits on the number of samples, and the required precision.
            subgroup: the ranks that are measured, and the process group in which this rank takes
                steps.
            mode: the way in which steps are launched and timed, see ``make_sampler``.
        """
        self.stopwatch = stopwatch
        self.samples = TimedSamples(
            stamps=np.empty((HIDDEN + 1, len(subgroup.ranks), 0), dtype=np.int64),
            is_on_device=stopwatch.timer is not None,
        )
        self.takes_many_steps = mode in ("pipelined", "graph")
        """True if a sample has several steps, whose duration is then divided by their number."""
        self._world = stopwatch.world
        self._measure = measure
        self._ranks = subgroup.ranks
        self._mode = mode
        self._sampler: Sampler | None = None  # None before the warm-up
        self._sample_seconds = 0.0
        """The wall time of one sample with its reset and barrier, as last measured."""

    @property
    def is_complete(self) -> bool:
        """True if ``max_iterations`` samples are taken, so that no further block follows."""
        return self._count_remaining() <= 0

    def close(self) -> None:
        """Release the CUDA graph before the communicator that it uses is destroyed."""
        self._sampler = None

    def measure_until_precise(self, seconds: float) -> None:
        """Warm up and take all samples of the case as one block of about ``seconds``.

        The samples are taken in batches. The first batch has ``Measure.min_iterations`` samples,
        and each later batch doubles the total number. The block ends when the 95 % interval of the
        median is as narrow as required, when the largest number of samples is taken, or when the
        time is over. The reason is stored in ``samples.stop``.
        """
        end = time.perf_counter() + seconds
        samples = self.samples
        sampler = self._warm_up(seconds)
        # Long steps may not leave time for more, but two samples show whether they differ.
        affordable = max(2, self._count_affordable(max(end - time.perf_counter(), 5.0)))
        batch = self._broadcast_from_rank_0(min(self._measure.min_iterations, affordable))
        while batch > 0:
            self._take_samples(sampler, batch)
            samples.samples_per_block = [samples.stamps.shape[2]]
            if self._world.global_rank == 0:
                remaining_seconds = end - time.perf_counter()
                # Ten successive parts are taken as independent blocks.
                durations = samples.compute_durations()
                counts = [len(part) for part in np.array_split(durations, 10)]
                samples.stop = self._find_stop_reason(counts, has_time=remaining_seconds > 0)
                batch = 0
                if samples.stop == "blocks":
                    affordable = self._count_affordable(remaining_seconds)
                    batch = min(samples.stamps.shape[2], affordable, self._count_remaining())
            batch = self._broadcast_from_rank_0(batch)

    def _find_stop_reason(self, counts: Sequence[int], *, has_time: bool) -> Stop:
        """Return the reason why sampling ends now, ``blocks`` if no limit ends it.

        ``counts`` divides the samples into successive groups: it holds the number of samples in
        each. Groups are assumed to be independent of each other. ``has_time`` is False if the time
        budget ends sampling.
        """
        half_width = estimate_median(self.samples.compute_durations(), counts).half_width
        if half_width is not None and half_width <= self._measure.precision:
            return "precision"
        if self.is_complete:
            return "max-iters"
        return "blocks" if has_time else "budget"

    def _count_affordable(self, seconds: float) -> int:
        """Return the number of samples that fit into ``seconds``, at least 1.

        A sample is expected to take as long as the last ones, with reset and barrier.
        """
        return max(1, int(seconds / self._sample_seconds))

    def _count_remaining(self) -> int:
        """Return the number of samples that the case may still take before ``max_iterations``."""
        return self._measure.max_iterations - sum(self.samples.samples_per_block)

    def measure_block(self, seconds: float, num_later: int) -> None:
        """Warm up and take the samples of one of several blocks, in about ``seconds`` or less.

        ``num_later`` is the number of further blocks of this case. The number of samples follows
        from the variation of earlier samples: it is the least number with which ten blocks reach
        the required precision, if samples are independent. It is not larger, because samples of one
        block may resemble each other, and then more samples in a block would not help.
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
            counts = samples.samples_per_block
            samples.stop = self._find_stop_reason(counts, has_time=count < affordable)

    def _broadcast_from_rank_0(self, value: int) -> int:
        """Return rank 0's ``value`` on every rank. Every rank of the run calls this method."""
        [decision] = self._world.broadcast_from_rank_0([value])
        return int(decision)

    def _choose_count(self, num_later: int) -> int:
        """Return the number of samples for the next block, from the variation of earlier samples.

        The first block has 3 samples. Later blocks have so many that ten of them reach the required
        precision of the median, at least 3, and at most an equal part of the samples that
        ``max_iterations`` still allows. ``num_later`` is the number of blocks of this case after
        the next one. Only rank 0 calls this method.
        """
        durations = self.samples.compute_durations()
        limit = self._count_remaining()
        count = _MIN_BLOCK
        if durations:
            # The interquartile range of a normal distribution is 1.349 sigma. The second of ten
            # medians of k samples is one standard error, 1.25 sigma / sqrt(k), from the middle. The
            # factor is a little less, because sigma of few samples is often too large.
            sigma = compute_relative_iqr(durations) / 1.349
            count = math.ceil((1.2 * sigma / self._measure.precision) ** 2)
        return min(max(_MIN_BLOCK, min(count, limit // (num_later + 1))), limit)

    def _warm_up(self, seconds: float) -> Sampler:
        """Take the untimed steps of a block, and return the function that takes a timed sample.

        The first block takes the requested number of warm-up steps in at most a fifth of
        ``seconds``, and decides the number of steps per sample. Each later block takes one step,
        because the caches may hold the data of another case.
        """
        began = time.perf_counter()
        benchmark, progress = self.stopwatch.benchmark, self.stopwatch.progress
        progress.phase = "warm-up"
        mode = "blocking" if self.takes_many_steps else self._mode
        single_step = make_sampler(mode, benchmark, 1)
        step_ns = int(self.stopwatch.take(single_step, 1)[DURATION, 0])
        if self._sampler is None:
            step_seconds = time.perf_counter() - began
            # The warm-up takes at most a fifth of the time.
            max_warmup = int(0.2 * seconds / step_seconds)
            warmup = max(0, min(self._measure.warmup - 1, max_warmup))
            warmup = self._broadcast_from_rank_0(warmup)
            self.stopwatch.take(single_step, warmup)
            self.samples.warmup = warmup + 1
            steps = 1
            if self.takes_many_steps:
                steps = min(_MANY_STEPS_NS // max(step_ns, 1), _MAX_MANY_STEPS)
                steps = self._broadcast_from_rank_0(max(steps, _MIN_MANY_STEPS))
            self.samples.steps_per_sample = steps
            self._sample_seconds = step_seconds * steps
            self._sampler = make_sampler(self._mode, benchmark, steps)
        progress.phase = "timed"
        return self._sampler

    def _take_samples(self, sampler: Sampler, count: int) -> None:
        """Take ``count`` samples and, on rank 0, append their times on all measured ranks.

        ``sampler`` runs the steps of one sample on this rank.
        """
        began = time.perf_counter()
        samples = self.samples
        stamps = self.stopwatch.take(sampler, count, samples.steps_per_sample)
        gathered = gather_stamps(stamps, self._world, self._ranks)
        self._sample_seconds = (time.perf_counter() - began) / count
        if gathered is not None:
            samples.stamps = np.concatenate([samples.stamps, gathered], axis=2)


def gather_stamps(stamps: torch.Tensor, world: World, ranks: Sequence[int]) -> Stamps | None:
    """Gather the times of samples from all ranks, and return the times of ``ranks`` on rank 0.

    ``stamps`` has the times on this rank, with shape (5, samples). The five rows are ``ARRIVAL``,
    ``EXIT``, ``DURATION``, ``ISSUE`` and ``HIDDEN``. On rank 0 the result has the shape (5, ranks,
    samples), with arrivals and exits on the clock of rank 0. On other ranks it is None. Every rank
    of the world calls this function.
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
