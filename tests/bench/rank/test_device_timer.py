"""On a device the start line is in its queue: what is timed begins behind a spin and a collective, launched by then."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from parbench.bench.plan.plan import Measure
from parbench.bench.rank import device_timer, timing
from parbench.bench.rank.device_timer import Device, DeviceTimer
from parbench.bench.rank.timing import ARRIVAL, DURATION, EXIT, ISSUE, Progress, Timed, Timing
from parbench.bench.world.world import World
from tests.support.fake_time import HeldTime
from tests.support.fakes import NotingBenchmark
from tests.support.ranks import Ranks

US = 1_000
MEETS, WAKES, RUNS = 7 * US, 3 * US, 8 * US
"""How long the tiny collective takes, the host to see that an event was reached, and a step of the benchmark."""


class Event:
    """A mark in the queue of a device that does one thing after another."""

    def __init__(self, device: "Queue") -> None:
        self.device, self.at = device, 0

    def record(self) -> None:
        self.device.log.append("record")
        self.at = max(self.device.free, self.device.clock.now_ns)

    def query(self) -> bool:
        return self.device.clock.now_ns >= self.at

    def synchronize(self) -> None:
        self.device.log.append("wait")
        self.device.clock.now_ns = max(self.device.clock.now_ns, self.at) + WAKES

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) / 1e6


class Queue:
    """Stands for a device; the host's clock moves by what it does itself, and where it waits."""

    def __init__(self, clock: HeldTime, log: list[str]) -> None:
        self.clock, self.log, self.free, self.spins = clock, log, 0, list[int]()

    def put(self, word: str, ns: int) -> None:
        self.log.append(word)
        self.free = max(self.free, self.clock.now_ns) + ns

    def spin(self, ns: int) -> None:
        self.spins.append(ns)
        self.put("spin", ns)

    def meet(self) -> None:
        self.put("meet", MEETS)

    def event(self) -> Event:
        return Event(self)

    def sync(self) -> None:
        self.log.append("sync")
        self.clock.now_ns = max(self.clock.now_ns, self.free) + WAKES


class Launches(NotingBenchmark):
    """A benchmark whose step takes the host so long to launch, and the device to do."""

    def __init__(self, queue: Queue, launch: int) -> None:
        super().__init__()
        self.queue, self.launch = queue, launch

    def reset(self) -> None:
        self.queue.log.append("reset")

    def step(self) -> None:
        self.queue.clock.sleep_ns(self.launch)
        self.queue.put("step", RUNS)


class SometimesSlow(Launches):
    """A benchmark of whose steps every tenth takes longer to launch."""

    def step(self) -> None:
        self.calls.append("step")
        self.launch = 30 * US if len(self.calls) % 10 else 300 * US
        super().step()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    fake = HeldTime()
    for module in (timing, device_timer):
        monkeypatch.setattr(module, "time", fake)
    return fake


def timing_of(
    clock: HeldTime, launch: int, late_seconds: float = 0.0, beside: bool = False
) -> tuple[Timing, Queue]:
    log = list[str]()
    queue = Queue(clock, log)
    said = {
        name: (lambda name=name: log.append(name)) for name in ("sync", "sync_stream", "barrier")
    }
    how = Timing(
        Launches(queue, launch),
        cast(World, SimpleNamespace(**said)),
        Progress(),
        Measure(),
        [0],
        late_seconds=late_seconds,
        beside=beside,
        device=cast(Device, queue),
    )
    return how, queue


def taken(how: Timing, count: int, steps: int = 1) -> Any:
    def sample() -> None:
        for _ in range(steps):
            how.benchmark.step()

    return how.take(sample, count, steps).numpy()


def test_the_line_is_a_spin_and_a_collective_in_the_queue_before_the_events_and_the_step_between_them(
    clock: HeldTime,
) -> None:
    order = ["reset", "sync", "barrier", "spin", "meet", "record", "step", "record", "wait"]
    how, queue = timing_of(clock, launch=30 * US)
    stamps = taken(how, 3)
    assert queue.log == order * 3, "and nothing waits for the device between line and step"
    assert stamps[DURATION].tolist() == [RUNS] * 3, "neither launch nor the host's waking"
    assert (stamps[EXIT] - stamps[ARRIVAL]).tolist() == [RUNS] * 3
    assert queue.spins == [500 * US, 80 * US, 80 * US], (
        "twice what a launch takes and some more, once that is known"
    )
    how, queue = timing_of(clock, launch=30 * US, beside=True)
    taken(how, 1)
    assert queue.log == ["reset", "sync_stream", *order[2:]], "a load beside it is not waited for"
    how, queue = timing_of(clock, launch=30 * US)
    how.start_line()
    assert queue.log == ["reset", "sync", "barrier"], (
        "a step that nobody times needs no line on the device"
    )


