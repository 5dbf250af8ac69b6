"""Submit, resume and cancel a sweep: batch scripts, limits of partitions, all jobs or none."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.cli import main
from parbench.slurm.job.state import SavedState, State, write_state
from parbench.slurm.sweep.expand import expand
from parbench.slurm.sweep.folder import Point, Sweep, load_jobs, load_sweep
from parbench.slurm.sweep.submit import (
    batches,
    cancel,
    fit_partition,
    freeze,
    resume,
    script_text,
    submit,
)
from parbench.slurm.sweep.sweepfile import read_sweep_file
from parbench.slurm.system import Partition, Slurm
from tests.support.refusals import usage_error
from tests.support.sweeps import (
    FakeSlurm,
    make_folder,
    make_job,
    make_point,
    make_sweep,
    queue_job,
)
from tests.support.trees import write_tool

TWO_POINTS = """
nodes = [2, 4]
budget = "6s"
[[case]]
name = "all_reduce"
set = { size_bytes = "64K" }
"""
THREE_JOBS = 'mode = "array"\n' + TWO_POINTS.replace("[2, 4]", "[2, 3, 4]")
LAB = Partition(name="lab", nodes=4, limit_seconds=3600, is_default=True)
BIG = Partition(name="big", nodes=128, limit_seconds=86400)


def make_slurm(**answers: Any) -> FakeSlurm:
    return FakeSlurm(partitions=(LAB, BIG), **answers)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TWO_POINTS)
    return path


def run_submit(file: Path, slurm: Slurm, *, dry_run: bool = False) -> int:
    return submit(
        file,
        ("parbench.bench.plan.catalogue",),
        dry_run=dry_run,
        wait=False,
        out=file.parent / "sweeps",
        slurm=slurm,
    )


def read_sweep(file: Path, **changes: object) -> Sweep:
    sweep_file = read_sweep_file(file)
    points, _ = expand(sweep_file, DEFINITIONS)
    return msgspec.structs.replace(freeze(sweep_file, file, points), **changes)


def test_submit_writes_and_records_one_job(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = make_slurm()
    assert run_submit(file, slurm) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    sweep = load_sweep(folder)
    assert sweep.name == "small"
    assert sweep.python == sys.executable
    assert sweep.working_directory == str(Path.cwd())
    [job] = load_jobs(folder)
    assert job.id == "101"
    assert job.points == tuple(point.id for point in sweep.points)
    script = folder / "scripts" / "sweep.sh"
    assert slurm.arguments_of("sbatch") == [(str(script),)]
    assert script.read_text().endswith(f"slurm work {folder}\n")
    output = capsys.readouterr().out
    assert f"{job.points[0]}  4 nodes x 1  16 s" in output
    assert "2 points in 1 job, about 32 s, 0.036 node-hours" in output
    assert f"parbench slurm status {folder}" in output


def test_submit_sends_an_array_for_each_number_of_nodes(file: Path) -> None:
    file.write_text(THREE_JOBS)
    assert run_submit(file, make_slurm()) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    points = load_sweep(folder).points
    jobs = load_jobs(folder)
    assert [job.id for job in jobs] == ["101", "102", "103"]
    assert [job.nodes for job in jobs] == [4, 3, 2]
    assert [job.points for job in jobs] == [(point.id,) for point in points]


def test_dry_run_submits_nothing_and_needs_no_slurm(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(file.parent))
    args = ["slurm", "submit", str(file), "--dry-run", "--out", str(file.parent / "sweeps")]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert "sinfo is not in the PATH" in result.output
    assert "#SBATCH --nodes=4" in result.output
    assert not (file.parent / "sweeps").exists()
    assert "sbatch is not in the PATH" in usage_error(run_submit, file, Slurm())


@pytest.mark.parametrize(
    ("refused_from", "cancelled", "message"),
    [
        ({"sbatch": 1}, [], "nothing was submitted"),
        ({"sbatch": 3}, [("101", "102")], "jobs 101 102 were cancelled"),
        ({"sbatch": 2, "scancel": 1}, [("101",)], "jobs 101 are submitted"),
    ],
)
def test_submit_sends_all_jobs_or_none(
    refused_from: dict[str, int], cancelled: list[tuple[str, ...]], message: str, file: Path
) -> None:
    file.write_text(THREE_JOBS)
    slurm = make_slurm(refused_from=refused_from)
    error = usage_error(run_submit, file, slurm)
    assert message in error
    assert "sbatch did not answer" in error
    assert slurm.arguments_of("scancel") == cancelled
    has_folder = any((file.parent / "sweeps").iterdir())
    assert has_folder == bool(cancelled), "a folder without jobs is removed"


def test_submit_cancels_jobs_at_an_interrupt(file: Path) -> None:
    file.write_text(THREE_JOBS)
    slurm = make_slurm(refused_from={"sbatch": 2}, refusal=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_submit(file, slurm)
    assert slurm.arguments_of("scancel") == [("101",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 8", "nodes(8) > 4, the nodes of partition lab"),
        ("nodes = 2\nslurm.partition = 'bog'", "did you mean 'big'?"),
        ("nodes = 2\nslurm.time = '2h'", "$.slurm.time(120 min) > 60 min"),
        ("nodes = 2\nexclude = [{ nodes = 2 }]", "$.exclude"),
    ],
)
def test_submit_refuses_what_cannot_run(text: str, message: str, file: Path) -> None:
    file.write_text(f"{text}\n[[case]]\nname = 'all_reduce'\n")
    slurm = make_slurm()
    error = usage_error(run_submit, file, slurm)
    assert error.startswith(f"sweep file {file}: ")
    assert message in error
    assert slurm.arguments_of("sbatch") == []
    assert not (file.parent / "sweeps").exists()


def test_job_longer_than_the_limit_is_cut_if_it_can_requeue(file: Path) -> None:
    file.write_text(f"repeat = 10\n{TWO_POINTS}")
    partitions = (replace(LAB, limit_seconds=180),)
    sweep, [note] = fit_partition(read_sweep(file), partitions)
    assert sweep.time_seconds == 180
    assert "8 min" in note
    assert "3 min" in note
    sweep = read_sweep(file, requeue=False)
    assert "allows 3 min" in usage_error(fit_partition, sweep, partitions)


def test_point_longer_than_the_limit_is_refused(file: Path) -> None:
    partitions = (replace(LAB, limit_seconds=15),)
    assert "allows 15 s" in usage_error(fit_partition, read_sweep(file), partitions)


POINTS = (
    make_point(0, nodes=4),
    make_point(1, nodes=4, ntasks_per_node=2),
    make_point(2),
    make_point(3, nodes=1, ntasks_per_node=2),
)


def build_script(folder: Path = Path("/shared/s"), **fields: Any) -> str:
    sweep = make_sweep(POINTS, **fields)
    return script_text(sweep, folder, batches(sweep)[0])


def test_script_of_one_allocation() -> None:
    script = build_script(
        name="my sweep",
        python="/v/bin/python",
        working_directory="/home/me",
        time_seconds=1800,
        prologue=("module load cuda", "source venv/bin/activate"),
        on_dead_node="go-on",
        partition="gpu",
        options={"account": "me", "exclusive": True},
    )
    assert (
        script
        == """#!/bin/bash
