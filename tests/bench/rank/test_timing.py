"""Timing: samples of all ranks, warm-up, and when and why rank 0 stops.

Most tests run on a clock that only the benchmark moves, so counts and durations are exact.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbench.bench.plan.plan import Measure
from parbench.bench.rank import timing
from parbench.bench.rank.timing import (
    ARRIVAL,
    DURATION,
    EXIT,
    ISSUE,
    Progress,
    Timed,
    Timing,
    gather_stamps,
    sampler,
)
from parbench.bench.world.world import World
from tests.support.fake_time import HeldTime
from tests.support.fakes import NotingBenchmark
from tests.support.ranks import Ranks

MS = 1_000_000
START_NS = HeldTime().now_ns
ENDLESS = Measure(warmup=1, precision=-1.0)  # no interval is narrow enough
FORTY = Measure(warmup=1, min_iterations=40, max_iterations=40, precision=-1.0)
WARMUP_1 = Measure(warmup=1)
SLOW_RESET_SECONDS = 0.01


class ScriptedBenchmark(NotingBenchmark):
    """A benchmark whose steps and resets call these functions."""

    def __init__(
        self, on_step: Callable[[], object], on_reset: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self.on_step, self.on_reset = on_step, on_reset

    def step(self) -> None:
        super().step()
        self.on_step()

    def reset(self) -> None:
        super().reset()
        self.on_reset()


@dataclass(frozen=True, kw_only=True)
class TimingRun:
    """What one rank has after ``Timing.run``: the result (rank 0 only), its calls and progress."""

    timed: Timed | None
    calls: list[str]
    phase: str
    steps: int

    @property
    def result(self) -> Timed:
        assert self.timed is not None
        return self.timed

    @property
    def seconds(self) -> list[float]:
        return self.result.samples()["seconds"]


@contextmanager
def fake_clock() -> Iterator[HeldTime]:
    clock = HeldTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", clock)
        yield clock


def make_timing(
    benchmark: ScriptedBenchmark, world: World, measure: Measure, mode: str = "blocking"
) -> Timing:
    return Timing(benchmark, world, Progress(), measure, range(world.size), mode=mode)


def run_timing(benchmark: ScriptedBenchmark, timer: Timing, seconds: float) -> TimingRun:
    timed = timer.run(seconds)
    progress = timer.progress
    return TimingRun(timed=timed, calls=benchmark.calls, phase=progress.phase, steps=progress.steps)


def run_script(
    world: World,
    steps_ns: list[list[int]],
    reset_ns: int = 0,
    measure: Measure = WARMUP_1,
    budget_seconds: float = 1e9,
    mode: str = "blocking",
) -> TimingRun:
    """Time steps that take ``steps_ns[rank]`` in turn on each rank's own fake clock."""
    durations = cycle(steps_ns[world.rank])
    with fake_clock() as clock:
        benchmark = ScriptedBenchmark(
            lambda: clock.sleep_ns(next(durations)), lambda: clock.sleep_ns(reset_ns)
        )
        timer = make_timing(benchmark, world, measure, mode)
        return run_timing(benchmark, timer, budget_seconds)


def run_scripts(world: World, scripts: list[dict[str, Any]]) -> list[TimingRun]:
    return [run_script(world, **script) for script in scripts]


def count_samples_of_visits(world: World, steps_ns: list[int], count: int) -> list[int]:
    """Return the samples of each visit, of at most ``count`` visits of one second."""
    durations = cycle(steps_ns)
    with fake_clock() as clock:
        benchmark = ScriptedBenchmark(lambda: clock.sleep_ns(next(durations)))
        timer = make_timing(benchmark, world, Measure(warmup=1, max_iterations=2000))
        for remaining in reversed(range(count)):
            timer.visit(1.0, remaining)
            if timer.full:
                break
        return timer._visits


def run_with_slow_reset(world: World) -> TimingRun:
    """Time a real all_reduce where the reset of rank 1 takes 10 ms."""
    number = torch.zeros(1)

    def reset() -> None:
        if world.rank == 1:
            time.sleep(SLOW_RESET_SECONDS)

    benchmark = ScriptedBenchmark(lambda: dist.all_reduce(number, group=world.group), reset)
    timer = make_timing(benchmark, world, Measure(warmup=1, max_iterations=12))
    return run_timing(benchmark, timer, 60.0)


def take_samples(world: World, steps: int, count: int) -> tuple[list[list[int]], list[str], int]:
    """Take samples of 3 ms steps after 10 ms resets; return stamps, calls and progress."""
    with fake_clock() as clock:
        benchmark = ScriptedBenchmark(
            lambda: clock.sleep_ns(3 * MS), lambda: clock.sleep_ns(10 * MS)
        )
        timer = make_timing(benchmark, world, WARMUP_1)
        stamps = timer.take(sampler("pipelined", benchmark, world, steps), count)
    return stamps.tolist(), benchmark.calls, timer.progress.steps