def test_many_steps_are_launched_behind_one_longer_spin(clock: HeldTime) -> None:
    how, queue = timing_of(clock, launch=20 * US)
    taken(how, 1)
    assert taken(how, 2, steps=64)[DURATION].tolist() == [64 * RUNS] * 2
    assert queue.spins == [500 * US, 5000 * US, (2 * 64 * 20 + 20) * US]


def test_a_launch_too_long_to_hide_is_timed_from_a_line_at_which_the_host_waits(
    clock: HeldTime,
) -> None:
    how, queue = timing_of(clock, launch=3000 * US)
    stamps = taken(how, 3)
    assert queue.spins == [500 * US], "of the first, as nobody knew"
    assert (
        queue.log[9:]
        == ["reset", "sync", "barrier", "meet", "sync", "record", "step", "record", "wait"] * 2
    )
    assert stamps[DURATION, 1:].tolist() == [3000 * US + RUNS] * 2
    assert how._timer is not None
    assert how._timer.hidden == [False] * 3


def test_one_slow_launch_changes_no_other_sample(clock: HeldTime) -> None:
    how, queue = timing_of(clock, launch=30 * US)
    benchmark = cast(Launches, how.benchmark)
    launches = [30, 900, 30]
    found = []
    for launch in launches:
        benchmark.launch = launch * US
        found.append(int(taken(how, 1)[DURATION, 0]))
    assert found == [RUNS, found[1], RUNS]
    assert queue.spins[2] == 80 * US
    assert how._timer is not None
    assert how._timer.hidden == [True, False, True]


def test_a_late_rank_queues_its_line_first_and_begins_late(clock: HeldTime) -> None:
    how, queue = timing_of(clock, launch=30 * US, late_seconds=0.002)
    began = clock.now_ns
    stamps = taken(how, 1)
    assert queue.log[3:7] == ["spin", "meet", "sync", "record"]
    line = began + 500 * US + MEETS  # where the others' queues leave it
    assert stamps[ARRIVAL, 0] == line + WAKES + 2000 * US + WAKES
    assert stamps[DURATION, 0] == 30 * US + RUNS
    assert how._timer is not None
    assert how._timer.hidden == [False]


def test_where_issuing_is_looked_at_nothing_hides_it(clock: HeldTime) -> None:
    log = list[str]()
    queue = Queue(clock, log)
    timer = DeviceTimer(cast(Device, queue), apart=True)

    def issued() -> int:
        Launches(queue, 30 * US).step()
        return clock.now_ns

    timer.line(1)
    *_, duration, issue = timer.timed(issued, 1)
    assert (log, issue, duration) == (
        ["meet", "sync", "record", "step", "record", "wait"],
        30 * US,
        30 * US + RUNS,
    )
    assert queue.spins == []


def test_the_device_is_asked_for_what_the_line_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asked.append(cycles))
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, group: asked.append((tensor.numel(), group))
    )
    for backend in ("nccl", "gloo"):
        place = SimpleNamespace(
            device=torch.device("cpu"), backend=backend, group=backend, sync_stream=lambda: None
        )
        device = Device(cast(World, place))
        device.spin(50 * US)
        device.meet()
    assert asked == [100_000, (1, "nccl"), 100_000], (
        "cycles of 2 GHz; gloo's collective is the host's"
    )


def test_what_the_last_arriver_sees_is_kept_beside_the_slowest(two_ranks: Ranks) -> None:
    arrivals = np.array([[0, 5000], [1000, 2000], [500, 2500]])
    durations = np.array([[3000, 1000], [2000, 4000], [2600, 3600]])
    stamps = np.stack([arrivals, arrivals + durations, durations, 0 * durations])
    seen = Timed(stamps=stamps, stop="budget", steps_per_sample=1, warmup=1, hidden=0.75).samples(
        hops=2
    )
    assert (seen["seconds"], seen["last_arriver_seconds"]) == ([1.5e-6, 2e-6], [1e-6, 0.5e-6])
    host = Timed(stamps=stamps, stop="budget", steps_per_sample=1, warmup=1).samples()
    assert host["last_arriver_seconds"] == [], "on a CPU the transfer tells it"
    assert seen["issue_seconds"] == []
    assert ISSUE == 3
    hidden = two_ranks.call("tests.bench.rank.test_device_timer:share_hidden")
    assert hidden == [0.9, None]


def share_hidden(world: World) -> float | None:
    """Time on a device of which rank 0 launches one step in ten too late; return what the outcome says of it."""
    clock = HeldTime()
    with pytest.MonkeyPatch.context() as patch:
        for module in (timing, device_timer):
            patch.setattr(module, "time", clock)
        queue = Queue(clock, [])
        measure = Measure(warmup=1, min_iterations=10, max_iterations=20)
        benchmark = SometimesSlow(queue, 30 * US)
        timed = Timing(
            benchmark, world, Progress(), measure, range(2), device=cast(Device, queue)
        ).run(60.0)
    return None if timed is None else timed.hidden


def test_torch_has_the_private_spin_kernel() -> None:
    assert callable(torch.cuda._sleep), "GPU line-ups need it, and no other test without a GPU"
