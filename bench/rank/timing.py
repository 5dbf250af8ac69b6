"""The timed loop. One sample is one iteration on every rank; rank 0 decides how many, and why to stop."""

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from bench.launch.control_channel import StatusReply
from bench.plan.plan import Measure
from bench.results.records import Stop
from bench.results.stats import within_launch
from bench.text import UserError
from bench.world.subject import Subject
from bench.world.torch_compat import coalescing
from bench.world.world import World

ARRIVAL, EXIT, DURATION, ISSUE = range(4)
MANY = ("pipelined", "coalesced", "graph")
"""The modes in which a sample is several steps."""
# where a rank waits for others: DDP's buckets are waited for in autograd's engine, NCCL's work in a synchronize.
_WAITS = ("torch.distributed", "torch.autograd", "torch.cuda")
_STOPS: tuple[Stop, ...] = get_args(Stop)
_MANY_SECONDS = 5e-3
_MANY_STEPS = (4, 64)
_LEAST_ITERATIONS = 2
_SHORT_SECONDS = 5.0
_WARMUP_SHARE = 0.2
_MIN_FOR_PRECISION = 20
_MIN_FOR_CONVERGED = 100
_CONVERGED_RATIO = 0.95

Stamps = npt.NDArray[np.int64]
Sample = Callable[[], int | None]
"""Takes one sample; returns the host's time, in ns, at which an asynchronous one was issued."""


class Progress:
    """Counts the steps that this rank has begun in its present case; one thread measures, another reads."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.phase = "starting"
        self.steps = 0

    def enter(self, phase: str) -> None:
        self.phase = phase
        if phase == "prepare":
            self.steps = 0

    def where(self) -> StatusReply:
        frame = sys._current_frames().get(self._thread)
        modules = [deeper.f_globals.get("__name__", "") for deeper, _ in traceback.walk_stack(frame)] if frame else []
        return StatusReply(
            phase=self.phase,
            steps=self.steps,
            communicates=any(name.startswith(_WAITS) for name in modules),
            stack="".join(traceback.format_stack(frame)) if frame else "",
        )


@runtime_checkable
class Issuable(Protocol):
    """A subject whose step can be started and waited for apart."""

    def issue(self) -> Sequence[dist.Work]: ...


def sampler(mode: str, subject: Subject, world: World, steps: int) -> Sample:
    """Return what takes a sample of ``steps`` steps; ``UserError`` if the subject cannot be measured so."""

    def repeat() -> None:
        for _ in range(steps):
            subject.step()

    def coalesced() -> None:
        with coalescing(world.group, None if world.backend == "gloo" else world.device):
            repeat()

    if mode == "async":
        return _issued(subject)
    if mode == "graph":
        return _graph(subject, repeat)
    return coalesced if mode == "coalesced" else repeat


def _issued(subject: Subject) -> Sample:
    if not isinstance(subject, Issuable):
        raise UserError("mode async: this subject cannot be issued and waited for apart")

    def sample() -> int:
        works = subject.issue()
        issued = time.perf_counter_ns()
        for work in works:
            work.wait()
        return issued

    return sample


def _graph(subject: Subject, repeat: Sample) -> Sample:
    """Capture the steps once, after a warm-up on a side stream as CUDA graphs need it, and replay them."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        subject.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeat()
    return graph.replay


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How a subject is timed: on which ranks, until when, and how late this one comes on purpose."""

    measure: Measure
    ranks: Sequence[int]
    budget_seconds: float
    mode: str = "blocking"
    late_seconds: float = 0.0

    @property
    def many(self) -> bool:
        return self.mode in MANY


@dataclass(frozen=True, kw_only=True)
class Timed:
    """All measured ranks' stamps in ns, shape (4, ranks, iterations).

    Arrival and exit are on rank 0's clock; then come the duration, and of it the time to issue (0 if not apart).
    """

    stamps: Stamps
    stop: Stop
    steps_per_sample: int
    warmup: int

    def seconds(self) -> list[float]:
        """Return one sample per iteration: the slowest rank's duration of one step, to the nanosecond."""
        return _to_seconds(self.stamps[DURATION].max(axis=0) / self.steps_per_sample)

    def issue_seconds(self) -> list[float]:
        """Return, per iteration, the longest that a rank took to issue; nothing where issue and wait were not apart."""
        return _to_seconds(self.stamps[ISSUE].max(axis=0)) if self.stamps[ISSUE].any() else []

    def skew_seconds(self) -> list[float]:
        """Return, per iteration, how long after the first rank the last one arrived."""
        arrivals = self.stamps[ARRIVAL]
        return _to_seconds(arrivals.max(axis=0) - arrivals.min(axis=0))

    def transfer_seconds(self) -> list[float]:
        """Return, per iteration, the time from the last arrival to the last exit."""
        return _to_seconds(self.stamps[EXIT].max(axis=0) - self.stamps[ARRIVAL].max(axis=0))

    def last_in(self) -> list[int]:
        """Return, per iteration, which of the measured ranks arrived last, by its place among them."""
        return [int(place) for place in self.stamps[ARRIVAL].argmax(axis=0)]

    def last_out(self) -> list[int]:
        """Return, per iteration, which of the measured ranks left last, by its place among them."""
        return [int(place) for place in self.stamps[EXIT].argmax(axis=0)]


