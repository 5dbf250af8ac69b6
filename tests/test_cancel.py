"""Cancelling ends the sweep's own living jobs, and no others."""

from pathlib import Path

import pytest
from sweeps import FakeSlurm, job, make_folder, make_sweep, point, queued

from bench.errors import UserError
from slurm.cancel import cancel

P = (point(0), point(1))


def test_only_its_own_living_jobs_are_cancelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, make_sweep(P), *(job(number, P) for number in ("7", "8", "9")))
    tasks = [queued("9", task=number, own=f"2{number}") for number in range(2)]
    slurm = FakeSlurm().set(waiting=[queued("7"), *tasks, queued("55"), queued("8888")])
    assert cancel(folder, slurm) == 0
    assert slurm.told == [("squeue",), ("scancel", "7", "9")]
    assert capsys.readouterr().out == "job 7: cancelled\njob 9: cancelled\n"


def test_where_nothing_lives_it_says_so_and_calls_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    assert cancel(folder, FakeSlurm().set(waiting=[queued("8")])) == 0
    assert capsys.readouterr().out == "no job of this sweep waits or runs\n"


def test_what_is_no_sweep_is_refused_before_slurm_is_asked(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with pytest.raises(UserError, match="is no sweep"):
        cancel(tmp_path, slurm)
    assert slurm.told == []


def test_a_slurm_that_does_not_answer_is_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    with pytest.raises(UserError, match="did not answer"):
        cancel(folder, FakeSlurm().set(down=True))
