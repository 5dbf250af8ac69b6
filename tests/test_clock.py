"""Clocks of one host are one; those of others are found by ping-pong, within the uncertainty it states, ever anew."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fakes import job
from ranks import Ranks

from bench import clock, collectives
from bench.cases import make_case
from bench.clock import Clock, calibrate, recalibrate
from bench.collectives import Barrier
from bench.messages import Finished
from bench.progress import Progress
from bench.worker import _cases
from bench.world import World

pytestmark = pytest.mark.measures

SHIFT_NS = 5_000_000


def calibrated(world: World) -> Clock:
    return calibrate(world.rank, world.size, world.control)


def calibrated_apart(world: World, boots: list[str], shifts_ns: list[int]) -> Clock:
    """Calibrate ranks whose kernels have these boot ids, and whose clocks are ahead of the real one by so much."""
    shift = shifts_ns[world.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_boot_id", lambda rank: boots[rank])
        patch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + shift))
        return calibrate(world.rank, world.size, world.control)


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


def barriers_on_drifting_clocks(world: World, drift_ns: int) -> list[tuple[str, float]]:
    """Return status and clock's uncertainty of two barriers, seen after rank 1's clock has run ahead, on rank 0."""
    ahead_ns, said = [0], list[Any]()
    cases = [make_case("collective.barrier", "bench.collectives:barrier", {"number": number}) for number in range(2)]
    with drifting(world, lambda: ahead_ns[0]) as apart, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "barrier", lambda world, number: Barrier(world))
        ahead_ns[0] = drift_ns
        _cases(cast(Any, SimpleNamespace(say=said.append)), job(cases), apart, Progress())
    outcomes = [what.outcome for what in said if isinstance(what, Finished)]
    return [(found.status, found.arrival.uncertainty if found.arrival else 0.0) for found in outcomes]


def a_barrier_that_outlasts_its_clock(world: World, drift_ns: int) -> int:
    """Return whether a barrier looks wrong that was prepared before rank 1's clock ran ahead."""
    ahead_ns = [0]
    with drifting(world, lambda: ahead_ns[0]) as apart:
        subject = Barrier(apart)
        ahead_ns[0] = drift_ns
        subject.step()
        return subject.check()


def retimed(world: World, age_seconds: float) -> tuple[bool, Clock, Clock]:
    """Return whether a world of two hosts keeps its clock at an age, that clock, and the one it has then."""
    with drifting(world, lambda: 0) as apart, pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_STALE_SECONDS", 5.0)
        taken_ns = apart.clock.taken_ns - int(age_seconds * 1e9) if world.rank == 0 else 0
        old = replace(apart, clock=replace(apart.clock, taken_ns=taken_ns))
        new = old.retimed()
        return new is old, old.clock, new.clock


def retimed_on_one_host(world: World) -> bool:
    def decide(self: World, values: object) -> list[float]:
        raise AssertionError("one clock needs no decision")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "decide", decide)
        return world.retimed() is world


def moved(world: World, shifts_ns: list[int]) -> Clock:
    """Recalibrate where rank 1's clock was taken to be so much ahead, and is not."""
    last = Clock(offsets_ns=tuple(shifts_ns), uncertainty_ns=77, method="of another time")
    with drifting(world, lambda: 0):
        return recalibrate(last, world.rank, world.size, world.control)


def stamps_around_a_barrier(world: World) -> tuple[int, int]:
    """Return this rank's own clock before and after all ranks met."""
    before = time.perf_counter_ns()
    dist.barrier(group=world.control)
    return before, time.perf_counter_ns()


def test_ranks_of_one_host_share_a_clock_and_say_so(two_ranks: Ranks) -> None:
    expected = Clock(offsets_ns=(0, 0), uncertainty_ns=0, method="one host, one monotonic clock")
    assert two_ranks.call("test_clock:calibrated") == [expected, expected]


def test_processes_of_one_host_really_read_the_same_clock(two_ranks: Ranks) -> None:
    """Nobody leaves a barrier before all have come: with clocks apart, some rank would seem to."""
    stamps = two_ranks.call("test_clock:stamps_around_a_barrier")
    assert max(before for before, _ in stamps) < min(after for _, after in stamps)


def test_ping_pong_between_hosts_finds_a_clock_that_is_not_shifted(two_ranks: Ranks) -> None:
    """The true offset is 0, since both clocks are really one."""
    first, second = two_ranks.call("test_clock:calibrated_apart", boots=["a", "b"], shifts_ns=[0, 0])
    assert first == second
    assert first.offsets_ns[0] == 0
    assert abs(first.offsets_ns[1]) <= first.uncertainty_ns < 1_000_000
    assert first.method == "ping-pong with rank 0, least round trip of 50"


@pytest.mark.parametrize("shifts_ns", [[0, SHIFT_NS], [0, -SHIFT_NS], [SHIFT_NS, 0], [SHIFT_NS, -(10**15)]])
def test_a_shifted_clock_is_found_within_the_uncertainty(two_ranks: Ranks, shifts_ns: list[int]) -> None:
    found, _ = two_ranks.call("test_clock:calibrated_apart", boots=["a", "b"], shifts_ns=shifts_ns)
    true_offset = shifts_ns[1] - shifts_ns[0]
    assert abs(found.offsets_ns[1] - true_offset) <= found.uncertainty_ns < 1_000_000


