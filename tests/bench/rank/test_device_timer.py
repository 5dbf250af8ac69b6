"""Timing on a device: timed steps begin behind a spin and a collective in the device's queue."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch

from parbench.bench.plan.plan import Measure
from parbench.bench.rank import device_timer, timing
from parbench.bench.rank.device_timer import DeviceTimer, Stamp
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.timing import (
    ARRIVAL,
    DURATION,
    EXIT,
    HIDDEN,
    ISSUE,
    CaseTimer,
    Stamps,
    Stopwatch,
)
from parbench.bench.world import accelerator
from parbench.bench.world.world import Subgroup, World
from tests.support.fake_time import HeldTime
from tests.support.fakes import NotingBenchmark
from tests.support.ranks import Ranks

MODULE = "tests.bench.rank.test_device_timer"
US = 1_000
COLLECTIVE_NS = 7 * US
QUEUE_NS = 5 * US  # of the host, to queue the collective of a start line
WAKE_UP_NS = 3 * US  # of the host, after an event of the device
STEP_NS = 8 * US


class FakeEvent:
    """A mark in the queue of a device that does one thing after another."""

    def __init__(self, device: "FakeDevice") -> None:
        self.device = device
        self.time_ns = 0

    def record(self) -> None:
        self.device.log.append("record")
        self.time_ns = max(self.device.idle_from_ns, self.device.clock.now_ns)

    def query(self) -> bool:
        return self.device.clock.now_ns >= self.time_ns

    def synchronize(self) -> None:
        self.device.log.append("wait")
        clock = self.device.clock
        clock.now_ns = max(clock.now_ns, self.time_ns) + WAKE_UP_NS

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.time_ns - self.time_ns) / 1e6


class FakeDevice:
    """A device with one queue; the host's clock moves by its own work and where it waits."""

    def __init__(self, clock: HeldTime) -> None:
        self.clock = clock
        self.log: list[str] = []
        self.spins_us: list[float] = []
        self.idle_from_ns = 0

    def enqueue(self, name: str, duration_ns: int) -> None:
        self.log.append(name)
        self.idle_from_ns = max(self.idle_from_ns, self.clock.now_ns) + duration_ns

    def spin(self, duration_ns: int) -> None:
        self.spins_us.append(duration_ns / US)
        self.enqueue("spin", duration_ns)

    def queue_barrier(self) -> None:
        self.clock.sleep_ns(QUEUE_NS)
        self.enqueue("meet", COLLECTIVE_NS)

    def sync(self) -> None:
        self.log.append("sync")
        self.clock.now_ns = max(self.clock.now_ns, self.idle_from_ns) + WAKE_UP_NS


class FakeTimer(DeviceTimer):
    """Times samples on a fake device."""

    def __init__(self, device: FakeDevice, *, spins: bool = True) -> None:
        world = SimpleNamespace(device="cpu", sync_stream=device.sync)
        super().__init__(cast(World, world), spins=spins)
        self.device = device

    def spin(self, duration_ns: int) -> None:
        self.device.spin(duration_ns)

    def queue_barrier(self) -> None:
        self.device.queue_barrier()

    def measure(self, sampler: Callable[[], int | None], steps: int) -> Stamp:
        make_event = mock.Mock(side_effect=lambda: FakeEvent(self.device))
        with mock.patch.object(accelerator, "make_event", make_event):
            return super().measure(sampler, steps)


class LaunchingBenchmark(NotingBenchmark):
    """Launches steps in a scripted time each, the last one repeatedly."""

    def __init__(self, device: FakeDevice, launches_us: list[int]) -> None:
        super().__init__()
        self.device = device
        self.launches_us = launches_us

    def reset(self) -> None:
        self.device.log.append("reset")

    def step(self) -> None:
        is_last = len(self.launches_us) == 1
        launch_us = self.launches_us[0] if is_last else self.launches_us.pop(0)
        self.device.clock.sleep_ns(launch_us * US)
        self.device.enqueue("step", STEP_NS)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    clock = HeldTime()
    for module in (timing, device_timer):
        monkeypatch.setattr(module, "time", clock)
    return FakeDevice(clock)


def make_stopwatch(
    device: FakeDevice,
    launches_us: list[int],
    *,
    spins: bool = True,
    late_seconds: float = 0.0,
) -> Stopwatch:
    namespace = SimpleNamespace(
        sync=lambda: device.log.append("sync"),
        sync_stream=lambda: device.log.append("sync stream"),
        barrier=lambda: device.log.append("barrier"),
    )
    return Stopwatch(
        benchmark=LaunchingBenchmark(device, launches_us),
        world=cast(World, namespace),
        progress=Progress(),
        late_seconds=late_seconds,
        timer=FakeTimer(device, spins=spins),
    )


