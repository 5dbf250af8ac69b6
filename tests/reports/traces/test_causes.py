"""The first cause of a drawn step is the one that was drawn into it, whatever the ranks' clocks say."""

from pathlib import Path

import pytest

from parbench.bench.text import UserError
from parbench.reports.traces.causes import causes_of, step_seconds, waits_by_rank
from parbench.reports.traces.steps import job_of, read_steps
from tests.support.drawn_steps import DRAWN, MB, clean, job, late, one_bucket, queued
from tests.support.kineto_files import RankFile


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
    assert found.shared[0].busbw == pytest.approx(1.5 * 128 * MB / 2497e-6)
    [first, *_] = causes_of(found, lambda call: call.transfer_ns / 1e9 / 2)
    assert first.kind == "slow link"
    assert first.evidence["won_seconds"] == pytest.approx(1.25e-3, rel=0.01)
    assert "2.00 times what this machine's fit says" in first.sentence
    assert causes_of(found, lambda call: call.transfer_ns / 1e9)[0].kind == "one bucket"


def test_what_a_collective_waits_behind_others_of_its_group_is_no_transfer(tmp_path: Path) -> None:
    found = job(tmp_path, queued, steps=1)
    assert [call.transfer_ns for call in found.shared] == pytest.approx([1_000_000] * 3)


def test_two_files_of_one_rank_are_refused_and_missing_ranks_are_told(tmp_path: Path) -> None:
    sources = []
    for rank in (0, 1):
        file = RankFile(rank, 4)
        file.step(0, 0, 10_000)
        late(file, rank, 0)
        sources.append(read_steps(file.write(tmp_path)))
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
        sources.append(read_steps(file.write(tmp_path)))
    found = job_of(sources[:2])
    assert found.notes[0] == "2 steps that not all ranks traced are left out"
    assert found.steps == 1
    assert step_seconds(found) == pytest.approx(10e-3)
    assert waits_by_rank(found)[1] == pytest.approx([2e-3])
    with pytest.raises(
        UserError, match=r"no step in common \(rank 0: ProfilerStep#1 to ProfilerStep#2; .*rank 2"
    ):
        job_of(sources)


def test_pythons_own_time_between_a_hosts_operators_is_no_cause(tmp_path: Path) -> None:
    for apart, found in ((350, []), (4000, ["host-bound"])):
        file = RankFile(0, 1)
        file.step(1, 0, 40 * apart)
        for one in range(40):
            file.event("cpu_op", "aten::mm", apart * one, apart * (one + 0.7))
        file.events = [event for event in file.events if event["cat"] != "gpu_user_annotation"]
        causes = causes_of(job_of([read_steps(file.write(tmp_path))]))
        assert [one.kind for one in causes] == found, apart
