"""Synthetic traces of a job whose steps of 10 ms have one fault, or none."""

from collections.abc import Callable
from pathlib import Path

from parbench.reports.traces.job import TracedJob, join_ranks
from parbench.reports.traces.rank_trace import read_rank
from tests.support.reports.kineto_files import RankFile

MB = 1 << 20
RANKS = (0, 1, 2, 3)
CLOCK_OFFSETS_US = (0.0, 7000.0, -2500.0, 400.0)
Draw = Callable[[RankFile, int, float], None]
"""Adds the events of a step, from the rank and the start of the step in us."""


def make_job(folder: Path, draw: Draw, *, steps: int = 4, num_hosts: int = 1) -> TracedJob:
    """Return a job of four ranks on one host, or on four hosts with different clocks."""
    sources = []
    for rank in RANKS:
        file = RankFile(rank, len(RANKS), host=f"node{rank % num_hosts}")
        for number in range(steps):
            start = 10_000.0 * number
            if num_hosts > 1:
                start += CLOCK_OFFSETS_US[rank]
            file.step(number, start, start + 10_000)
            draw(file, rank, start)
        sources.append(read_rank(file.write(folder)))
    return join_ranks(sources)


def draw_clean(file: RankFile, rank: int, start: float) -> None:
    """Hide two all_reduces behind computation, except 100 us at the end."""
    file.kernel(start + 10, start + 9890)
    file.collective("allreduce", start + 3000 + rank, start + 5000, 8 * MB)
    file.collective("allreduce", start + 8000 + rank, start + 9990, 8 * MB)


def draw_late_rank(file: RankFile, rank: int, start: float) -> None:
    begin = start + (2000 if rank == 2 else 0)
    file.kernel(begin + 10, begin + 6000)
    file.collective("allreduce", begin + 6000, start + 9000, 8 * MB)
    file.kernel(start + 9000, start + 10_000)


def draw_slow_rank(file: RankFile, rank: int, start: float) -> None:
    computed = start + (8000 if rank == 1 else 6000)
    file.kernel(start + 10, computed)
    file.collective("allreduce", computed, start + 9000, 8 * MB)
    file.kernel(start + 9000, start + 10_000)


def draw_one_bucket(file: RankFile, rank: int, start: float) -> None:
    file.kernel(start + 10, start + 7000)
    file.collective("allreduce", start + 7000 + rank, start + 9500, 32 * MB)
    file.kernel(start + 9500, start + 10_000)


def draw_no_prefetch(file: RankFile, rank: int, start: float) -> None:
    for layer in range(5):
        begin = start + 2000 * layer
        file.collective("_allgather_base", begin + rank, begin + 800, 8 * MB)
        file.kernel(begin + 800, begin + 2000)


def draw_host_bound(file: RankFile, rank: int, start: float) -> None:
    for number in range(20):
        file.kernel(start + 500 * number, start + 500 * number + 350)
    file.collective("allreduce", start + 4000 + rank, start + 4200, MB)


def draw_copies(file: RankFile, rank: int, start: float) -> None:
    name = "Memcpy HtoD (Pageable -> Device)"
    file.event("gpu_memcpy", name, start + 10, start + 2000, 7)
    file.kernel(start + 2000, start + 9990)


def draw_ring(file: RankFile, rank: int, start: float) -> None:
    """Pass data to the next rank, as ring attention does, from ranks with unequal work."""
    computed = start + (8000 if rank == 3 else 5000)
    file.kernel(start + 10, computed)
    file.collective("send", computed, start + 9800, MB, group="mesh_cp")


def draw_uneven_stages(file: RankFile, rank: int, start: float) -> None:
    computed = start + (9000 if rank == 3 else 5000)
    file.kernel(start + 10, computed)
    file.collective("send", computed, start + 9800, MB, group="mesh_pp")


FAULTS: dict[str, Draw] = {
    "late-rank": draw_late_rank,
    "slow-rank": draw_slow_rank,
    "one-bucket": draw_one_bucket,
    "no-prefetch": draw_no_prefetch,
    "host-bound": draw_host_bound,
    "exposed-copies": draw_copies,
    "uneven-stages": draw_uneven_stages,
}