def take_samples(stopwatch: Stopwatch, count: int) -> Stamps:
    stamps: Stamps = stopwatch.take(stopwatch.benchmark.step, count).numpy()
    return stamps


def test_step_is_timed_behind_a_start_line(device: FakeDevice) -> None:
    stamps = take_samples(make_stopwatch(device, [30]), 3)
    start_line = ["reset", "sync", "barrier", "spin", "meet"]
    assert device.log == [*start_line, "record", "step", "record", "wait"] * 3
    # Neither the launch nor the wake-up of the host counts.
    assert stamps[DURATION].tolist() == [STEP_NS] * 3
    assert (stamps[EXIT] - stamps[ARRIVAL]).tolist() == [STEP_NS] * 3
    # Twice the time of the host and a margin, after the first launch is measured.
    assert device.spins_us == [500, 90, 90]
    assert stamps[HIDDEN].tolist() == [1, 1, 1]


def test_spin_grows_after_launches_that_were_seen(device: FakeDevice) -> None:
    stamps = take_samples(make_stopwatch(device, [30, 100, 100, 30, 600, 100]), 6)
    assert device.spins_us == [500, 90, 110, 110, 110, 150]
    assert stamps[HIDDEN].tolist() == [1, 0, 1, 1, 0, 1]


def test_spin_has_a_limit(device: FakeDevice) -> None:
    take_samples(make_stopwatch(device, [30, *[900] * 6]), 7)
    assert device.spins_us == [500, 90, 110, 150, 230, 390, 500]


def test_long_launch_is_timed_with_its_step(device: FakeDevice) -> None:
    stamps = take_samples(make_stopwatch(device, [3000]), 3)
    # The host waits at the start line, and does not spin once the launch is measured.
    assert device.spins_us == [500]
    start_line = ["reset", "sync", "barrier", "meet", "sync"]
    assert device.log[-9:] == [*start_line, "record", "step", "record", "wait"]
    assert stamps[DURATION, 1:].tolist() == [3000 * US + STEP_NS] * 2


def test_late_rank_joins_the_start_line_first(device: FakeDevice) -> None:
    stopwatch = make_stopwatch(device, [30], spins=False, late_seconds=0.002)
    start_ns = device.clock.now_ns
    stamps = take_samples(stopwatch, 1)
    assert device.log[3:6] == ["meet", "sync", "record"]
    line_ns = start_ns + QUEUE_NS + COLLECTIVE_NS
    assert stamps[ARRIVAL, 0] == line_ns + WAKE_UP_NS + 2000 * US + WAKE_UP_NS
    assert stamps[DURATION, 0] == 30 * US + STEP_NS


def test_async_mode_does_not_hide_the_launch(device: FakeDevice) -> None:
    stopwatch = make_stopwatch(device, [30], spins=False)

    def issue() -> int:
        stopwatch.benchmark.step()
        return device.clock.now_ns

    stamps = stopwatch.take(issue, 1)
    assert device.spins_us == []
    assert stamps[ISSUE, 0] == 30 * US
    assert stamps[DURATION, 0] == 30 * US + STEP_NS


def measure_on_device(
    world: World, launches_us: list[list[int]], ranks: tuple[int, ...]
) -> float | None:
    """Return the share of samples with hidden launches on ``ranks``, on rank 0."""
    device = FakeDevice(HeldTime())
    stopwatch = Stopwatch(
        benchmark=LaunchingBenchmark(device, launches_us[world.rank]),
        world=world,
        progress=Progress(),
        timer=FakeTimer(device),
    )
    measure = Measure(warmup=1, min_iterations=8, max_iterations=8)
    timer = CaseTimer(stopwatch, measure, Subgroup(ranks=ranks, active=ranks, world=world))
    with (
        mock.patch.object(timing, "time", device.clock),
        mock.patch.object(device_timer, "time", device.clock),
    ):
        timer.measure_until_precise(1e9)
    return timer.samples.hidden if world.rank == 0 else None


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ((0, 1), 4 / 8),
        ((1,), 5 / 8),
        ((0,), 6 / 8),
    ],
)
def test_launch_is_hidden_if_it_is_on_all_measured_ranks(
    two_ranks: Ranks, ranks: tuple[int, ...], share: float
) -> None:
    """The first launch is the warm-up. A launch of 200 us shows after a spin of 90 us."""
    launches_us = [
        [30, 30, 200, 30, 30, 30, 200, 30, 30],
        [30, 30, 200, 200, 30, 200, 30, 30, 30],
    ]
    target = f"{MODULE}:measure_on_device"
    results = two_ranks.call(target, launches_us=launches_us, ranks=ranks)
    assert results == [share, None]


def test_torch_has_the_private_spin_kernel() -> None:
    """Start lines on GPUs need it, and no other test without a GPU uses it."""
    assert callable(torch.cuda._sleep)
