"""The timed loop. One sample is one iteration on every rank; rank 0 decides how many, and why to stop.

Blocking: every iteration starts from a barrier. Pipelined: a sample is K steps back to back from one barrier, divided
by K. They answer different questions and are never one series.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from bench.plan import Measure
from bench.progress import Progress
from bench.records import Stop
from bench.stats import within_launch
from bench.subject import Subject
from bench.world import World

ARRIVAL, EXIT, DURATION = range(3)
_STOPS: tuple[Stop, ...] = get_args(Stop)
_PIPELINE_SECONDS = 5e-3
_PIPELINE_STEPS = (4, 64)
_WARMUP_SHARE = 0.2
_MIN_FOR_PRECISION = 20
_MIN_FOR_CONVERGED = 100
_CONVERGED_RATIO = 0.95

Stamps = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """All ranks' stamps in ns, shape (3, ranks, iterations): arrival and exit on rank 0's clock, and the duration."""

    stamps: Stamps
    stop: Stop
    steps_per_sample: int
    warmup: int

    def seconds(self) -> list[float]:
        """Return one sample per iteration: the slowest rank's duration of one step, to the nanosecond."""
        slowest = self.stamps[DURATION].max(axis=0) / self.steps_per_sample
        return [round(float(value) / 1e9, 9) for value in slowest]

    def skew_seconds(self) -> list[float]:
        """Return, per iteration, how long after the first rank the last one arrived."""
        arrivals = self.stamps[ARRIVAL]
        return [round(float(value) / 1e9, 9) for value in arrivals.max(axis=0) - arrivals.min(axis=0)]


def time_steps(
    subject: Subject, world: World, measure: Measure, *, pipelined: bool, budget_seconds: float, progress: Progress
) -> Timed | None:
    """Time a subject until it is known well enough; the result is on rank 0, None elsewhere."""
    started = time.perf_counter()
    progress.enter("warm-up")
    first = take_samples(subject, world, 1, 1, progress)
    each = time.perf_counter() - started
    warmup, steps = world.decide(_plan_warmup(first, each, measure, budget_seconds, pipelined=pipelined))
    take_samples(subject, world, 1, int(warmup), progress)

    progress.enter("timed")
    pieces: list[Stamps] = []
    widths: list[float | None] = []
    batch, stop = measure.min_iterations, -1
    began = time.perf_counter()
    while stop < 0:
        gathered = gather_stamps(take_samples(subject, world, int(steps), batch, progress), world)
        next_batch, code = 0, -1
        if gathered is not None:
            pieces.append(gathered)
            now = time.perf_counter()
            left = budget_seconds - (now - started)
            reason = _decide(pieces, widths, measure, left)
            code = -1 if reason is None else _STOPS.index(reason)
            done = sum(piece.shape[2] for piece in pieces)
            next_batch = _next_batch(done, (now - began) / done, measure, left)
        decided = world.decide([next_batch, code])
        batch, stop = int(decided[0]), int(decided[1])
    if not pieces:
        return None
    stamps = np.concatenate(pieces, axis=2)
    return Timed(stamps=stamps, stop=_STOPS[stop], steps_per_sample=int(steps), warmup=int(warmup) + 1)


def _plan_warmup(
    first: torch.Tensor, each_seconds: float, measure: Measure, budget_seconds: float, *, pipelined: bool
) -> tuple[float, float]:
    """Return how many more warm-up iterations there are, and the steps of one sample."""
    affordable = int(_WARMUP_SHARE * budget_seconds / each_seconds)
    warmup = max(0, min(measure.warmup - 1, affordable))
    if not pipelined:
        return warmup, 1
    least, most = _PIPELINE_STEPS
    wanted = int(_PIPELINE_SECONDS * 1e9 / max(int(first[DURATION, 0]), 1))
    return warmup, min(max(wanted, least), most)


def _next_batch(done: int, each_seconds: float, measure: Measure, left_seconds: float) -> int:
    """Double what is done, within the time and the count that are left."""
    affordable = max(int(left_seconds / each_seconds), 1)
    return max(1, min(done, affordable, measure.max_iterations - done))


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


def take_samples(subject: Subject, world: World, steps: int, count: int, progress: Progress) -> torch.Tensor:
    """Take ``count`` samples of ``steps`` steps; return this rank's stamps in ns, shape (3, count)."""
    timed = _timed_on_device if world.device.type == "cuda" else _timed_on_host
    rows = []
    for _ in range(count):
        subject.reset()
        world.sync()
        progress.steps += 1
        world.barrier()
        rows.append(timed(subject.step, steps, world))
    return torch.tensor(rows, dtype=torch.int64).reshape(count, 3).T


def _timed_on_host(step: Callable[[], None], steps: int, world: World) -> tuple[int, int, int]:
    arrival = time.perf_counter_ns()
    for _ in range(steps):
        step()
    done = time.perf_counter_ns()
    return arrival, done, done - arrival


def _timed_on_device(step: Callable[[], None], steps: int, world: World) -> tuple[int, int, int]:
    """Time by events on the stream: the host's launch and the wait for it are not in the duration."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    arrival = time.perf_counter_ns()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    world.sync()
    return arrival, time.perf_counter_ns(), int(start.elapsed_time(end) * 1e6)


def gather_stamps(stamps: torch.Tensor, world: World) -> Stamps | None:
    """Return all ranks' stamps on rank 0, shape (3, ranks, count), arrivals and exits on its clock."""
    contiguous = stamps.contiguous()
    parts = [torch.empty_like(contiguous) for _ in range(world.size)] if world.rank == 0 else None
    dist.gather(contiguous, parts, group=world.control, group_dst=0)
    if parts is None:
        return None
    together: Stamps = torch.stack(parts, dim=1).numpy()
    together[[ARRIVAL, EXIT]] -= np.array(world.clock.offsets_ns, dtype=np.int64)[None, :, None]
    return together
