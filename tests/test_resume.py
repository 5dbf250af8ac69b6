"""Resuming submits what is missing, in the sweep's form, and refuses where nothing is or something lives."""

from pathlib import Path
from typing import Any

import pytest
from sweeps import FakeSlurm, job, make_folder, make_sweep, point, queued

from bench.errors import UserError
from slurm.folder import load_jobs
from slurm.ledger import Ledger, State
from slurm.resume import resume

P = (point(0, nodes=4), point(1, nodes=2), point(2, nodes=2), point(3, nodes=1))


def sweep(tmp_path: Path, *states: State, **more: Any) -> Path:
    folder = make_folder(tmp_path, make_sweep(P, **more), job("7", P))
    with Ledger(folder, "7", "7") as ledger:
        for one, state in zip(P, states, strict=False):
            ledger.write(one.id, state)
    return folder


def test_one_job_more_as_large_as_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path, "done", "lost-node", "failed")
    assert resume(folder, FakeSlurm()) == 0
    jobs = load_jobs(folder)
    assert [(one.id, one.nodes, one.points) for one in jobs[1:]] == [("101", 2, (P[1].id, P[3].id))]
    script = (folder / "scripts" / f"{jobs[1].name}.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert f"slurm work {folder}\n" in script
    assert capsys.readouterr().out == (f"job 101: 2 of 4 points, on 2 nodes\nnext: parbench slurm status {folder}\n")


@pytest.mark.parametrize("state", ["started", "interrupted", "postponed", "lost-node"])
def test_what_is_not_final_is_missing(tmp_path: Path, state: State) -> None:
    folder = sweep(tmp_path, state, "done", "done", "done")
    resume(folder, FakeSlurm())
    assert load_jobs(folder)[1].points == (P[0].id,)


def test_an_array_keeps_its_form_and_the_points_their_numbers(tmp_path: Path) -> None:
    folder = sweep(tmp_path, "done", "done", mode="array")
    resume(folder, FakeSlurm())
    jobs = load_jobs(folder)[1:]
    assert [(one.array, one.nodes, one.points) for one in jobs] == [(True, 2, (P[2].id,)), (True, 1, (P[3].id,))]
    assert "#SBATCH --array=2\n" in (folder / "scripts" / f"{jobs[0].name}.sh").read_text()
    assert "#SBATCH --array=3\n" in (folder / "scripts" / f"{jobs[1].name}.sh").read_text()


def test_one_job_for_each_point(tmp_path: Path) -> None:
    folder = sweep(tmp_path, "done", "done", mode="each")
    resume(folder, FakeSlurm())
    assert [one.points for one in load_jobs(folder)[1:]] == [(P[2].id,), (P[3].id,)]


def test_a_second_resume_overwrites_no_script(tmp_path: Path) -> None:
    folder, slurm = sweep(tmp_path, "done"), FakeSlurm()
    resume(folder, slurm)
    resume(folder, slurm)
    assert len({one.name for one in load_jobs(folder)[1:]}) == 2


def test_nothing_missing_is_refused(tmp_path: Path) -> None:
    folder, slurm = sweep(tmp_path, "done", "done", "failed", "done"), FakeSlurm()
    with pytest.raises(UserError, match=r"nothing of .* is missing: its 4 points are done or failed"):
        resume(folder, slurm)
    assert not any(words[0] == "sbatch" for words in slurm.told)


def test_living_jobs_are_named(tmp_path: Path) -> None:
    folder, slurm = sweep(tmp_path, "done"), FakeSlurm().set(waiting=[queued("7", "PENDING")])
    with pytest.raises(UserError, match=r"still wait or run \(7\): let them end, or cancel them"):
        resume(folder, slurm)
    assert len(load_jobs(folder)) == 1


def test_doubt_is_no_leave(tmp_path: Path) -> None:
    folder = sweep(tmp_path, "done")
    with pytest.raises(UserError, match=r"cannot be told: squeue did not answer"):
        resume(folder, FakeSlurm().set(down=True))


def test_a_refused_job_leaves_the_sweep_as_it_was(tmp_path: Path) -> None:
    """Unlike a new sweep's folder, this one holds what was measured."""
    folder, slurm = sweep(tmp_path, "done"), FakeSlurm()
    before = (folder / "sweep.json").read_bytes()
    slurm.set(on_call=lambda words: slurm.set(down=words[0] == "sbatch"))
    with pytest.raises(UserError, match="sbatch did not answer"):
        resume(folder, slurm)
    assert (folder / "sweep.json").read_bytes() == before
    assert len(load_jobs(folder)) == 1
