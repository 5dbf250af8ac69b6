"""The world is joined and left cleanly, its ranks hear each other, and its clocks are one within what they state."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import Backend, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from parbench.bench.launch.control_channel import Finished
from parbench.bench.operations import collectives
from parbench.bench.operations.collectives import Barrier
from parbench.bench.plan.cases import make_case
from parbench.bench.rank.timing import Progress
from parbench.bench.rank.worker import _cases
from parbench.bench.world import world as clock
from parbench.bench.world.world import Clock, World, _device, calibrate, open_world
from tests.support.fake_time import HeldTime
from tests.support.fakes import make_job
from tests.support.paths import environment
from tests.support.ranks import Ranks

Alone = Callable[..., AbstractContextManager[World]]
SHIFT_NS = 5_000_000


def exchanged(world: World, decisions: list[list[float]]) -> dict[str, Any]:
    world.sync()  # a CPU needs no waiting for
    return {
        "ranks": (world.rank, world.global_rank, world.size, world.hosts, str(world.device)),
        "backends": (world.backend, dist.get_backend(world.group), dist.get_backend(world.control)),
        "own control": world.control is not world.group,
        "sizes": (world.group.size(), world.control.size()),
        "decided": [
            world.decide(values if world.rank == 0 else [99.0, 99.0]) for values in decisions
        ],
        "gathered": world.gather(
            {"rank": world.rank, "text": "x" * 1000 * (1 + world.rank), "none": None}
        ),
        "clock": calibrate(world.rank, world.size, world.control),
        "retimed": world.retimed() is world,  # one host has no clock to find anew
    }


def stamps_at_barrier(world: World, late: int) -> tuple[int, int]:
    """Return when this rank came to the barrier and when it left; one rank comes late."""
    world.barrier()
    if world.rank == late:
        time.sleep(0.05)
    came = time.perf_counter_ns()
    world.barrier()
    return came, time.perf_counter_ns()


def test_ranks_know_their_world_and_hear_each_other_and_rank_0_decides(two_ranks: Ranks) -> None:
    decisions = [[7.0, -1.0], [0.1, 1e-300], [float(1 << 53), float("inf")]]
    expected = {
        "backends": ("gloo", "gloo", "gloo"),
        "own control": True,
        "sizes": (2, 2),
        "decided": decisions,
        "gathered": [
            {"rank": rank, "text": "x" * 1000 * (1 + rank), "none": None} for rank in range(2)
        ],
        "clock": Clock(offsets_ns=(0, 0), uncertainty_ns=0, method="one host, one monotonic clock"),
        "retimed": True,
    }
    seen = two_ranks.call("tests.bench.world.test_world:exchanged", decisions=decisions)
    assert seen == [
        {"ranks": (rank, rank, 2, (socket.gethostname(),) * 2, "cpu"), **expected}
        for rank in range(2)
    ]


def test_nobody_leaves_a_barrier_before_the_last_has_come(two_ranks: Ranks) -> None:
    """Processes of one host really read the same clock, or some rank would seem to."""
    for late in (0, 1):
        stamps = two_ranks.call("tests.bench.world.test_world:stamps_at_barrier", late=late)
        assert min(left for _, left in stamps) >= stamps[late][0]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Alone]:
    """This process as the only rank, which can join one world after another; what a test leaves open is closed."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)

    def join(seed: int = 0) -> AbstractContextManager[World]:
        store = FileStore(str(tmp_path / f"store{seed}"), 1)
        return open_world("gloo", "cpu", seed, timeout_seconds=30, store=store)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_world_is_left_at_its_end_however_it_ends_and_another_can_be_joined(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        with alone(seed) as world:
            assert (world.rank, world.size, len(world.hosts), world.seed) == (0, 1, 1, seed)
            assert dist.is_initialized()
        assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), alone(3):
        raise ZeroDivisionError
    assert not dist.is_initialized()

    def no_host_name() -> str:
        raise OSError("no name")

    monkeypatch.setattr(socket, "gethostname", no_host_name)
    with pytest.raises(OSError, match="no name"), alone(4):
        pytest.fail("there is no world")
    assert not dist.is_initialized()


def test_the_timeout_is_that_of_every_group_that_is_made_in_the_world_a_meshs_too(
    alone: Alone,
) -> None:
    def timeout_of(group: dist.ProcessGroup) -> timedelta:
        options: Any = group._get_backend(torch.device("cpu")).options
        return cast(timedelta, options._timeout)

    def torchs() -> list[object]:
        return [vars(distributed_c10d)[f"default_pg_{name}timeout"] for name in ("", "nccl_")]

    before = torchs()
    with alone() as world:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        made = [world.group, world.control, dist.new_group(), *mesh.get_all_groups()]
        assert [timeout_of(group) for group in made] == [timedelta(seconds=30)] * 5
        assert torchs() == [timedelta(seconds=30)] * 2
        assert distributed_c10d._get_default_timeout(Backend("nccl")) == timedelta(seconds=30)
    assert torchs() == before


