"""On a real device: the start line hides the launch, replays are checked, a load is busy and nobody waits for it."""

import os
import time
import warnings
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.operations.local import background_load, copy
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.catalogue import OPERATIONS
from parbench.bench.plan.plan import Measure
from parbench.bench.rank import runner
from parbench.bench.rank.device_timer import Device, DeviceTimer
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import Progress, Timed, Timing
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.world import Subgroups, World, open_world
from tests.support.fakes import NotingBenchmark
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error

pytestmark = pytest.mark.gpu

MEASURE = Measure(warmup=10, min_iterations=50, max_iterations=200)
LATE_SECONDS = 0.02


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield a world of one rank on NCCL."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)  # type: ignore[attr-defined]
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, places), open_world("nccl", "cuda", 0, 60, store) as world:
        yield world


@pytest.fixture(scope="module")
def on_one_gpu() -> Iterator[Ranks]:
    with Ranks(2, "cuda") as ranks:
        yield ranks


class OnlyEager(NotingBenchmark):
    """A benchmark whose captured step holds nothing, and whose eager steps are right."""

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


def only_eager(world: World) -> OnlyEager:
    return OnlyEager()


def small_copy(world: World) -> Operation:
    return copy(world, size_bytes=1024, dtype="float32")


def timed(benchmark: Benchmark, world: World, mode: str, seconds: float = 1.0) -> Timed:
    found = Timing(benchmark, world, Progress(), MEASURE, [0], mode=mode).run(seconds)
    assert found is not None
    return found


def median_us(found: Timed) -> float:
    return 1e6 * float(np.median(found.samples()["seconds"]))


def event_times_us(world: World, *, apart: bool) -> list[float]:
    benchmark, timer = small_copy(world), DeviceTimer(Device(world), apart=apart)
    durations = []
    for _ in range(50):
        benchmark.reset()
        world.sync()
        timer.line(1)
        durations.append(timer.timed(benchmark.step, 1)[2] / 1e3)
    return durations[10:]


def late_copy(world: World) -> tuple[float, list[float]]:
    """Return, on rank 0, the median skew and each rank's median duration where rank 1 comes late."""
    late = LATE_SECONDS if world.rank == 1 else 0.0
    measure = Measure(warmup=2, min_iterations=6, max_iterations=6)
    timing = Timing(
        copy(world, size_bytes=1024, dtype="float32"),
        world,
        Progress(),
        measure,
        [0, 1],
        late_seconds=late,
    )
    found = timing.run(5.0)
    if found is None:
        return 0.0, []
    return float(np.median(found.samples()["skew_seconds"])), np.median(
        found.stamps[2], axis=1
    ).tolist()


def test_a_spin_lasts_as_long_as_asked_at_any_clock(world: World) -> None:
    device, lasted = Device(world), []
    for _ in range(20):
        start, end = device.event(), device.event()
        world.sync()
        start.record()
        device.spin(100_000)
        end.record()
        end.synchronize()
        lasted.append(1e3 * start.elapsed_time(end))
    print(f"figure: a spin of 100 us lasts {min(lasted):.0f} to {max(lasted):.0f} us")
    assert min(lasted) > 66, "up to 3 GHz"
    assert max(lasted) < 2_000


def test_behind_a_spin_an_event_time_holds_no_launch(world: World) -> None:
    hidden, open_ = (
        float(np.median(event_times_us(world, apart=apart))) for apart in (False, True)
    )
    print(
        f"figure: event time of a copy of 1 KiB {hidden:.1f} us behind a spin, {open_:.1f} us without"
    )
    assert hidden < open_
    found = timed(small_copy(world), world, "blocking")
    print(
        f"figure: launch hidden in {found.hidden:.2f} of iterations, blocking {median_us(found):.1f} us"
    )
    assert found.hidden is not None
    assert found.hidden > 0.9