@pytest.mark.slow
def test_every_rank_has_an_offset_of_its_own_and_the_worst_uncertainty_counts() -> None:
    shifts_ns = [0, SHIFT_NS, -3 * SHIFT_NS]
    with Ranks(3) as ranks:
        clocks = ranks.call("test_clock:calibrated_apart", boots=["a", "b", "c"], shifts_ns=shifts_ns)
        shared = ranks.call("test_clock:calibrated_apart", boots=["a", "b", "b"], shifts_ns=shifts_ns)[0]
    assert clocks[0] == clocks[1] == clocks[2]
    for found_ns, shift_ns in zip(clocks[0].offsets_ns, shifts_ns, strict=True):
        assert abs(found_ns - shift_ns) <= clocks[0].uncertainty_ns
    # ranks of one kernel have one clock, so that one of them answers for its host
    assert abs(shared.offsets_ns[1] - SHIFT_NS) <= shared.uncertainty_ns
    assert shared.offsets_ns[1] == shared.offsets_ns[2]


@pytest.mark.parametrize("drift_ns", [SHIFT_NS, -SHIFT_NS])
def test_a_correct_barrier_stays_right_however_far_hosts_have_drifted(two_ranks: Ranks, drift_ns: int) -> None:
    """Each case has a clock of its own time; the first one's uncertainty covers how far the clock has moved."""
    found, nothing = two_ranks.call("test_clock:barriers_on_drifting_clocks", drift_ns=drift_ns)
    assert nothing == []
    assert [status for status, _ in found] == ["ok", "ok"]
    assert found[0][1] >= 0.9 * SHIFT_NS / 1e9
    assert found[1][1] < 0.5 * SHIFT_NS / 1e9


@pytest.mark.parametrize("drift_ns", [SHIFT_NS, -SHIFT_NS])
def test_a_barrier_that_outlasts_its_clock_is_checked_on_a_new_one(two_ranks: Ranks, drift_ns: int) -> None:
    assert two_ranks.call("test_clock:a_barrier_that_outlasts_its_clock", drift_ns=drift_ns) == [0, 0]


def test_clocks_of_hosts_are_found_anew_once_they_are_seconds_old_as_rank_0_decides(two_ranks: Ranks) -> None:
    for kept, old, new in two_ranks.call("test_clock:retimed", age_seconds=1.0):
        assert kept
        assert new == old
    first, second = two_ranks.call("test_clock:retimed", age_seconds=6.0)
    assert (first[0], second[0]) == (False, False)
    assert first[2] == second[2]
    assert first[2].taken_ns - first[1].taken_ns > 6e9


def test_one_host_has_no_clock_to_find_anew(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_clock:retimed_on_one_host") == [True, True]


def test_how_far_a_clock_has_moved_widens_its_uncertainty(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_clock:moved", shifts_ns=[0, SHIFT_NS])
    assert first == second
    assert abs(first.uncertainty_ns - SHIFT_NS) < 1_000_000
    assert abs(first.offsets_ns[1]) < 1_000_000


class Wire:
    """A peer behind a wire, for rank 0's end of a ping-pong: each way of each round takes as long as is told."""

    def __init__(self, delays_ns: list[tuple[int, int]], offset_ns: int) -> None:
        self.now = 1_000_000
        self._delays = iter(delays_ns)
        self._offset = offset_ns
        self._back = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def send(self, stamp: torch.Tensor, **_: Any) -> None:
        there, self._back = next(self._delays)
        self.now += there
        stamp[0] = self.now + self._offset

    def recv(self, stamp: torch.Tensor, **_: Any) -> None:
        self.now += self._back


def ping_pong(monkeypatch: pytest.MonkeyPatch, delays_ns: list[tuple[int, int]], offset_ns: int) -> tuple[int, int]:
    wire = Wire(delays_ns, offset_ns)
    monkeypatch.setattr(clock, "time", wire)
    monkeypatch.setattr(clock, "dist", wire)
    monkeypatch.setattr(clock, "_ROUNDS", len(delays_ns))
    return clock._ping_pong(0, 1, cast(dist.ProcessGroup, None))


def test_the_round_that_was_fastest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round alone would say another offset; only the symmetric one is the fastest, and it is exact."""
    delays_ns = [(9000, 1000), (1000, 70_000), (500, 500), (600, 500), (100_000, 400)]
    assert ping_pong(monkeypatch, delays_ns, offset_ns=-42_000) == (-42_000, 500)


@pytest.mark.parametrize("there_ns", [0, 200, 1000, 1800, 2000])
def test_however_uneven_the_ways_are_the_uncertainty_covers_the_error(
    monkeypatch: pytest.MonkeyPatch, there_ns: int
) -> None:
    offset_ns, uncertainty_ns = ping_pong(monkeypatch, [(there_ns, 2000 - there_ns)], offset_ns=123_456)
    assert uncertainty_ns == 1000
    assert abs(offset_ns - 123_456) == abs(there_ns - 1000) <= uncertainty_ns


def test_the_kernels_boot_id_is_what_ranks_of_a_host_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "boot_id"
    file.write_text("11-22\n")
    monkeypatch.setattr(clock, "_BOOT_ID", file)
    assert clock._boot_id(0) == clock._boot_id(1) == "11-22"


def test_without_a_boot_id_no_two_ranks_are_taken_for_one_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clock, "_BOOT_ID", tmp_path / "absent")
    assert clock._boot_id(0) != clock._boot_id(1)