def test_float32_is_full_whatever_the_environment_says() -> None:
    code = "import torch; from parbench.bench.world.world import full_float32; b = torch.backends\n"
    code += "was = torch.get_float32_matmul_precision(); is_ = full_float32()\n"
    code += "print(was, is_, b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32)"
    env = {**environment(), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["high", "highest", "False", "False"]


def test_a_rank_takes_the_gpu_of_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than GPUs go round; without LOCAL_RANK the first GPU is taken. No GPU is needed to see it."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delitem(os.environ, "LOCAL_RANK", raising=False)
    assert _device("cpu") == torch.device("cpu")
    for local, index in {None: 0, "0": 0, "3": 3, "5": 1}.items():
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        assert _device("cuda") == torch.device("cuda", index)
    assert chosen == [0, 0, 3, 1]


def calibrated_apart(world: World, boots: list[str], shifts_ns: list[list[int]]) -> list[Clock]:
    """Calibrate ranks whose kernels have these boot ids, and whose clocks are ahead of the real one by so much."""
    found = []
    for shifts in shifts_ns:
        now = SimpleNamespace(
            perf_counter_ns=lambda shift=shifts[world.rank]: time.perf_counter_ns() + shift
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "_boot_id", lambda rank: boots[rank])
            patch.setattr(clock, "time", now)
            found.append(calibrate(world.rank, world.size, world.control))
    return found


@contextmanager
def drifting(world: World, ahead_ns: Callable[[], int]) -> Iterator[World]:
    """Give the world of two hosts, whose rank 1 is so much ahead; what was found of its clock is stale at once."""
    mine = ahead_ns if world.rank == 1 else lambda: 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_boot_id", lambda rank: f"kernel {rank}")
        patch.setattr(clock, "_STALE_SECONDS", 0.0)
        for module in (clock, collectives):
            now = SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + mine())
            patch.setattr(module, "time", now)
        yield replace(world, clock=calibrate(world.rank, world.size, world.control))


def barriers_on_drifting_clocks(world: World, drift_ns: int) -> tuple[list[tuple[str, float]], int]:
    """Return, of barriers seen after rank 1's clock has run ahead, rank 0's statuses and clocks' uncertainties.

    And whether a barrier looks wrong that was prepared before.
    """
    ahead_ns, said = [0], list[Any]()
    cases = [
        make_case(
            "collective.barrier",
            "parbench.bench.operations.collectives:barrier",
            {"number": number},
        )
        for number in range(2)
    ]
    with drifting(world, lambda: ahead_ns[0]) as apart, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "barrier", lambda world, number: Barrier(world))
        ahead_ns[0] = drift_ns
        _cases(cast(Any, SimpleNamespace(say=said.append)), make_job(cases), apart, Progress())
    ahead_ns[0] = 0
    with drifting(world, lambda: ahead_ns[0]) as apart:
        benchmark = Barrier(apart)
        ahead_ns[0] = drift_ns
        benchmark.step()
        wrong = benchmark.check()
    outcomes = [what.outcome for what in said if isinstance(what, Finished)]
    return [
        (found.status, found.arrival.uncertainty if found.arrival else 0.0) for found in outcomes
    ], wrong


def retimed(world: World, age_seconds: float) -> tuple[bool, Clock, Clock]:
    """Return whether a world of two hosts keeps its clock at an age, that clock, and the one it has then."""
    with drifting(world, lambda: 0) as apart, pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_STALE_SECONDS", 5.0)
        taken_ns = apart.clock.taken_ns - int(age_seconds * 1e9) if world.rank == 0 else 0
        old = replace(apart, clock=replace(apart.clock, taken_ns=taken_ns))
        new = old.retimed()
        return new is old, old.clock, new.clock


def test_a_shifted_clock_is_found_within_the_uncertainty(two_ranks: Ranks) -> None:
    shifts_ns = [[0, 0], [0, SHIFT_NS], [0, -SHIFT_NS], [SHIFT_NS, 0], [SHIFT_NS, -(10**15)]]
    first, second = two_ranks.call(
        "tests.bench.world.test_world:calibrated_apart", boots=["a", "b"], shifts_ns=shifts_ns
    )
    assert first == second
    for (mine, other), found in zip(shifts_ns, first, strict=True):
        assert found.offsets_ns[0] == 0
        assert abs(found.offsets_ns[1] - (other - mine)) <= found.uncertainty_ns, (mine, other)
        assert found.uncertainty_ns > 0
        assert found.method == "ping-pong with rank 0, least round trip of 50"


