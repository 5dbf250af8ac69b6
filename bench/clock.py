"""One clock for all ranks: offsets of every rank's monotonic clock from rank 0's, with their uncertainty.

Ranks of one host read the same CLOCK_MONOTONIC, told by the kernel's boot id. Across hosts the offset is that of the
ping-pong with the least round trip (Cristian, 1989): half that round trip bounds the error.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 50


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Rank r's time on rank 0's clock is ``perf_counter_ns() - offsets_ns[r]``, right within ``uncertainty_ns``."""

    offsets_ns: tuple[int, ...]
    uncertainty_ns: int
    method: str


def calibrate(rank: int, size: int, control: dist.ProcessGroup) -> Clock:
    """Return the clock of a world; every rank takes part and gets the same."""
    boots: list[str | None] = [None] * size
    dist.all_gather_object(boots, _boot_id(rank), group=control)
    if len(set(boots)) == 1:
        return Clock(offsets_ns=(0,) * size, uncertainty_ns=0, method="one host, one monotonic clock")
    offsets, uncertainties = [0], [0]
    for peer in range(1, size):
        best = _ping_pong(rank, peer, control)
        offsets.append(best[0])
        uncertainties.append(best[1])
    shared = torch.tensor([offsets, uncertainties])
    dist.broadcast(shared, group=control, group_src=0)
    return Clock(
        offsets_ns=tuple(int(offset) for offset in shared[0]),
        uncertainty_ns=int(shared[1].max()),
        method=f"ping-pong with rank 0, least round trip of {_ROUNDS}",
    )


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
