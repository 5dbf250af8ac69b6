"""One clock for all ranks: offsets of every rank's monotonic clock from rank 0's, with their uncertainty.

Ranks of one host read the same CLOCK_MONOTONIC, told by the kernel's boot id. Across hosts the offset is that of the
ping-pong with the least round trip (Cristian, 1989): half that round trip bounds the error. Clocks of different hosts
drift apart, some microseconds a second, so that what was found holds for seconds only.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 50
_ONE_HOST = "one host, one monotonic clock"
_STALE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Rank r's time on rank 0's clock is ``perf_counter_ns() - offsets_ns[r]``, right within ``uncertainty_ns``.

    ``taken_ns`` is when it was found, on rank 0's clock; 0 on one host, whose clock holds for ever.
    """

    offsets_ns: tuple[int, ...]
    uncertainty_ns: int
    method: str
    taken_ns: int = 0

    @property
    def drifts(self) -> bool:
        """Whether the ranks' clocks are those of several hosts."""
        return self.method != _ONE_HOST

    def stale(self) -> bool:
        """Say, on rank 0, whether clocks may have drifted since."""
        return self.drifts and time.perf_counter_ns() - self.taken_ns > _STALE_SECONDS * 1e9


def calibrate(rank: int, size: int, control: dist.ProcessGroup) -> Clock:
    """Return the clock of a world; every rank takes part and gets the same."""
    boots: list[str | None] = [None] * size
    dist.all_gather_object(boots, _boot_id(rank), group=control)
    if len(set(boots)) == 1:
        return Clock(offsets_ns=(0,) * size, uncertainty_ns=0, method=_ONE_HOST)
    found = [(0, 0)]
    for peer in range(1, size):
        first = boots.index(boots[peer])
        found.append(_ping_pong(rank, peer, control) if first == peer else found[first])
    shared = torch.tensor([*found, (time.perf_counter_ns(), 0)])
    dist.broadcast(shared, group=control, group_src=0)
    return Clock(
        offsets_ns=tuple(int(offset) for offset in shared[:size, 0]),
        uncertainty_ns=int(shared[:size, 1].max()),
        method=f"ping-pong with rank 0, least round trip of {_ROUNDS}",
        taken_ns=int(shared[size, 0]),
    )


def recalibrate(last: Clock, rank: int, size: int, control: dist.ProcessGroup) -> Clock:
    """Return the clock found anew, as uncertain as it has moved since the ``last``, for it will move on; collective."""
    fresh = calibrate(rank, size, control)
    moved = max(abs(now - then) for now, then in zip(fresh.offsets_ns, last.offsets_ns, strict=True))
    return replace(fresh, uncertainty_ns=fresh.uncertainty_ns + moved)


def _boot_id(rank: int) -> str:
    """Return what ranks that share a clock have in common; without a boot id, nothing is shared."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"rank {rank}"


def _ping_pong(rank: int, peer: int, control: dist.ProcessGroup) -> tuple[int, int]:
    """Return, on rank 0, the peer's offset and half the least round trip, in ns; zeros on other ranks."""
    stamp = torch.zeros(1, dtype=torch.int64)
    rounds = []
    for _ in range(_ROUNDS):
        if rank == 0:
            sent = time.perf_counter_ns()
            dist.send(stamp, group=control, group_dst=peer)
            dist.recv(stamp, group=control, group_src=peer)
            back = time.perf_counter_ns()
            rounds.append((back - sent, int(stamp) - (sent + back) // 2))
        elif rank == peer:
            dist.recv(stamp, group=control, group_src=0)
            stamp[0] = time.perf_counter_ns()
            dist.send(stamp, group=control, group_dst=0)
    round_trip, offset = min(rounds, default=(0, 0))
    return offset, round_trip // 2
