"""The first cause of a drawn step is the one that was drawn into it, whatever the ranks' clocks say."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kineto_files import RankFile

from bench.text import UserError
from reports.traces.causes import causes_of, step_seconds, waits_by_rank
from reports.traces.kineto import read_rank
from reports.traces.steps import Job, job_of

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
        sources.append(read_rank(file.write(folder)))
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


DRAWN: dict[str, Draw] = {
    "late rank": late,
    "slow rank": slow,
    "one bucket": one_bucket,
    "no prefetch": no_prefetch,
    "host-bound": host_bound,
    "copies": copies,
    "uneven stages": unbalanced,
}


@pytest.mark.parametrize("kind", DRAWN)
def test_the_first_cause_is_the_one_that_was_drawn(kind: str, tmp_path: Path) -> None:
    found = causes_of(job(tmp_path, DRAWN[kind]))
    assert found[0].kind == kind, [one.sentence for one in found]


def test_nothing_is_claimed_of_a_clean_step(tmp_path: Path) -> None:
    assert causes_of(job(tmp_path, clean)) == ()


def test_the_late_rank_is_found_on_hosts_whose_clocks_differ(tmp_path: Path) -> None:
    apart = job(tmp_path, late, hosts=True)
    [*_, note] = apart.notes
    assert note == "hosts' clocks are brought together by the ends of collectives, within 0 us"
    waits = waits_by_rank(apart)
    assert waits[2] == pytest.approx([2e-3] * 4)
    assert waits[0] == waits[1] == waits[3] == [0.0] * 4
    first = causes_of(apart)[0]
    assert first.sentence == (
        "rank 2 comes last to 100% of collectives; the others wait 2.00 ms a step for it:"
        " its host starts nothing for 2.00 ms longer than the others'"
    )


def test_a_collective_slower_than_the_runs_fit_is_a_slow_link(tmp_path: Path) -> None:
    found = job(tmp_path, one_bucket)
    assert step_seconds(found) == pytest.approx(10e-3)
    assert found.met[0].busbw == pytest.approx(1.5 * 128 * MB / 2497e-6)
    [first, *_] = causes_of(found, lambda met: met.transfer_ns / 1e9 / 2)
    assert first.kind == "slow link"
    assert first.evidence["won_seconds"] == pytest.approx(1.25e-3, rel=0.01)
    assert "2.00 times what this machine's fit says" in first.sentence
    assert causes_of(found, lambda met: met.transfer_ns / 1e9)[0].kind == "one bucket"


def queued(file: RankFile, rank: int, at: float) -> None:
    """Three all_reduces that are issued together and carried one after the other, each for 1 ms."""
    file.kernel(at + 10, at + 6000)
    for i in range(3):
        file.collective("allreduce", at + 6000 + i, at + 7000 + 1000 * i, 8 * MB, RANKS)


def test_what_a_collective_waits_behind_others_of_its_group_is_no_transfer(tmp_path: Path) -> None:
    found = job(tmp_path, queued, steps=1)
    assert [met.transfer_ns for met in found.met] == pytest.approx([1_000_000] * 3)


def test_two_files_of_one_rank_are_refused_and_missing_ranks_are_told(tmp_path: Path) -> None:
    sources = []
    for rank in (0, 1):
        file = RankFile(rank, 4)
        file.step(0, 0, 10_000)
        late(file, rank, 0)
        sources.append(read_rank(file.write(tmp_path)))
    assert "2 of 4 ranks are here" in job_of(sources).notes[0]
    with pytest.raises(UserError, match="are both of rank 0: give one job's traces"):
        job_of([sources[0], sources[0]])


def test_steps_that_not_all_ranks_traced_are_left_out(tmp_path: Path) -> None:
    """Rank 1's third step, which rank 0 has not, is slow; its others are where rank 0's are."""
    sources = []
    for rank, numbers in ((0, (1, 2)), (1, (2, 3)), (2, (8,))):
        file = RankFile(rank, 4)
        for number in numbers:
            at = 10_000.0 * number
            file.step(number, at, at + (10_000 if number < 3 else 50_000))
            late(file, 2 * rank, at)
        sources.append(read_rank(file.write(tmp_path)))
    found = job_of(sources[:2])
    assert found.notes[0] == "2 steps that not all ranks traced are left out"
    assert (found.steps, step_seconds(found)) == (1, pytest.approx(10e-3))
    assert waits_by_rank(found)[1] == pytest.approx([2e-3])
    with pytest.raises(UserError, match=r"no step in common \(rank 0: ProfilerStep#1 to ProfilerStep#2; .*rank 2"):
        job_of(sources)