def gather_numbered_stamps(world: World, offsets_ns: tuple[int, ...]) -> Any:
    """Gather stamps that name rank and iteration, with clocks ahead by ``offsets_ns``."""
    shifted = replace(world, clock=replace(world.clock, offsets_ns=offsets_ns))
    rows = [[base + 10 * world.rank + i for i in range(4)] for base in (1000, 2000, 3000, 0)]
    gathered = gather_stamps(torch.tensor(rows).T.contiguous().T, shifted, range(world.size))
    return None if gathered is None else gathered.tolist()


def test_sample_is_the_slowest_rank(two_ranks: Ranks) -> None:
    steps_ns = [[1 * MS, 4 * MS], [3 * MS, 2 * MS]]
    measure = Measure(warmup=2, max_iterations=6)
    first, second = two_ranks.call(
        "tests.bench.rank.test_timing:run_script", steps_ns=steps_ns, measure=measure
    )
    assert first.seconds == [0.003, 0.004] * 3
    assert first.result.stamps[DURATION].tolist() == [row * 3 for row in steps_ns]
    assert second.timed is None
    for rank in (first, second):
        assert (rank.phase, rank.steps) == ("timed", 2 + 6)


def test_slow_reset_does_not_delay_other_ranks(two_ranks: Ranks) -> None:
    first, _ = two_ranks.call("tests.bench.rank.test_timing:run_with_slow_reset")
    samples = first.result.samples()
    assert min(samples["seconds"]) < SLOW_RESET_SECONDS / 2
    assert min(samples["skew_seconds"]) < SLOW_RESET_SECONDS / 2


def test_reset_precedes_each_sample_untimed(two_ranks: Ranks) -> None:
    for steps, count in ((1, 3), (4, 2), (1, 0)):
        for stamps, calls, progress in two_ranks.call(
            "tests.bench.rank.test_timing:take_samples", steps=steps, count=count
        ):
            assert calls == ["reset", *["step"] * steps] * count
            assert progress == count
            duration = steps * 3 * MS
            period = 10 * MS + duration
            arrivals = [START_NS + 10 * MS + i * period for i in range(count)]
            assert stamps[DURATION] == [duration] * count
            assert stamps[ARRIVAL] == arrivals
            assert stamps[EXIT] == [arrival + duration for arrival in arrivals]


def test_gathered_stamps_are_on_the_clock_of_rank_0(two_ranks: Ranks) -> None:
    first, second = two_ranks.call(
        "tests.bench.rank.test_timing:gather_numbered_stamps", offsets_ns=(0, 500)
    )
    assert second is None
    assert first[ARRIVAL] == [[1000, 1001, 1002, 1003], [510, 511, 512, 513]]
    assert first[EXIT] == [[2000, 2001, 2002, 2003], [1510, 1511, 1512, 1513]]
    assert first[DURATION] == [[3000, 3001, 3002, 3003], [3010, 3011, 3012, 3013]]
    assert first[ISSUE] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_samples_of_stamps() -> None:
    arrivals = np.array([[0, 5000, 9000], [1000, 2000, 9000], [500, 2500, 9900]])
    durations = np.array([[1000, 1000, 9000], [2000, 1000, 1000], [100, 100, 10]])
    issues = np.array([[0, 7, 0], [3, 0, 0], [0, 0, 0]])
    stamps = np.stack([arrivals, arrivals + durations, durations, issues])
    pipelined = Timed(stamps=stamps, stop="budget", steps_per_sample=3, warmup=1).samples()
    assert pipelined["seconds"] == [667e-9, 333e-9, 3e-6]
    assert pipelined["skew_seconds"] == [1e-6, 3e-6, 0.9e-6]
    assert pipelined["transfer_seconds"] == []
    assert pipelined["issue_seconds"] == [3e-9, 7e-9, 0.0]

    stamps[ISSUE] = 0
    blocking = Timed(stamps=stamps, stop="budget", steps_per_sample=1, warmup=1).samples(hops=2)
    assert blocking["seconds"] == [1e-6, 0.5e-6, 4.5e-6]
    assert blocking["transfer_seconds"] == [1e-6, 0.5e-6, 4.05e-6]
    assert blocking["issue_seconds"] == []


STEADY, TWO_LEVELS = [2 * MS], [2 * MS, 4 * MS]
STOPS: list[tuple[list[int], Measure, float, str, int]] = [
    # 6, 12, 24: twenty samples are the fewest that count as precise
    (STEADY, WARMUP_1, 1e9, "precision", 24),
    (STEADY, Measure(warmup=1, min_iterations=40), 1e9, "precision", 40),
    (STEADY, Measure(warmup=1, max_iterations=10), 1e9, "max-iters", 10),
    # the interval never narrows, which 48, 96 and 192 samples show
    (TWO_LEVELS, WARMUP_1, 1e9, "converged", 192),
    ([20 * MS, 22 * MS], WARMUP_1, 1e9, "converged", 192),  # 4.8 % instead of 2.5 %
    # the first step and 6 + 6 samples cost 26 ms; 24 + 1 are the end of 50 ms
    (STEADY, ENDLESS, 0.050, "budget", 24),
    (STEADY, ENDLESS, 0.040, "budget", 19),
    # precision and the maximum take precedence over the budget
    (STEADY, Measure(warmup=1, min_iterations=40), 0.050, "precision", 40),
    (STEADY, FORTY, 0.050, "max-iters", 40),
    # a small budget allows enough samples for an interval, unless steps take seconds
    ([100 * MS], WARMUP_1, 0.001, "budget", 6),
    ([2000 * MS], ENDLESS, 0.001, "budget", 2),
    ([2000 * MS], ENDLESS, 9.0, "budget", 4),
]