#SBATCH --job-name=my-sweep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --time=0:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/s/logs/%j.out
#SBATCH --chdir=/home/me
#SBATCH --no-kill
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --exclusive
ulimit -c 0
module load cuda
source venv/bin/activate
exec /v/bin/python -m parbench slurm work /shared/s
"""
    )


def test_script_quotes_values_for_sbatch() -> None:
    options = {"comment": 'a "b" # \\c'}
    script = build_script(Path("/a%jb"), options=options, working_directory="/my data")
    lines = script.splitlines()
    assert '#SBATCH --comment="a \\"b\\" # \\\\c"' in lines
    assert '#SBATCH --chdir="/my data"' in lines
    assert "#SBATCH --output=/a%%jb/logs/%j.out" in lines


def test_script_quotes_the_command_for_the_shell(tmp_path: Path) -> None:
    program = write_tool(tmp_path, "my python", 'printf "%s\\n" "$@" "$(ulimit -c)"')
    folder = tmp_path / "it's a $HOME; folder"
    script = build_script(folder, python=str(program))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "parbench", "slurm", "work", str(folder), "0"]


def test_point_keeps_its_array_index_when_it_is_resumed() -> None:
    sweep = make_sweep(POINTS, mode="array")
    assert [job.tasks for job in batches(sweep)] == [(0, 1), (2,), (3,)]
    [job] = batches(sweep, [POINTS[1]])
    assert job.tasks == (1,)


def submit_points(parent: Path, *states: State, **fields: Any) -> tuple[Path, list[Point]]:
    """Return the folder of a sweep whose job 7 left the first points in these states."""
    node_counts = (4, 2, 2, 1)
    points = [make_point(number, nodes=count) for number, count in enumerate(node_counts)]
    folder = make_folder(parent, make_sweep(points, **fields), make_job("7", points))
    for point, state in zip(points, states, strict=False):
        write_state(folder, point.id, SavedState(state=state, job="7", time="t"))
    return folder, points


def test_resume_submits_one_job_for_missing_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, points = submit_points(tmp_path, "done", "lost-node", "failed")
    assert resume(folder, FakeSlurm()) == 0
    job = load_jobs(folder)[-1]
    assert job.id == "101"
    assert job.nodes == 2
    assert job.points == (points[1].id, points[3].id)
    assert "#SBATCH --nodes=2\n" in (folder / "scripts" / f"{job.name}.sh").read_text()
    assert "2 of 4 points" in capsys.readouterr().out
    resume(folder, FakeSlurm())
    assert len({job.name for job in load_jobs(folder)}) == 3, "no script is overwritten"


@pytest.mark.parametrize("state", ["started", "interrupted", "postponed"])
def test_resume_repeats_states_that_are_not_final(state: State, tmp_path: Path) -> None:
    folder, points = submit_points(tmp_path, state, "done", "done", "done")
    resume(folder, FakeSlurm())
    assert load_jobs(folder)[-1].points == (points[0].id,)


@pytest.mark.parametrize(
    ("states", "slurm", "message"),
    [
        (("done", "done", "failed", "done"), FakeSlurm(), "nothing of"),
        ((), FakeSlurm(queued=[queue_job("7", "PENDING")]), "still wait or run (7)"),
        ((), FakeSlurm(is_down=True), "squeue did not answer"),
        ((), FakeSlurm(refused_from={"sbatch": 1}), "sbatch did not answer"),
    ],
)
def test_resume_refuses_and_changes_nothing(
    states: tuple[State, ...], slurm: FakeSlurm, message: str, tmp_path: Path
) -> None:
    folder, _ = submit_points(tmp_path, *states)
    content = (folder / "sweep.json").read_bytes()
    assert message in usage_error(resume, folder, slurm)
    assert (folder / "sweep.json").read_bytes() == content
    assert len(load_jobs(folder)) == 1


def test_cancel_ends_only_own_living_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [make_job(job_id, POINTS) for job_id in ("7", "8", "9")]
    folder = make_folder(tmp_path, make_sweep(POINTS), *jobs)
    slurm = FakeSlurm(
        queued=[queue_job("7"), queue_job("9", task_id="20"), queue_job("9", task_id="21")]
    )
    assert cancel(folder, slurm) == 0
    assert slurm.arguments_of("scancel") == [("7", "9")]
    assert capsys.readouterr().out == "job 7: cancelled\njob 9: cancelled\n"
    assert cancel(folder, FakeSlurm(queued=[queue_job("88")])) == 0
    assert "no job" in capsys.readouterr().out