def _to_seconds(values_ns: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> list[float]:
    return [round(float(value) / 1e9, 9) for value in values_ns]


def time_steps(subject: Subject, world: World, timing: Timing, progress: Progress) -> Timed | None:
    """Time a subject until it is known well enough; the result is on rank 0, None elsewhere.

    Every rank takes part, those that are not measured too.
    """
    started = time.perf_counter()
    progress.enter("warm-up")
    warming = sampler("blocking" if timing.many else timing.mode, subject, world, 1)
    first = take_samples(subject, warming, world, timing, 1, progress)
    each = time.perf_counter() - started
    warmup, steps = (int(value) for value in world.decide(_plan_warmup(first, each, timing)))
    take_samples(subject, warming, world, timing, warmup, progress)
    sample = sampler(timing.mode, subject, world, steps)
    progress.enter("timed")
    [least] = world.decide([_first_batch(each * steps, timing, time.perf_counter() - started)])
    pieces, stop = _until_known(subject, sample, world, timing, started, progress, int(least))
    if not pieces:
        return None
    return Timed(stamps=np.concatenate(pieces, axis=2), stop=stop, steps_per_sample=steps, warmup=warmup + 1)


def _until_known(
    subject: Subject, sample: Sample, world: World, timing: Timing, started: float, progress: Progress, batch: int
) -> tuple[list[Stamps], Stop]:
    """Take batches, the first of ``batch``, until rank 0 says why to stop; return them on rank 0, none elsewhere."""
    pieces: list[Stamps] = []
    widths: list[float | None] = []
    stop = -1
    began = time.perf_counter()
    while stop < 0:
        gathered = gather_stamps(take_samples(subject, sample, world, timing, batch, progress), world, timing.ranks)
        next_batch, code = 0, -1
        if gathered is not None:
            pieces.append(gathered)
            now = time.perf_counter()
            left = timing.budget_seconds - (now - started)
            reason = _decide(pieces, widths, timing.measure, left)
            code = -1 if reason is None else _STOPS.index(reason)
            done = sum(piece.shape[2] for piece in pieces)
            affordable = max(int(left * done / (now - began)), 1)
            next_batch = max(1, min(done, affordable, timing.measure.max_iterations - done))  # done doubles
        batch, stop = (int(value) for value in world.decide([next_batch, code]))
    return pieces, _STOPS[stop]


def _plan_warmup(first: torch.Tensor, each_seconds: float, timing: Timing) -> tuple[float, float]:
    affordable = int(_WARMUP_SHARE * timing.budget_seconds / each_seconds)
    warmup = max(0, min(timing.measure.warmup - 1, affordable))
    if not timing.many:
        return warmup, 1
    least, most = _MANY_STEPS
    wanted = int(_MANY_SECONDS * 1e9 / max(int(first[DURATION, 0]), 1))
    return warmup, min(max(wanted, least), most)


def _first_batch(each_seconds: float, timing: Timing, spent_seconds: float) -> int:
    """Return the least count, or what there is time for where steps are long: two tell at least how they differ."""
    seconds = max(timing.budget_seconds - spent_seconds, _SHORT_SECONDS)
    return min(timing.measure.min_iterations, max(_LEAST_ITERATIONS, int(seconds / each_seconds)))


def _decide(pieces: list[Stamps], widths: list[float | None], measure: Measure, left_seconds: float) -> Stop | None:
    """Return why to stop, None to go on; appends the interval's present half-width to ``widths``."""
    slowest = np.concatenate([piece[DURATION].max(axis=0) for piece in pieces])
    n = len(slowest)
    width = within_launch(slowest.tolist()).half_width
    widths.append(width)
    if width is not None and n >= _MIN_FOR_PRECISION and width <= measure.precision:
        return "precision"
    if n >= measure.max_iterations:
        return "max-iters"
    if n >= _MIN_FOR_CONVERGED and _no_longer_shrinks(widths):
        return "converged"
    return "budget" if left_seconds <= 0 else None


def _no_longer_shrinks(widths: list[float | None]) -> bool:
    """Say whether two doublings of the count hardly narrowed the interval: more samples of this launch will not."""
    known = [width for width in widths[-3:] if width]
    return len(known) == 3 and all(b / a > _CONVERGED_RATIO for a, b in itertools.pairwise(known))


def take_samples(
    subject: Subject, sample: Sample, world: World, timing: Timing, count: int, progress: Progress
) -> torch.Tensor:
    """Take ``count`` samples; return this rank's stamps in ns, shape (4, count)."""
    timed = _timed_on_device if world.device.type == "cuda" else _timed_on_host
    rows = []
    for _ in range(count):
        start_line(subject, world, timing, progress)
        rows.append(timed(sample, world))
    return torch.tensor(rows, dtype=torch.int64).reshape(count, 4).T


def start_line(subject: Subject, world: World, timing: Timing, progress: Progress) -> None:
    """Bring all ranks to the beginning of a step, and come late to it where that was asked for."""
    subject.reset()
    world.sync()
    progress.steps += 1
    world.barrier()
    if timing.late_seconds:
        time.sleep(timing.late_seconds)


def _timed_on_host(sample: Sample, world: World) -> tuple[int, int, int, int]:
    arrival = time.perf_counter_ns()
    issued = sample()
    done = time.perf_counter_ns()
    return arrival, done, done - arrival, issued - arrival if issued else 0


def _timed_on_device(sample: Sample, world: World) -> tuple[int, int, int, int]:
    """Time by events on the stream: the host's launch and the wait for it are not in the duration."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    arrival = time.perf_counter_ns()
    start.record()
    issued = sample()
    end.record()
    world.sync()
    duration = int(start.elapsed_time(end) * 1e6)
    return arrival, time.perf_counter_ns(), duration, issued - arrival if issued else 0


def gather_stamps(stamps: torch.Tensor, world: World, ranks: Sequence[int]) -> Stamps | None:
    """Return the stamps of ``ranks`` on rank 0, shape (4, ranks, count), arrivals and exits on its clock."""
    contiguous = stamps.contiguous()
    parts = [torch.empty_like(contiguous) for _ in world.hosts] if world.global_rank == 0 else None
    dist.gather(contiguous, parts, group=world.control, group_dst=0)
    if parts is None:
        return None
    together: Stamps = torch.stack(parts, dim=1).numpy()
    together[[ARRIVAL, EXIT]] -= np.array(world.clock.offsets_ns, dtype=np.int64)[None, :, None]
    return together[:, list(ranks)]
