"""Clocks of one host are one; those of others are found by ping-pong, within the uncertainty it states."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench import clock
from bench.clock import Clock, calibrate
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
        clocks = ranks.call("test_clock:calibrated_apart", boots=["a", "b", "b"], shifts_ns=shifts_ns)
    assert clocks[0] == clocks[1] == clocks[2]
    for found_ns, shift_ns in zip(clocks[0].offsets_ns, shifts_ns, strict=True):
        assert abs(found_ns - shift_ns) <= clocks[0].uncertainty_ns


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
