"""One sample is one iteration on every rank; rank 0 decides when to stop, and the reason is the true one.

Most tests run on a clock that moves only when the subject says so: counts, durations and reasons are then exact.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench import timing
from bench.modes import sampler
from bench.plan import Measure
from bench.progress import Progress
from bench.records import Stop
from bench.subject import Description
from bench.timing import ARRIVAL, DURATION, EXIT, Stamps, Timed, Timing, gather_stamps, take_samples, time_steps
from bench.world import World

MS = 1_000_000
QUICK = Measure(warmup=1)
DAWDLE_SECONDS = 0.01


class FakeTime:
    """A clock in place of the module ``time``: it moves only when it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def pass_ns(self, duration_ns: int) -> None:
        self.now_ns += duration_ns


@dataclass
class Scripted:
    """A subject whose steps and resets only do what is told, and which keeps a log of them."""

    on_step: Callable[[], object]
    on_reset: Callable[[], object] = lambda: None
    log: list[str] = field(default_factory=list)

    def step(self) -> None:
        self.log.append("step")
        self.on_step()

    def reset(self) -> None:
        self.log.append("reset")
        self.on_reset()

    def check(self) -> int:
        return 0

    def describe(self) -> Description:
        return Description()

    def close(self) -> None:
        pass


class LateWorld(World):
    """A world whose rank 1 dawdles between barrier and step."""

    def barrier(self) -> None:
        super().barrier()
        if self.rank == 1:
            time.sleep(DAWDLE_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank saw of ``time_steps``: the result (on rank 0), its own log, and where it stood at the end."""

    timed: Timed | None
    log: list[str]
    phase: str
    samples_begun: int

    @property
    def result(self) -> Timed:
        assert self.timed is not None
        return self.timed


@contextmanager
def fake_time() -> Iterator[FakeTime]:
    clock = FakeTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", clock)
        yield clock


def timing_of(world: World, measure: Measure, budget_seconds: float, *, pipelined: bool = False) -> Timing:
    mode = "pipelined" if pipelined else "blocking"
    return Timing(measure=measure, ranks=range(world.size), budget_seconds=budget_seconds, mode=mode)


def see(world: World, subject: Scripted, measure: Measure, budget_seconds: float, *, pipelined: bool) -> Seen:
    progress = Progress()
    how = timing_of(world, measure, budget_seconds, pipelined=pipelined)
    timed = time_steps(subject, world, how, progress)
    return Seen(timed=timed, log=subject.log, phase=progress.phase, samples_begun=progress.steps)


def scripted(
    world: World,
    steps_ns: list[list[int]],
    reset_ns: int = 0,
    measure: Measure = QUICK,
    budget_seconds: float = 1e9,
    pipelined: bool = False,
) -> Seen:
    """Time a subject whose steps last, rank by rank and in turn, as told on each rank's own fake clock."""
    durations = cycle(steps_ns[world.rank])
    with fake_time() as clock:
        subject = Scripted(
            on_step=lambda: clock.pass_ns(next(durations)),
            on_reset=lambda: clock.pass_ns(reset_ns),
        )
        return see(world, subject, measure, budget_seconds, pipelined=pipelined)


def timed_for_real(world: World, dawdle_in: str) -> Seen:
    """Let rank 1 dawdle in each step, in each reset or between barrier and step."""
    number = torch.zeros(1)

    def dawdle() -> None:
        if world.rank == 1:
            time.sleep(DAWDLE_SECONDS)

    subject = Scripted(on_step=lambda: dist.all_reduce(number, group=world.group))
    if dawdle_in == "step":
        subject.on_step = dawdle
    elif dawdle_in == "reset":
        subject.on_reset = dawdle
    place = LateWorld(**vars(world)) if dawdle_in == "arrival" else world
    return see(place, subject, Measure(warmup=1, max_iterations=12), 60.0, pipelined=False)


def sampled(world: World, steps: int, count: int) -> tuple[list[list[int]], list[str], int]:
    """Take samples of 3 ms steps on a fake clock; return the stamps, the log and the count that a watcher would see."""
    progress = Progress()
    with fake_time() as clock:
        subject = Scripted(on_step=lambda: clock.pass_ns(3 * MS), on_reset=lambda: clock.pass_ns(10 * MS))
        sample = sampler("pipelined", subject, world, steps)
        stamps = take_samples(subject, sample, world, timing_of(world, QUICK, 0.0), count, progress)
    return stamps.tolist(), subject.log, progress.steps


def stamps_together(world: World, offsets_ns: tuple[int, ...]) -> Any:
    """Gather stamps that name rank and iteration; rank r's clock is ahead by ``offsets_ns[r]``."""
    place = replace(world, clock=replace(world.clock, offsets_ns=offsets_ns))
    own = torch.tensor([[base + 10 * world.rank + i for i in range(4)] for base in (1000, 2000, 3000, 0)])
    together = gather_stamps(own.T.contiguous().T, place, range(world.size))
    return None if together is None else together.tolist()


# ---- what a sample is


def test_a_sample_lasts_until_the_slowest_rank_of_that_iteration(two_ranks: Ranks) -> None:
    steps_ns = [[1 * MS, 4 * MS], [3 * MS, 2 * MS]]
    seen, other = two_ranks.call("test_timing:scripted", steps_ns=steps_ns, measure=Measure(warmup=2, max_iterations=6))
    assert seen.result.seconds() == [0.003, 0.004] * 3
    assert seen.result.stamps[DURATION].tolist() == [[1 * MS, 4 * MS] * 3, [3 * MS, 2 * MS] * 3]
    assert other.timed is None


def test_a_rank_that_is_slow_in_its_step_counts_and_the_others_own_times_are_kept(two_ranks: Ranks) -> None:
    seen, _ = two_ranks.call("test_timing:timed_for_real", dawdle_in="step")
    quick, slow = seen.result.stamps[DURATION]
    assert min(seen.result.seconds()) >= DAWDLE_SECONDS
    assert slow.min() >= DAWDLE_SECONDS * 1e9
    assert np.median(quick) < DAWDLE_SECONDS * 1e9 / 2


def test_a_rank_that_is_slow_in_its_reset_delays_nobody(two_ranks: Ranks) -> None:
    """Without the barrier the other rank would wait for it inside its all_reduce."""
    seen, _ = two_ranks.call("test_timing:timed_for_real", dawdle_in="reset")
    assert np.median(seen.result.seconds()) < DAWDLE_SECONDS / 2
    assert np.median(seen.result.skew_seconds()) < DAWDLE_SECONDS / 2


def test_a_rank_that_arrives_late_shows_in_the_skew(two_ranks: Ranks) -> None:
    """It waits least itself: its own duration would blame the other."""
    seen, _ = two_ranks.call("test_timing:timed_for_real", dawdle_in="arrival")
    assert np.median(seen.result.skew_seconds()) > DAWDLE_SECONDS / 2
    waiting, late = np.median(seen.result.stamps[DURATION], axis=1)
    assert waiting > late
    assert np.median(seen.result.stamps[ARRIVAL, 1] - seen.result.stamps[ARRIVAL, 0]) > DAWDLE_SECONDS * 1e9 / 2


def test_a_pipelined_sample_is_its_steps_divided_by_their_number(two_ranks: Ranks) -> None:
    seen, _ = two_ranks.call(
        "test_timing:scripted", steps_ns=[[1 * MS], [2 * MS]], pipelined=True, measure=Measure(max_iterations=6)
    )
    assert seen.result.steps_per_sample == 5  # of 1 ms on rank 0, in 5 ms
    assert seen.result.seconds() == [0.002] * 6
    assert seen.result.stamps[DURATION].tolist() == [[5 * MS] * 6, [10 * MS] * 6]


def test_resets_come_once_before_each_sample_and_are_never_timed(two_ranks: Ranks) -> None:
    for stamps, log, begun in two_ranks.call("test_timing:sampled", steps=1, count=3):
        assert log == ["reset", "step"] * 3
        assert stamps[DURATION] == [3 * MS] * 3
        assert stamps[ARRIVAL] == [1_000_000_000 + 10 * MS + i * 13 * MS for i in range(3)]
        assert stamps[EXIT] == [arrival + 3 * MS for arrival in stamps[ARRIVAL]]
        assert begun == 3


def test_a_pipelined_sample_has_one_reset_and_no_barrier_within(two_ranks: Ranks) -> None:
    for stamps, log, begun in two_ranks.call("test_timing:sampled", steps=4, count=2):
        assert log == ["reset", *["step"] * 4] * 2
        assert stamps[DURATION] == [12 * MS] * 2
        assert begun == 2


def test_no_samples_are_stamps_of_no_iterations(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_timing:sampled", steps=1, count=0) == [([[], [], [], []], [], 0)] * 2


# ---- all ranks' stamps, on one clock


def test_stamps_are_gathered_by_rank_and_iteration(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_timing:stamps_together", offsets_ns=(0, 0))
    assert second is None
    assert first == [[[base + 10 * rank + i for i in range(4)] for rank in range(2)] for base in (1000, 2000, 3000, 0)]


def test_arrivals_and_exits_are_on_rank_0s_clock_and_durations_need_none(two_ranks: Ranks) -> None:
    first, _ = two_ranks.call("test_timing:stamps_together", offsets_ns=(0, 500))
    assert first[ARRIVAL] == [[1000, 1001, 1002, 1003], [510, 511, 512, 513]]
    assert first[EXIT] == [[2000, 2001, 2002, 2003], [1510, 1511, 1512, 1513]]
    assert first[DURATION] == [[3000, 3001, 3002, 3003], [3010, 3011, 3012, 3013]]


def timed(arrivals: list[list[int]], durations: list[list[int]], steps: int = 1) -> Timed:
    starts, lasted = np.array(arrivals), np.array(durations)
    stamps = np.stack([starts, starts + lasted, lasted, np.zeros_like(lasted)])
    return Timed(stamps=stamps, stop="budget", steps_per_sample=steps, warmup=1)


def test_skew_is_from_the_first_arrival_to_the_last_of_each_iteration() -> None:
    seen = timed([[0, 5000, 9000], [1000, 2000, 9000], [500, 2500, 9000]], [[1, 1, 1]] * 3)
    assert seen.skew_seconds() == [1e-6, 3e-6, 0.0]


def test_seconds_are_whole_nanoseconds_even_of_a_part_of_a_sample() -> None:
    assert timed([[0, 0]], [[1000, 10]], steps=3).seconds() == [333e-9, 3e-9]


# ---- how many, and why to stop


@pytest.mark.parametrize(
    ("steps_ns", "measure", "budget_seconds", "stop", "iterations"),
    [
        # 6, 12, 24: twenty are the fewest that count as precise
        ([2 * MS], Measure(warmup=1), 1e9, "precision", 24),
        ([2 * MS], Measure(warmup=1, min_iterations=40), 1e9, "precision", 40),
        ([2 * MS], Measure(warmup=1, max_iterations=10), 1e9, "max-iters", 10),
        ([2 * MS], Measure(warmup=1, max_iterations=6), 1e9, "max-iters", 6),
        # two levels in turn: the interval never narrows; seen when 48, 96 and 192 had the same
        ([2 * MS, 4 * MS], Measure(warmup=1), 1e9, "converged", 192),
        ([2 * MS, 4 * MS], Measure(warmup=1, max_iterations=150), 1e9, "max-iters", 150),
        # the first step and 6 + 6 more cost 26 ms; 12 fit into the rest, and 24 + 1 are the end of 50 ms
        ([2 * MS], Measure(warmup=1, precision=-1.0), 0.050, "budget", 24),
        ([2 * MS], Measure(warmup=1, precision=-1.0), 0.040, "budget", 19),
    ],
)
def test_each_reason_to_stop_is_reached_when_it_is_true(
    two_ranks: Ranks, steps_ns: list[int], measure: Measure, budget_seconds: float, stop: Stop, iterations: int
) -> None:
    seen, other = two_ranks.call(
        "test_timing:scripted", steps_ns=[steps_ns] * 2, measure=measure, budget_seconds=budget_seconds
    )
    assert (seen.result.stop, seen.result.stamps.shape) == (stop, (4, 2, iterations))
    assert seen.log == other.log == ["reset", "step"] * (iterations + 1)


def test_ranks_that_time_differently_still_take_the_same_number_of_steps(two_ranks: Ranks) -> None:
    """Rank 1's clock is past the budget at once and its noise never ends; only rank 0 decides."""
    seen, other = two_ranks.call(
        "test_timing:scripted",
        steps_ns=[[1 * MS], [10**10, 5, 10**12]],
        measure=Measure(max_iterations=50, precision=-1.0),
        budget_seconds=5.0,
        pipelined=True,
    )
    assert other.timed is None
    assert seen.log == other.log
    assert (seen.result.stop, seen.result.steps_per_sample) == ("max-iters", 5)


def test_the_slow_rank_decides_when_the_result_is_precise_though_rank_0_is_steady(two_ranks: Ranks) -> None:
    seen, _ = two_ranks.call("test_timing:scripted", steps_ns=[[1 * MS], [2 * MS, 4 * MS]])
    assert seen.result.stop == "converged"


def test_however_small_the_budget_there_are_enough_iterations_for_an_interval(two_ranks: Ranks) -> None:
    seen, _ = two_ranks.call("test_timing:scripted", steps_ns=[[100 * MS]] * 2, budget_seconds=0.001)
    assert (seen.result.stop, seen.result.stamps.shape[2]) == ("budget", 6)


def test_of_steps_of_seconds_there_are_as_many_as_there_is_time_for(two_ranks: Ranks) -> None:
    """An interval of six steps of 2 s would cost 12 s of a budget of 6."""
    for budget_seconds, iterations in ((6.0, 2), (0.001, 2), (9.0, 4), (60.0, 6)):
        seen, _ = two_ranks.call(
            "test_timing:scripted",
            steps_ns=[[2000 * MS]] * 2,
            budget_seconds=budget_seconds,
            measure=Measure(warmup=1, max_iterations=6, precision=-1.0),
        )
        assert seen.result.stamps.shape[2] == iterations


def test_the_budget_counts_resets_and_warm_up(two_ranks: Ranks) -> None:
    """A step of 1 ms with a reset of 99: a second is over after ten iterations, not after a thousand."""
    seen, _ = two_ranks.call(
        "test_timing:scripted",
        steps_ns=[[1 * MS]] * 2,
        reset_ns=99 * MS,
        budget_seconds=1.0,
        measure=Measure(warmup=1, precision=-1.0),
    )
    assert seen.result.stop == "budget"
    assert seen.result.stamps.shape[2] == 9
    assert set(seen.result.seconds()) == {0.001}


@pytest.mark.parametrize(
    ("budget_seconds", "warmup"),
    [(1e9, 30), (5.2, 11), (0.0, 1)],  # a fifth of 5.2 s are ten of 100 ms, after the first
)
def test_warm_up_is_counted_not_timed_and_bounded_by_its_share_of_the_budget(
    two_ranks: Ranks, budget_seconds: float, warmup: int
) -> None:
    seen, _ = two_ranks.call(
        "test_timing:scripted",
        steps_ns=[[100 * MS] * warmup + [200 * MS] * 1000] * 2,
        measure=Measure(warmup=30, max_iterations=6),
        budget_seconds=budget_seconds,
    )
    assert seen.result.warmup == warmup
    assert seen.log.count("reset") == warmup + 6
    assert seen.result.seconds() == [0.2] * 6


def test_a_watcher_sees_the_phase_and_every_sample_that_was_begun(two_ranks: Ranks) -> None:
    for seen in two_ranks.call("test_timing:scripted", steps_ns=[[1 * MS]] * 2, measure=Measure(max_iterations=6)):
        assert (seen.phase, seen.samples_begun) == ("timed", 5 + 6)


# ---- the rules by themselves


def planned(first_ns: int, each_seconds: float, budget_seconds: float, *, pipelined: bool) -> tuple[float, float]:
    first = torch.tensor([[0], [first_ns], [first_ns], [0]])
    mode = "pipelined" if pipelined else "blocking"
    how = Timing(measure=Measure(warmup=5), ranks=range(2), budget_seconds=budget_seconds, mode=mode)
    return timing._plan_warmup(first, each_seconds, how)


@pytest.mark.parametrize(
    ("first_ns", "steps"), [(0, 64), (1, 64), (50_000, 64), (100_000, 50), (1 * MS, 5), (2 * MS, 4), (10**10, 4)]
)
def test_a_pipelined_sample_lasts_five_milliseconds_within_limits(first_ns: int, steps: int) -> None:
    assert planned(first_ns, 0.001, 1e9, pipelined=True) == (4, steps)
    assert planned(first_ns, 0.001, 1e9, pipelined=False) == (4, 1)


@pytest.mark.parametrize(("each_seconds", "budget_seconds", "warmup"), [(1, 20, 4), (1, 19, 3), (1, 4, 0), (1, -1, 0)])
def test_warm_up_takes_a_fifth_of_the_budget_at_most(each_seconds: float, budget_seconds: float, warmup: int) -> None:
    assert planned(1, each_seconds, budget_seconds, pipelined=False) == (warmup, 1)


@pytest.mark.parametrize(
    ("done", "left_seconds", "batch"),
    [(6, 1e9, 6), (24, 1e9, 24), (60, 1e9, 40), (24, 10.0, 10), (24, 0.5, 1), (24, -3.0, 1), (100, 1e9, 1)],
)
def test_the_next_batch_doubles_within_the_count_and_the_time_left(done: int, left_seconds: float, batch: int) -> None:
    assert timing._next_batch(done, 1.0, Measure(max_iterations=100), left_seconds) == batch


def stamps_of(durations: list[int]) -> Stamps:
    """Return stamps of two ranks, the second twice as slow."""
    return np.array([[[0] * len(durations)] * 2, [[0] * len(durations)] * 2, [durations, [2 * d for d in durations]]])


def test_the_decision_looks_at_all_pieces_and_keeps_each_interval() -> None:
    widths: list[float | None] = []
    measure = Measure(precision=0.1)
    few = stamps_of([100] * 10)
    assert timing._decide([few], widths, measure, 1.0) is None  # precise, but too few to be believed
    assert timing._decide([few, few], widths, measure, 1.0) == "precision"
    assert widths == [0.0, 0.0]


def test_too_few_iterations_have_no_interval_and_no_precision() -> None:
    widths: list[float | None] = []
    assert timing._decide([stamps_of([100] * 5)], widths, Measure(), 1.0) is None
    assert widths == [None]


@pytest.mark.parametrize(("left_seconds", "stop"), [(0.1, None), (0.0, "budget"), (-1.0, "budget")])
def test_time_that_is_up_ends_what_nothing_else_ends(left_seconds: float, stop: Stop | None) -> None:
    assert timing._decide([stamps_of([100, 200] * 15)], [], Measure(), left_seconds) == stop


def test_a_better_reason_than_the_budget_is_told() -> None:
    assert timing._decide([stamps_of([100] * 30)], [], Measure(), -1.0) == "precision"
    assert timing._decide([stamps_of([100, 200] * 15)], [], Measure(max_iterations=30), -1.0) == "max-iters"


@pytest.mark.parametrize(
    ("widths", "settled"),
    [
        ([0.3, 0.3, 0.3], True),
        ([0.3, 0.29, 0.28], True),
        ([0.3, 0.2, 0.2], False),
        ([0.2, 0.2, 0.1], False),
        ([0.3, 0.3], False),
        ([None, 0.3, 0.3], False),
        ([0.9, 0.3, 0.3, 0.3], True),
        ([0.3, 0.3, 0.3, 0.1], False),
    ],
)
def test_noise_has_converged_when_two_doublings_hardly_narrowed_the_interval(
    widths: list[float | None], settled: bool
) -> None:
    assert timing._no_longer_shrinks(widths) is settled


def test_a_hundred_iterations_are_needed_before_noise_counts_as_converged() -> None:
    widths: list[float | None] = [1 / 3, 1 / 3]
    assert timing._decide([stamps_of([100, 200] * 49)], list(widths), Measure(), 1.0) is None
    assert timing._decide([stamps_of([100, 200] * 50)], list(widths), Measure(), 1.0) == "converged"