def test_timing_stops_for_the_stated_reason(two_ranks: Ranks) -> None:
    scripts = [
        {"steps_ns": [steps_ns] * 2, "measure": measure, "budget_seconds": budget_seconds}
        for steps_ns, measure, budget_seconds, _, _ in STOPS
    ]
    by_rank = two_ranks.call("tests.bench.rank.test_timing:run_scripts", scripts=scripts)
    for script, first, second in zip(STOPS, *by_rank, strict=True):
        *_, stop, iterations = script
        assert (first.result.stop, first.result.stamps.shape) == (stop, (4, 2, iterations)), script
        assert first.calls == second.calls == ["reset", "step"] * (iterations + 1), script


def test_budget_includes_resets(two_ranks: Ranks) -> None:
    script = {"steps_ns": [[MS]] * 2, "reset_ns": 99 * MS, "measure": ENDLESS, "budget_seconds": 1}
    first, _ = two_ranks.call("tests.bench.rank.test_timing:run_script", **script)
    assert (first.result.stop, len(first.seconds)) == ("budget", 9)


def test_visits_end_early_or_fill_the_rest(two_ranks: Ranks) -> None:
    def count(steps_ns: list[int], visits: int) -> list[int]:
        first, second = two_ranks.call(
            "tests.bench.rank.test_timing:count_samples_of_visits", steps_ns=steps_ns, count=visits
        )
        assert first == second
        return list(first)

    two_modes = [2 * MS] * 20 + [2 * MS + MS // 5] * 20
    ten_visits, twenty_visits = count(two_modes, 10), count(two_modes, 20)
    assert count([2 * MS], 20) == [3] * 10
    assert max(ten_visits) < 20
    assert twenty_visits[:10] == ten_visits
    assert min(twenty_visits[10:]) > 150, "later visits take as many samples as allowed"


def test_rank_0_decides_for_all_ranks(two_ranks: Ranks) -> None:
    """Rank 1 exceeds the budget and is noisy; both ranks take the steps that rank 0 chooses."""
    slow_rank = {
        "steps_ns": [[1 * MS], [10**10, 5, 10**12]],
        "measure": Measure(max_iterations=50, precision=-1.0),
        "budget_seconds": 5.0,
        "mode": "pipelined",
    }
    noisy_rank = {"steps_ns": [[1 * MS], [2 * MS, 4 * MS]]}
    (slow, noisy), (other, _) = two_ranks.call(
        "tests.bench.rank.test_timing:run_scripts", scripts=[slow_rank, noisy_rank]
    )
    assert other.timed is None
    assert slow.calls == other.calls
    assert (slow.result.stop, slow.result.steps_per_sample) == ("max-iters", 5)
    assert noisy.result.stop == "converged"


@pytest.mark.parametrize(("budget", "warmup"), [(1e9, 30), (5.2, 11), (0.0, 1)])
def test_warmup_takes_a_fifth_of_the_budget(two_ranks: Ranks, budget: float, warmup: int) -> None:
    steps_ns = [[100 * MS] * warmup + [200 * MS] * 1000] * 2
    script = {"measure": Measure(warmup=30, max_iterations=6), "budget_seconds": budget}
    first, _ = two_ranks.call(
        "tests.bench.rank.test_timing:run_script", steps_ns=steps_ns, **script
    )
    assert first.result.warmup == warmup
    assert first.calls.count("reset") == warmup + 6
    assert first.seconds == [0.2] * 6


def test_pipelined_sample_takes_five_milliseconds(two_ranks: Ranks) -> None:
    steps_of = {0: 64, 50_000: 64, 100_000: 50, 2 * MS: 4, 10**10: 4}
    scripts = [
        {
            "steps_ns": [[step_ns], [2 * step_ns]],
            "reset_ns": MS,
            "mode": "pipelined",
            "measure": Measure(warmup=5, max_iterations=6),
        }
        for step_ns in steps_of
    ]
    runs, _ = two_ranks.call("tests.bench.rank.test_timing:run_scripts", scripts=scripts)
    for run, (step_ns, steps) in zip(runs, steps_of.items(), strict=True):
        assert (run.result.warmup, run.result.steps_per_sample) == (5, steps)
        assert run.seconds == [2 * step_ns / 1e9] * 6
