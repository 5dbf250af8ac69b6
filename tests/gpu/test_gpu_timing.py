"""Timing on a GPU: hidden launches, checked replays, background load, skew."""

import warnings
from unittest import mock

import numpy as np
import pytest
import torch

from parbench.bench.operations.local import copy
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.plan import Measure
from parbench.bench.rank import runner
from parbench.bench.rank.device_timer import DeviceTimer
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import CaseTimer, Stopwatch, TimedSamples
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.world import World, select_subgroup
from tests.support.fakes import NotingBenchmark
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu
MEASURE = Measure(warmup=10, min_iterations=50, max_iterations=200)
LATE_SECONDS = 0.02
DURATION = 2
"""Index of durations among the stamps of a timing."""


class EagerOnlyBenchmark(NotingBenchmark):
    """A benchmark whose captured step is empty, and whose eager steps are correct."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.zeros(1, device="cuda")

    def reset(self) -> None:
        self.number.zero_()

    def step(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self.number.fill_(1)

    def check(self) -> int:
        return int(self.number.item() != 1)


def build_small_copy(world: World) -> Operation:
    return copy(world, size_bytes=1024, dtype="float32")


def make_timer(
    benchmark: Benchmark,
    world: World,
    measure: Measure = MEASURE,
    mode: str = "blocking",
    late_seconds: float = 0.0,
) -> CaseTimer:
    stopwatch = Stopwatch(
        benchmark=benchmark,
        world=world,
        progress=Progress(),
        late_seconds=late_seconds,
        timer=DeviceTimer(world, spins=late_seconds == 0),
    )
    return CaseTimer(stopwatch, measure, select_subgroup(world, {}), mode)


def measure_timing(benchmark: Benchmark, world: World, mode: str) -> TimedSamples:
    timing = make_timer(benchmark, world, mode=mode)
    timing.measure_until_precise(1.0)
    return timing.samples


def compute_median_us(timed: TimedSamples) -> float:
    return 1e6 * float(np.median(timed.compute_seconds()["time"]))


def measure_event_times_us(world: World, *, spins: bool) -> list[float]:
    """Return event times of a copy, with or without the spin that hides the launch."""
    benchmark = build_small_copy(world)
    timer = DeviceTimer(world, spins=spins)
    durations = []
    for _ in range(50):
        benchmark.reset()
        world.sync()
        timer.queue_start_line(1)
        durations.append(timer.measure(benchmark.step, 1)[DURATION] / 1e3)
    return durations[10:]


def measure_late_copy(world: World) -> tuple[float, list[float]]:
    """Return, on rank 0, the median skew and the median duration of each rank; rank 1 is late."""
    late_seconds = LATE_SECONDS if world.rank == 1 else 0.0
    measure = Measure(warmup=2, min_iterations=6, max_iterations=6)
    timing = make_timer(build_small_copy(world), world, measure, late_seconds=late_seconds)
    timing.measure_until_precise(5.0)
    timed = timing.samples
    if world.rank != 0:
        return 0.0, []
    skew = float(np.median(timed.compute_seconds()["skew"]))
    return skew, np.median(timed.stamps[DURATION], axis=1).tolist()


def test_spin_hides_launch(nccl_world: World) -> None:
    hidden_us = float(np.median(measure_event_times_us(nccl_world, spins=True)))
    open_us = float(np.median(measure_event_times_us(nccl_world, spins=False)))
    print(f"figure: copy of 1 KiB {hidden_us:.1f} us behind a spin, {open_us:.1f} us without")
    assert hidden_us < open_us
    timed = measure_timing(build_small_copy(nccl_world), nccl_world, "blocking")
    assert timed.hidden is not None
    assert timed.hidden > 0.9


def test_graph_and_pipelined_are_not_slower_than_blocking(nccl_world: World) -> None:
    medians_us = {}
    for mode in ("blocking", "pipelined", "graph"):
        timed = measure_timing(build_small_copy(nccl_world), nccl_world, mode)
        medians_us[mode] = compute_median_us(timed)
        assert timed.hidden is not None
        assert timed.hidden > 0.8, mode
    print(f"figure: medians of a copy of 1 KiB in us: {medians_us}")
    assert medians_us["graph"] < medians_us["blocking"]
    assert medians_us["pipelined"] < 1.2 * medians_us["blocking"]


def test_empty_capture_is_wrong(nccl_world: World) -> None:
    case = make_case(
        "custom.eager", "tests.gpu.test_gpu_timing:EagerOnlyBenchmark", {"mode": "graph"}
    )
    run = CaseRun(case, nccl_world, MEASURE, Progress(), None)
    with warnings.catch_warnings():
        # torch warns that the graph is empty.
        warnings.simplefilter("ignore")
        with mock.patch.object(runner, "make_benchmark", return_value=EagerOnlyBenchmark()):
            outcome = run.run_block(5.0)
    assert outcome.status == "wrong"
    assert "replay" in outcome.reason


def test_late_rank_shows_in_skew(ranks_on_one_gpu: Ranks) -> None:
    (skew, durations), _ = ranks_on_one_gpu.call("tests.gpu.test_gpu_timing:measure_late_copy")
    assert 0.9 * LATE_SECONDS < skew < 2 * LATE_SECONDS
    assert max(durations) < 1e9 * LATE_SECONDS / 2, "a local copy waited for the late rank"