def test_modes_of_many_steps_are_no_slower_than_blocking_and_their_launch_is_hidden(
    world: World,
) -> None:
    medians = {}
    for mode in ("blocking", "pipelined", "graph"):
        found = timed(small_copy(world), world, mode)
        medians[mode] = median_us(found)
        assert found.hidden is not None
        assert found.hidden > 0.8, mode
    print(
        "figure: a copy of 1 KiB "
        + ", ".join(f"{mode} {us:.1f} us" for mode, us in medians.items())
    )
    assert medians["graph"] < medians["blocking"]
    assert medians["pipelined"] < 1.2 * medians["blocking"]


def test_an_empty_capture_is_found_wrong(world: World) -> None:
    case = make_case("custom.eager", "tests.gpu.test_gpu_timing:only_eager", {"mode": "graph"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that the graph is empty
        run = CaseRun(case, Subgroups(world), MEASURE, Progress(), None)
        with mock.patch.object(runner, "load_target", return_value=only_eager):
            outcome = run.visit(5.0)
    assert (outcome.status, outcome.reason) == (
        "wrong",
        "results differ from the reference in a replay before the timed region: 1 on rank 0",
    )


@pytest.mark.parametrize("mode", ["blocking", "pipelined", "async", "coalesced", "graph"])
def test_every_collective_is_right_in_every_mode_that_it_has_on_nccl(
    world: World, mode: str
) -> None:
    spec = WorldSpec(nproc=1, backend="nccl", device="cuda")
    found = {}
    for operation in (one for one in OPERATIONS if one.name.startswith("collective.")):
        definition = operation.definition
        given = {"mode": mode, **({"size_bytes": 4096} if operation.busbw else {})}
        case = definition.case(given)
        if definition.refuse(case.whole, spec) is None:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # that a graph is empty: in place, NCCL launches nothing for one rank
                outcome = CaseRun(
                    case, Subgroups(world), Measure(max_iterations=20), Progress(), None
                ).visit(1.0)
            found[case.label] = (outcome.status, outcome.reason)
            assert len(outcome.last_arriver_seconds) == len(outcome.seconds)
    assert found
    assert set(found.values()) == {("ok", "")}, found


@pytest.mark.parametrize("kind", ["gemm", "all_gather"])
def test_a_load_keeps_the_device_busy_and_what_is_measured_does_not_wait_for_it(
    world: World, kind: str
) -> None:
    with background_load(kind, world) as rounds:
        deadline = time.monotonic() + 20
        while len(rounds) < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen, began = len(rounds), time.perf_counter()
        waits = []
        for _ in range(20):
            asked = time.perf_counter()
            torch.zeros(1, device="cuda")
            world.sync_stream()
            waits.append(time.perf_counter() - asked)
            time.sleep(0.01)
        busy, wall = sum(rounds[seen:]) / 1e3, time.perf_counter() - began
    print(
        f"figure: beside {kind}, rounds of {np.median(rounds[10:]):.1f} ms, busy {busy / wall:.0%}"
    )
    print(f"figure: beside {kind}, a wait for an own kernel takes {1e3 * np.median(waits):.2f} ms")
    assert np.median(rounds[10:]) >= 5.0
    assert busy / wall > 0.7
    if kind == "all_gather":  # a matrix product's blocks fill the device, and hold others' up
        assert np.median(waits) < 0.005


def test_a_late_rank_on_a_device_shows_in_the_skew(on_one_gpu: Ranks) -> None:
    (skew, durations), _ = on_one_gpu.call("tests.gpu.test_gpu_timing:late_copy")
    print(f"figure: a rank late by 20 ms shows as a skew of {1e3 * skew:.2f} ms")
    assert LATE_SECONDS < skew < 2 * LATE_SECONDS
    assert max(durations) < LATE_SECONDS * 1e9 / 2, "a copy of its own waits for nobody"


def test_what_is_larger_than_what_is_free_is_refused(world: World) -> None:
    free, _ = torch.cuda.mem_get_info()
    prepare = "parbench.bench.operations.collectives:all_reduce"
    for size, refused in ((1 << 20, False), (free, True)):
        case = make_case(
            "collective.all_reduce",
            prepare,
            {"size_bytes": size, "dtype": "float32", "mode": "blocking"},
        )
        if refused:
            assert "of the device are free" in usage_error(runner._refuse_too_large, case, world)
        else:
            runner._refuse_too_large(case, world)