@pytest.mark.full
def test_every_rank_has_an_offset_of_its_own_and_the_worst_uncertainty_counts(
    four_ranks: Ranks,
) -> None:
    shifts = [0, SHIFT_NS, -3 * SHIFT_NS, 2 * SHIFT_NS]
    clocks = four_ranks.call(
        "tests.bench.world.test_world:calibrated_apart",
        boots=["a", "b", "c", "d"],
        shifts_ns=[shifts],
    )
    [shared] = four_ranks.call(
        "tests.bench.world.test_world:calibrated_apart",
        boots=["a", "b", "b", "c"],
        shifts_ns=[shifts],
    )[0]
    assert clocks == [clocks[0]] * 4
    for found_ns, shift_ns in zip(clocks[0][0].offsets_ns, shifts, strict=True):
        assert abs(found_ns - shift_ns) <= clocks[0][0].uncertainty_ns
    # ranks of one kernel have one clock, so that one of them answers for its host
    assert abs(shared.offsets_ns[1] - SHIFT_NS) <= shared.uncertainty_ns
    assert shared.offsets_ns[1] == shared.offsets_ns[2]


@pytest.mark.full
def test_a_correct_barrier_stays_right_however_far_hosts_have_drifted(two_ranks: Ranks) -> None:
    """Each case has a clock of its own time; the first one's uncertainty covers how far the clock has moved."""
    for drift_ns in (SHIFT_NS, -SHIFT_NS):
        (found, wrong), (nothing, other) = two_ranks.call(
            "tests.bench.world.test_world:barriers_on_drifting_clocks", drift_ns=drift_ns
        )
        assert (nothing, wrong, other) == ([], 0, 0)
        assert [status for status, _ in found] == ["ok", "ok"]
        assert found[0][1] >= 0.9 * SHIFT_NS / 1e9 > found[1][1], drift_ns


def test_clocks_of_hosts_are_found_anew_once_they_are_seconds_old_as_rank_0_decides(
    two_ranks: Ranks,
) -> None:
    for kept, old, new in two_ranks.call("tests.bench.world.test_world:retimed", age_seconds=1.0):
        assert (kept, new) == (True, old)
    first, second = two_ranks.call("tests.bench.world.test_world:retimed", age_seconds=6.0)
    assert (first[0], second[0]) == (False, False)
    assert first[2] == second[2]
    assert first[2].taken_ns - first[1].taken_ns > 6e9


class Wire(HeldTime):
    """A peer behind a wire, for rank 0's end of a ping-pong: each way of each round takes as long as is told."""

    def __init__(self, delays_ns: list[tuple[int, int]], offset_ns: int) -> None:
        super().__init__()
        self._delays, self._offset, self._back = iter(delays_ns), offset_ns, 0

    def send(self, stamp: torch.Tensor, **_: Any) -> None:
        there, self._back = next(self._delays)
        self.sleep_ns(there)
        stamp[0] = self.now_ns + self._offset

    def recv(self, stamp: torch.Tensor, **_: Any) -> None:
        self.sleep_ns(self._back)


def test_the_round_that_was_fastest_decides_and_half_of_it_covers_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ping_pong(delays_ns: list[tuple[int, int]], offset_ns: int) -> tuple[int, int]:
        wire = Wire(delays_ns, offset_ns)
        monkeypatch.setattr(clock, "time", wire)
        monkeypatch.setattr(clock, "dist", wire)
        monkeypatch.setattr(clock, "_ROUNDS", len(delays_ns))
        return clock._ping_pong(0, 1, cast(dist.ProcessGroup, None))

    # each round alone would say another offset; only the symmetric one is the fastest, and it is exact
    delays_ns = [(9000, 1000), (1000, 70_000), (500, 500), (600, 500), (100_000, 400)]
    assert ping_pong(delays_ns, -42_000) == (-42_000, 500)
    for there_ns in (0, 200, 1000, 1800, 2000):
        offset_ns, uncertainty_ns = ping_pong([(there_ns, 2000 - there_ns)], 123_456)
        assert uncertainty_ns == 1000
        assert abs(offset_ns - 123_456) == abs(there_ns - 1000) <= uncertainty_ns


def test_ranks_of_a_host_share_the_kernels_boot_id_and_without_one_no_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clock, "_BOOT_ID", tmp_path / "boot_id")
    assert clock._boot_id(0) != clock._boot_id(1)
    (tmp_path / "boot_id").write_text("11-22\n")
    assert clock._boot_id(0) == clock._boot_id(1) == "11-22"
