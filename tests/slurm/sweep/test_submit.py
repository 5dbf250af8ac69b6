"""Submit, resume and cancel a sweep: batch scripts, limits of partitions, all jobs or none."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.cli import main
from parbench.slurm.sweep.batch import build_batches, format_script
from parbench.slurm.sweep.folder import Point, load_jobs, load_sweep
from parbench.slurm.sweep.submit import cancel, resume, submit
from parbench.slurm.system import QueuedJob, Slurm
from tests.support.fakes import make_fake_case
from tests.support.paths import run_command
from tests.support.refusals import usage_error
from tests.support.reports.reports_fixtures import failed_record, ok_record
from tests.support.slurm.sweeps import (
    FakeSlurm,
    make_folder,
    make_job,
    make_point,
    make_sweep,
    queue_job,
    write_run,
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


def test_submit_writes_and_records_one_job(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm()
    assert run_submit(file, slurm) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    sweep = load_sweep(folder)
    assert sweep.name == "small"
    assert sweep.python == sys.executable
    assert sweep.working_directory == str(Path.cwd())
    [job] = load_jobs(folder)
    assert job.id == "101"
    assert job.points == tuple(point.id for point in sweep.points)
    script = folder / "jobs" / "0000" / "sweep.sh"
    assert slurm.arguments_of("sbatch") == [(str(script),)]
    assert script.read_text().endswith(f"slurm work {folder}\n")
    output = capsys.readouterr().out
    assert f"{job.points[0]}  4 nodes x 1  16 s" in output
    assert "2 points, about 32 s, 0.036 node-hours" in output
    assert f"parbench slurm status {folder}" in output


def test_submit_sends_an_array_for_each_number_of_nodes(file: Path) -> None:
    file.write_text(THREE_JOBS)
    assert run_submit(file, FakeSlurm()) == 0
    [folder] = (file.parent / "sweeps").iterdir()
    points = load_sweep(folder).points
    jobs = load_jobs(folder)
    assert {job.nodes: job.id for job in jobs} == {4: "101", 3: "102", 2: "103"}
    assert {job.nodes: job.points for job in jobs} == {
        point.nodes: (point.id,) for point in points
    }


def test_dry_run_submits_nothing_and_needs_no_slurm(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(file.parent))
    args = ["slurm", "submit", str(file), "--dry-run", "--out", str(file.parent / "sweeps")]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert "#SBATCH --nodes=4" in result.output
    assert not (file.parent / "sweeps").exists()
    error = usage_error(run_submit, file, Slurm())
    assert "sbatch cannot be started (No such file or directory)" in error
    assert not any((file.parent / "sweeps").iterdir())


@pytest.mark.parametrize(
    ("refused_from", "cancelled", "message"),
    [
        ({"sbatch": 1}, [], "nothing was submitted, unless squeue --me shows a new job"),
        ({"sbatch": 3}, [("101", "102")], "jobs 101 102 were cancelled"),
        ({"sbatch": 2, "scancel": 1}, [("101",)], "jobs 101 are submitted"),
    ],
)
def test_submit_sends_all_jobs_or_none(
    refused_from: dict[str, int], cancelled: list[tuple[str, ...]], message: str, file: Path
) -> None:
    file.write_text(THREE_JOBS)
    slurm = FakeSlurm(refused_from=refused_from)
    error = usage_error(run_submit, file, slurm)
    assert message in error
    assert "did not answer" in error
    assert slurm.arguments_of("scancel") == cancelled
    has_folder = any((file.parent / "sweeps").iterdir())
    assert has_folder == bool(cancelled), "a folder without jobs is removed"


def test_submit_cancels_jobs_at_an_interrupt(file: Path) -> None:
    file.write_text(THREE_JOBS)
    slurm = FakeSlurm(refused_from={"sbatch": 2}, refusal=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_submit(file, slurm)
    assert slurm.arguments_of("scancel") == [("101",)]


def test_interrupt_waits_for_the_id_of_the_job(file: Path) -> None:
    """A Ctrl-C reaches parbench and sbatch, while Slurm may already have accepted the job."""
    write_tool(file.parent, "sbatch", "kill -s INT -- -$PPID; sleep 0.2; echo 17")
    write_tool(file.parent, "scancel", f"echo $* > {file.parent}/cancelled")
    result = run_command(
        ["setsid", sys.executable, "-m", "parbench", "slurm", "submit", str(file)],
        file.parent,
        {"PATH": f"{file.parent}:{os.environ['PATH']}"},
    )
    assert "interrupted: nothing is left submitted: jobs 17 were cancelled" in result.stderr
    assert (file.parent / "cancelled").read_text() == "17\n"


POINTS = (
    make_point(0, nodes=4),
    make_point(1, nodes=4, ntasks_per_node=2),
    make_point(2),
    make_point(3, nodes=1, ntasks_per_node=2),
)


SCRIPT = r"""#!/bin/bash
#SBATCH --job-name=my-sweep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --time=0:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/50%%/logs/%j.out
#SBATCH --chdir=/
#SBATCH --no-kill
#SBATCH --partition=gpu
#SBATCH --comment="a \"b\" # \\c"
#SBATCH --exclusive
ulimit -c 0
module load cuda
source venv/bin/activate
exec python -m parbench slurm work /shared/50%
"""


def test_script_of_one_allocation() -> None:
    sweep = make_sweep(
        POINTS,
        name="my sweep",
        prologue=("module load cuda", "source venv/bin/activate"),
        slurm={
            "time": "30m",
            "on_dead_node": "go-on",
            "partition": "gpu",
            "options": {"comment": 'a "b" # \\c', "exclusive": True},
        },
    )
    script = format_script(sweep, Path("/shared/50%"), build_batches(sweep, POINTS)[0])
    assert script == SCRIPT


def test_script_quotes_the_command_for_the_shell(tmp_path: Path) -> None:
    program = write_tool(tmp_path, "my python", 'printf "%s\\n" "$@" "$(ulimit -c)"')
    folder = tmp_path / "it's a $HOME; folder"
    sweep = msgspec.structs.replace(make_sweep(POINTS), python=str(program))
    script = format_script(sweep, folder, build_batches(sweep, POINTS)[0])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "parbench", "slurm", "work", str(folder), "0"]


def test_point_keeps_its_array_index_when_it_is_resumed() -> None:
    sweep = make_sweep(POINTS, mode="array")
    assert [job.tasks for job in build_batches(sweep, POINTS)] == [(0, 1), (2,), (3,)]
    [job] = build_batches(sweep, [POINTS[1]])
    assert job.tasks == (1,)


def submit_points(parent: Path, num_complete: int, **fields: Any) -> tuple[Path, list[Point]]:
    """Return the folder of a sweep whose job 7 has completed its first points."""
    node_counts = (4, 2, 2, 1)
    points = [make_point(number, nodes=count) for number, count in enumerate(node_counts)]
    folder = make_folder(parent, make_sweep(points, **fields), make_job("7", points))
    for point in points[:num_complete]:
        write_run(folder, point)
    return folder, points


def test_resume_submits_one_job_for_missing_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, points = submit_points(tmp_path, 2)
    write_run(folder, points[2], ok_record(make_fake_case(0)), num_cases=2)
    assert resume(folder, FakeSlurm()) == 0
    job = load_jobs(folder)[-1]
    assert job.id == "101"
    assert job.nodes == 2
    assert job.points == (points[2].id, points[3].id)
    assert "#SBATCH --nodes=2\n" in (folder / "jobs" / "0001" / "sweep.sh").read_text()
    assert "2 of 4 points" in capsys.readouterr().out
    resume(folder, FakeSlurm())
    assert len(load_jobs(folder)) == 3


def test_failed_point_is_not_repeated(tmp_path: Path) -> None:
    folder, points = submit_points(tmp_path, 3)
    write_run(folder, points[3], failed_record(make_fake_case(0), status="hang"))
    assert "its 4 points are complete" in usage_error(resume, folder, FakeSlurm())


def test_two_resumes_at_once_submit_one_job(tmp_path: Path) -> None:
    """The second asks squeue before the first has submitted."""
    folder, _ = submit_points(tmp_path, 2)
    first, second = FakeSlurm(), FakeSlurm()
    queue = second.queue

    def resume_first() -> tuple[QueuedJob, ...]:
        queued = queue()
        resume(folder, first)
        return queued

    second.queue = resume_first  # type: ignore[method-assign]
    assert "another process may submit" in usage_error(resume, folder, second)
    assert len(first.arguments_of("sbatch")) == 1
    assert second.arguments_of("sbatch") == []
    assert len(load_jobs(folder)) == 2


@pytest.mark.parametrize(
    ("num_complete", "slurm", "message"),
    [
        (4, FakeSlurm(), "nothing of"),
        (0, FakeSlurm(queued=[queue_job("7", "PENDING")]), "still wait or run (7)"),
        (0, FakeSlurm(is_down=True), "squeue did not answer"),
        (0, FakeSlurm(refused_from={"sbatch": 1}), "sbatch did not answer"),
    ],
)
def test_resume_refuses_and_changes_nothing(
    num_complete: int, slurm: FakeSlurm, message: str, tmp_path: Path
) -> None:
    folder, _ = submit_points(tmp_path, num_complete)
    content = (folder / "sweep.json").read_bytes()
    assert message in usage_error(resume, folder, slurm)
    assert (folder / "sweep.json").read_bytes() == content
    assert len(load_jobs(folder)) == 1
    assert not (folder / "jobs" / "0001").exists()


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
