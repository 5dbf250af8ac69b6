"""The status of a sweep: a state and a reason for every point, followed and collected."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.cli import main
from parbench.slurm.sweep.folder import JobAttempt, Point, load_sweep, write_attempt
from parbench.slurm.sweep.status import (
    SweepStatus,
    collect,
    follow_sweep,
    format_status,
    get_status,
    print_status,
)
from tests.support.fakes import make_fake_case
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

POINTS = (make_point(0), make_point(1), make_point(2), make_point(3))
RUNNING = FakeSlurm(queued=[queue_job("7")])
PENDING = FakeSlurm(queued=[queue_job("7", "PENDING")])
CASE = make_fake_case(0)


def submit_points(parent: Path, points: Sequence[Point] = POINTS) -> Path:
    """Return the folder of a sweep whose points are measured by job 7."""
    return make_folder(parent, make_sweep(points), make_job("7", points))


def save_attempt(folder: Path, number: int, **fields: Any) -> None:
    point = load_sweep(folder).points[number]
    write_attempt(folder, point.id, JobAttempt(**{"job": "7", **fields}))


def point_states(status: SweepStatus) -> list[str]:
    return [point.state for point in status.points]


def test_status_of_a_running_sweep(tmp_path: Path) -> None:
    folder = submit_points(tmp_path)
    run = write_run(folder, POINTS[0])
    save_attempt(folder, 0, nodes=("n1", "n2"))
    write_run(folder, POINTS[1], failed_record(CASE, status="hang", reason="x"))
    write_run(folder, POINTS[2], ok_record(CASE), num_cases=2)
    save_attempt(folder, 2, is_running=True)
    status = get_status(folder, RUNNING)
    assert point_states(status) == ["done", "failed", "running", "waiting"]
    assert status.points[0].nodes == ("n1", "n2")
    assert status.points[0].run == str(run.relative_to(folder))
    assert status.points[1].reason.startswith("hang: ")
    assert status.summarize() == "1 of 4 done, 1 failed, 2 to do; job 7 running"
    assert status.is_alive
    assert status.code == 4


def test_status_knows_the_task_of_each_point(tmp_path: Path) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    save_attempt(folder, 0, job="7", is_running=True)
    save_attempt(folder, 1, job="8", is_running=True)
    tasks = [queue_job("7", task_id="7", task=0), queue_job("7", task_id="8", task=1)]
    status = get_status(folder, FakeSlurm(queued=tasks))
    assert point_states(status) == ["running", "running"]
    assert "job 7 2 running" in status.summarize()
    status = get_status(folder, FakeSlurm(queued=tasks[1:]))
    assert point_states(status) == ["absent", "running"], "the first task has ended"


def test_status_names_the_end_of_a_job(tmp_path: Path) -> None:
    folder = submit_points(tmp_path)
    write_run(folder, POINTS[0], ok_record(CASE), num_cases=2)
    save_attempt(folder, 0, is_running=True)
    save_attempt(folder, 1, reason="postponed: needs about 95 s, 60 s are left")
    facts = {"7": {"JobId": "7", "JobState": "TIMEOUT"}}
    status = get_status(folder, FakeSlurm(jobs=facts))
    assert point_states(status) == ["partial", "absent", "absent", "absent"]
    reasons = [point.reason for point in status.points]
    assert reasons[0] == "interrupted: job 7 timeout"
    assert reasons[1].startswith("postponed: ")
    assert reasons[2] == "not begun: job 7 timeout"
    assert not status.is_alive
    assert status.summarize() == "0 of 4 done, 4 to do; no job is left"


def test_point_of_a_requeued_job_waits(tmp_path: Path) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    save_attempt(folder, 0, is_running=True)
    save_attempt(folder, 1, reason="postponed")
    assert point_states(get_status(folder, PENDING)) == ["waiting", "waiting"]


def test_status_without_an_answer_of_slurm(tmp_path: Path) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    write_run(folder, POINTS[0])
    status = get_status(folder, FakeSlurm(is_down=True))
    assert point_states(status) == ["done", "waiting"]
    assert status.problem == "squeue did not answer within 30 s"
    assert status.problem in format_status(status)
    assert status.is_alive, "the end of the job is not known"


def test_print_status_as_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    write_run(folder, POINTS[0])
    save_attempt(folder, 0, nodes=("n1", "n2"))
    assert print_status(folder, slurm=FakeSlurm()) == 0
    text = capsys.readouterr().out
    [row] = [line.split() for line in text.splitlines() if line.startswith(POINTS[0].id)]
    assert row[-2:] == ["done", "n1,n2"]
    assert text.endswith("1 of 2 done, 1 to do; no job is left\n")
    assert print_status(folder, as_json=True, slurm=FakeSlurm()) == 0
    status = msgspec.json.decode(capsys.readouterr().out, type=SweepStatus)
    assert point_states(status) == ["done", "absent"]


@pytest.mark.parametrize("command", ["status", "resume", "work"])
def test_commands_refuse_a_folder_without_a_sweep(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["slurm", command, str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} is not a sweep" in result.output


def test_follow_prints_each_change_until_the_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submit_points(tmp_path, POINTS[:1])
    slurm = FakeSlurm(queued=PENDING.queued)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            slurm.queued = RUNNING.queued
        elif len(pauses) == 3:
            write_run(folder, POINTS[0])
        elif len(pauses) == 4:
            slurm.queued = []

    assert follow_sweep(folder, slurm, pause) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 1 done, 1 to do; job 7 pending"
    assert lines[1] == "0 of 1 done, 1 to do; job 7 running"
    assert lines[2] == "1 of 1 done; job 7 running"
    assert lines[-1] == "1 of 1 done; no job is left"
    assert min(pauses) >= 4.0, "a large sweep is not read each second"


def test_collect_reports_complete_points_and_suggests_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submit_points(tmp_path)
    runs = [
        write_run(folder, POINTS[0]),
        write_run(folder, POINTS[1], failed_record(CASE, status="wrong")),
    ]
    write_run(folder, POINTS[2], ok_record(CASE), num_cases=2)
    reports: dict[Path, list[Path]] = {}

    def write_report(paths: Sequence[Path], output: Path) -> None:
        reports[output] = list(paths)

    assert collect(folder, write_report, FakeSlurm()) == 1
    assert reports == {folder / "report.html": runs}
    output = capsys.readouterr().out
    assert "wrong: " in output
    assert "not begun: job 7 ended" in output
    assert f"parbench slurm resume {folder}" in output
