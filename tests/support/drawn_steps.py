"""Drawn traces of a job whose steps of 10 ms have one fault, or none."""

from collections.abc import Callable
from pathlib import Path

from parbench.reports.traces.steps import Job, job_of, read_steps
from tests.support.kineto_files import RankFile

MB = 1 << 20
Draw = Callable[[RankFile, int, float], None]
RANKS = (0, 1, 2, 3)
CLOCKS = (0.0, 7000.0, -2500.0, 400.0)  # us by which a host's clock is ahead of the first one's


def job(folder: Path, draw: Draw, *, hosts: bool = False, steps: int = 4) -> Job:
    """Return the job of four ranks whose steps of 10 ms ``draw`` draws, on one host or on four with their clocks."""
    sources = []
    for rank in RANKS:
        file = RankFile(rank, len(RANKS), host=f"node{rank}" if hosts else "node0")
        for step in range(steps):
            at = 10_000.0 * step + (CLOCKS[rank] if hosts else 0.0)
            file.step(step, at, at + 10_000)
            draw(file, rank, at)
        sources.append(read_steps(file.write(folder)))
    return job_of(sources)


def clean(file: RankFile, rank: int, at: float) -> None:
    """Two all_reduces behind computing, of which 100 us at the end are not hidden."""
    file.kernel(at + 10, at + 9890)
    file.collective("allreduce", at + 3000 + rank, at + 5000, 8 * MB, RANKS)
    file.collective("allreduce", at + 8000 + rank, at + 9990, 8 * MB, RANKS)


def late(file: RankFile, rank: int, at: float) -> None:
    begin = 2000 if rank == 2 else 0
    file.kernel(at + begin + 10, at + begin + 6000)
    file.collective("allreduce", at + begin + 6000, at + 9000, 8 * MB, RANKS)
    file.kernel(at + 9000, at + 10_000)


def slow(file: RankFile, rank: int, at: float) -> None:
    done = at + (8000 if rank == 1 else 6000)
    file.kernel(at + 10, done)
    file.collective("allreduce", done, at + 9000, 8 * MB, RANKS)
    file.kernel(at + 9000, at + 10_000)


def one_bucket(file: RankFile, rank: int, at: float) -> None:
    file.kernel(at + 10, at + 7000)
    file.collective("allreduce", at + 7000 + rank, at + 9500, 32 * MB, RANKS)
    file.kernel(at + 9500, at + 10_000)


def no_prefetch(file: RankFile, rank: int, at: float) -> None:
    for layer in range(5):
        begin = at + 2000 * layer
        file.collective("_allgather_base", begin + rank, begin + 800, 8 * MB, RANKS)
        file.kernel(begin + 800, begin + 2000)


def host_bound(file: RankFile, rank: int, at: float) -> None:
    for kernel in range(20):
        file.kernel(at + 500 * kernel, at + 500 * kernel + 350)
    file.collective("allreduce", at + 4000 + rank, at + 4200, MB, RANKS)


def copies(file: RankFile, rank: int, at: float) -> None:
    file.event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 10, at + 2000, 7, stream=7)
    file.kernel(at + 2000, at + 9990)


def unbalanced(file: RankFile, rank: int, at: float) -> None:
    done = at + (9000 if rank == 3 else 5000)
    file.kernel(at + 10, done)
    file.collective("send", done, at + 9800, MB, RANKS)


def queued(file: RankFile, rank: int, at: float) -> None:
    """Three all_reduces that are issued together and carried one after the other, each for 1 ms."""
    file.kernel(at + 10, at + 6000)
    for i in range(3):
        file.collective("allreduce", at + 6000 + i, at + 7000 + 1000 * i, 8 * MB, RANKS)


DRAWN: dict[str, Draw] = {
    "late rank": late,
    "slow rank": slow,
    "one bucket": one_bucket,
    "no prefetch": no_prefetch,
    "host-bound": host_bound,
    "copies": copies,
    "uneven stages": unbalanced,
}
