"""The timed loop: samples of all ranks, warm-up, reasons to stop, and modes of measurement.

Most tests run on a clock that only the benchmark moves, so counts and durations are exact.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parbench.bench.launch.messages import HangReport
from parbench.bench.plan.plan import Measure
from parbench.bench.rank import timing
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.timing import (
    ARRIVAL,
    DURATION,
    EXIT,
    HIDDEN,
    ISSUE,
    CaseTimer,
    Stopwatch,
    TimedSamples,
    gather_stamps,
    make_sampler,
)
from parbench.bench.world.world import World, select_subgroup
from tests.support.fake_time import HeldTime
from tests.support.fakes import NotingBenchmark, wait_until
from tests.support.ranks import Ranks

MODULE = "tests.bench.rank.test_timing"
MS = 1_000_000
WARMUP_1 = Measure(warmup=1)
UNREACHABLE = Measure(warmup=1, precision=-1.0)
TEN_ITERATIONS = Measure(warmup=1, max_iterations=10)


class ScriptedBenchmark(NotingBenchmark):
    """A benchmark whose steps and resets take scripted times on a fake clock."""

    def __init__(self, clock: HeldTime, steps_ns: Sequence[int], reset_ns: int = 0) -> None:
        super().__init__()
        self.clock = clock
        self.durations = cycle(steps_ns)
        self.reset_ns = reset_ns

    def step(self) -> None:
        super().step()
        self.clock.sleep_ns(next(self.durations))

    def reset(self) -> None:
        super().reset()
        self.clock.sleep_ns(self.reset_ns)


@dataclass(frozen=True, kw_only=True)
class Script:
    """The step times of each rank, repeated as long as needed, and how they are measured."""

    steps_ns: list[list[int]]
    reset_ns: int = 0
    measure: Measure = WARMUP_1
    budget_seconds: float = 1e9
    mode: str = "blocking"
    blocks: int = 0  # of one second each, instead of one run within the budget


@dataclass(frozen=True, kw_only=True)
class TimingRun:
    """The result, which has samples on rank 0 only, and the calls and progress of one rank."""

    result: TimedSamples
    calls: list[str]
    phase: str
    steps: int

    @property
    def seconds(self) -> list[float]:
        return self.result.compute_seconds()["time"]


def run_script_on_rank(world: World, script: Script) -> TimingRun:
    clock = HeldTime()
    benchmark = ScriptedBenchmark(clock, script.steps_ns[world.rank], script.reset_ns)
    progress = Progress()
    stopwatch = Stopwatch(benchmark=benchmark, world=world, progress=progress)
    timer = CaseTimer(stopwatch, script.measure, select_subgroup(world, {}), script.mode)
    with mock.patch.object(timing, "time", clock):
        if script.blocks == 0:
            timer.measure_until_precise(script.budget_seconds)
        for remaining in reversed(range(script.blocks)):
            timer.measure_block(1.0, remaining)
            if timer.is_complete:
                break
    return TimingRun(
        result=timer.samples,
        calls=benchmark.calls,
        phase=progress.phase,
        steps=progress.steps,
    )


def run_script(ranks: Ranks, script: Script) -> list[TimingRun]:
    return ranks.call(f"{MODULE}:run_script_on_rank", script=script)


def test_sample_is_the_slowest_rank(two_ranks: Ranks) -> None:
    steps_ns = [[1 * MS, 4 * MS], [3 * MS, 2 * MS]]
    measure = Measure(warmup=2, max_iterations=6)
    script = Script(steps_ns=steps_ns, reset_ns=10 * MS, measure=measure)
    first, second = run_script(two_ranks, script)
    assert first.seconds == [0.003, 0.004] * 3
    assert first.result.stamps[DURATION].tolist() == [steps_ns[0] * 3, steps_ns[1] * 3]
    assert second.seconds == []
    for rank in (first, second):
        assert rank.calls == ["reset", "step"] * (2 + 6)
        assert rank.phase == "timed"
        assert rank.steps == 2 + 6


@pytest.mark.parametrize(
    ("script", "stop", "iterations"),
    [
        # After 6 and 12 iterations: 20 samples are the fewest that count as precise.
        (Script(steps_ns=[[2 * MS]] * 2), "precision", 24),
        (Script(steps_ns=[[2 * MS]] * 2, measure=TEN_ITERATIONS), "max-iters", 10),
        (
            Script(steps_ns=[[2 * MS]] * 2, measure=UNREACHABLE, budget_seconds=0.04),
            "budget",
            19,
        ),
        # A small budget allows enough samples for an interval, unless steps take seconds.
        (Script(steps_ns=[[100 * MS]] * 2, budget_seconds=0.001), "budget", 6),
        (Script(steps_ns=[[2000 * MS]] * 2, budget_seconds=0.001), "budget", 2),
        # The budget includes resets.
        (
            Script(
                steps_ns=[[MS]] * 2,
                reset_ns=99 * MS,
                measure=UNREACHABLE,
                budget_seconds=1.0,
            ),
            "budget",
            9,
        ),
    ],
)
def test_timing_reports_why_it_stops(
    two_ranks: Ranks, script: Script, stop: str, iterations: int
) -> None:
    first, second = run_script(two_ranks, script)
    assert first.result.stop == stop
    assert first.result.stamps.shape == (5, 2, iterations)
    assert first.calls == second.calls == ["reset", "step"] * (iterations + 1)


@pytest.mark.parametrize(("budget_seconds", "warmup"), [(1e9, 30), (5.2, 11)])
def test_warmup_takes_a_fifth_of_the_budget(
    two_ranks: Ranks, budget_seconds: float, warmup: int
) -> None:
    steps_ns = [100 * MS] * warmup + [200 * MS] * 6
    measure = Measure(warmup=30, max_iterations=6)
    script = Script(steps_ns=[steps_ns] * 2, measure=measure, budget_seconds=budget_seconds)
    first, _ = run_script(two_ranks, script)
    assert first.result.warmup == warmup
    assert first.calls.count("reset") == warmup + 6
    assert first.seconds == [0.2] * 6


@pytest.mark.parametrize(("step_ns", "steps"), [(50_000, 32), (2 * MS, 4)])
def test_pipelined_sample_takes_five_milliseconds(
    two_ranks: Ranks, step_ns: int, steps: int
) -> None:
    measure = Measure(warmup=5, max_iterations=6)
    steps_ns = [[step_ns], [2 * step_ns]]
    script = Script(
        steps_ns=steps_ns,
        reset_ns=MS,
        measure=measure,
        mode="pipelined",
    )
    first, _ = run_script(two_ranks, script)
    assert first.result.steps_per_sample == steps
    assert first.calls[-steps - 1 :] == ["reset", *["step"] * steps]
    assert first.seconds == [2 * step_ns / 1e9] * 6


def test_rank_0_decides_for_all_ranks(two_ranks: Ranks) -> None:
    """Rank 1 exceeds the budget; both ranks take the steps that rank 0 chooses."""
    script = Script(
        steps_ns=[[1 * MS], [10**10, 5, 10**12]],
        measure=Measure(max_iterations=50, precision=-1.0),
        budget_seconds=5.0,
        mode="pipelined",
    )
    first, second = run_script(two_ranks, script)
    assert first.calls == second.calls
    assert first.result.stop == "max-iters"
    assert first.result.steps_per_sample == 5


def test_blocks_take_as_many_samples_as_precision_needs(two_ranks: Ranks) -> None:
    two_modes = [2_000_000] * 20 + [2_200_000] * 20
    measure = Measure(warmup=1, max_iterations=2000)
    script = Script(steps_ns=[two_modes] * 2, measure=measure, blocks=10)
    first, second = run_script(two_ranks, script)
    assert first.calls == second.calls
    counts = first.result.samples_per_block
    assert counts[0] == 3
    assert 3 < max(counts) < 20


def gather_numbered_stamps(world: World, offsets_ns: tuple[int, ...]) -> Any:
    """Gather stamps that contain rank and iteration, with clocks ahead by ``offsets_ns``."""
    clock = replace(world.clock, offsets_ns=offsets_ns)
    iterations = torch.arange(2) + 10 * world.rank
    stamps = torch.stack([iterations + start for start in (1000, 2000, 3000, 0)])
    gathered = gather_stamps(stamps, replace(world, clock=clock), range(world.size))
    return None if gathered is None else gathered.tolist()


def test_stamps_are_on_the_clock_of_rank_0(two_ranks: Ranks) -> None:
    first, second = two_ranks.call(f"{MODULE}:gather_numbered_stamps", offsets_ns=(0, 500))
    assert second is None
    assert first[ARRIVAL] == [[1000, 1001], [510, 511]]
    assert first[EXIT] == [[2000, 2001], [1510, 1511]]
    assert first[DURATION] == [[3000, 3001], [3010, 3011]]
    assert first[ISSUE] == [[0, 1], [10, 11]]


ARRIVALS = np.array([[0, 5000, 9000], [1000, 2000, 9000], [500, 2500, 9900]])
DURATIONS = np.array([[1000, 1000, 9000], [2000, 1000, 1000], [100, 100, 10]])


def test_samples_of_stamps() -> None:
    zeros = 0 * DURATIONS
    stamps = np.stack([ARRIVALS, ARRIVALS + DURATIONS, DURATIONS, zeros, zeros])
    timed = TimedSamples(stamps=stamps, is_on_device=True)
    assert timed.compute_seconds(hops=2) == {
        "time": [1e-6, 0.5e-6, 4.5e-6],
        "skew": [1e-6, 3e-6, 0.9e-6],
        "transfer": [1e-6, 0.5e-6, 4.05e-6],
        "rank_mean_time": [517e-9, 0.35e-6, 1668e-9],
    }
    # Devices that begin together have no arrivals: the host's wake-up would look like skew.
    stamps[HIDDEN] = 1
    assert list(timed.compute_seconds()) == ["time", "rank_mean_time"]


class AsyncBenchmark(NotingBenchmark):
    """Issues two works in 5 s, each of which ends 10 s later."""

    def __init__(self, clock: HeldTime) -> None:
        super().__init__()
        self.clock = clock

    def issue(self) -> Sequence[dist.Work]:
        self.calls.append("issue")
        self.clock.sleep(5.0)
        return [cast(dist.Work, self), cast(dist.Work, self)]

    def wait(self) -> None:
        self.calls.append("wait")
        self.clock.sleep(10.0)


NO_WORLD = cast(World, None)


def test_async_sample_waits_for_all_works(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HeldTime(0)
    monkeypatch.setattr(timing, "time", clock)
    benchmark = AsyncBenchmark(clock)
    issued_ns = make_sampler("async", benchmark, 1)()
    assert issued_ns == 5_000_000_000
    assert benchmark.calls == ["issue", "wait", "wait"]


def find_status_of_waiting_rank(world: World, folder: Path) -> HangReport | None:
    """Return the status of rank 0 while it waits in a backward pass for rank 1."""
    progress = Progress()
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=world.group)
    statuses: list[HangReport] = []
    flag = folder / "rank 0 waits"

    def poll_status() -> None:
        wait_until(lambda: progress.make_hang_report().communicates, 30)
        statuses.append(progress.make_hang_report())
        flag.touch()

    loss = model(torch.ones(1, 2)).sum()
    if world.rank == 1:
        wait_until(flag.exists, 60)
        assert not progress.make_hang_report().communicates
        loss.backward()
        return None
    watcher = threading.Thread(target=poll_status)
    watcher.start()
    loss.backward()
    watcher.join()
    return statuses[0]


def test_progress_shows_which_rank_waits(two_ranks: Ranks, tmp_path: Path) -> None:
    """Autograd waits for DDP's buckets below any Python frame of torch.distributed."""
    target = f"{MODULE}:find_status_of_waiting_rank"
    status, _ = two_ranks.call(target, folder=tmp_path)
    assert status.communicates
    assert "in backward" in status.stack
