"""The status of a sweep: a state and a reason for every point, followed and collected."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.cli import main
from parbench.slurm.job.state import SavedState, State, write_state
from parbench.slurm.sweep.folder import Point, load_sweep
from parbench.slurm.sweep.status import Picture, collect, follow, look, render, show
from tests.support.sweeps import (
    FakeSlurm,
    make_folder,
    make_job,
    make_point,
    make_sweep,
    queue_job,
)

POINTS = (make_point(0), make_point(1), make_point(2), make_point(3))
RUNNING = FakeSlurm(queued=[queue_job("7")])
PENDING = FakeSlurm(queued=[queue_job("7", "PENDING")])


def submit_points(parent: Path, points: Sequence[Point] = POINTS) -> Path:
    """Return the folder of a sweep whose points are measured by job 7."""
    return make_folder(parent, make_sweep(points), make_job("7", points))


def save_state(folder: Path, number: int, state: State, **fields: Any) -> None:
    defaults = {"time": "2026-01-01T00:00:01.000Z", "job": "7"}
    point = load_sweep(folder).points[number]
    write_state(folder, point.id, SavedState(**{**defaults, "state": state, **fields}))


def point_states(picture: Picture) -> list[str]:
    return [point.state for point in picture.points]


def test_look_at_a_running_sweep(tmp_path: Path) -> None:
    folder = submit_points(tmp_path)
    save_state(folder, 0, "done", nodes=("n1", "n2"), run="runs/a")
    save_state(folder, 1, "failed", reason="hang: x")
    save_state(folder, 2, "started")
    picture = look(folder, RUNNING)
    assert point_states(picture) == ["done", "failed", "running", "waiting"]
    assert picture.points[0].nodes == ("n1", "n2")
    assert picture.points[0].run == "runs/a"
    assert picture.points[1].reason == "hang: x"
    assert picture.words() == "1 of 4 done, 1 failed, 2 to do; job 7 running"
    assert picture.lives
    assert picture.code == 4


def test_look_counts_the_tasks_of_an_array(tmp_path: Path) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    save_state(folder, 0, "started", job="7")
    save_state(folder, 1, "started", job="8")
    tasks = [queue_job("7", task_id="7"), queue_job("7", task_id="8")]
    picture = look(folder, FakeSlurm(queued=tasks))
    assert "array 7: 2 running" in picture.words()
    picture = look(folder, FakeSlurm(queued=tasks[1:]))
    assert point_states(picture) == ["lost", "running"], "the first task has ended"


def test_look_names_the_end_of_a_job(tmp_path: Path) -> None:
    folder = submit_points(tmp_path)
    save_state(folder, 0, "started")
    save_state(folder, 1, "postponed")
    save_state(folder, 2, "lost-node")
    facts = {"7": {"JobId": "7", "JobState": "TIMEOUT"}}
    picture = look(folder, FakeSlurm(jobs=facts))
    assert point_states(picture) == ["lost", "postponed", "lost-node", "missing"]
    assert picture.points[0].reason == "job 7 ended while it was measured: job 7 timeout"
    assert picture.points[3].reason == "not begun: job 7 timeout"
    assert not picture.lives
    assert picture.words() == "0 of 4 done, 4 to do; no job is left"


def test_point_of_a_requeued_job_waits(tmp_path: Path) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    save_state(folder, 0, "started")
    save_state(folder, 1, "postponed")
    picture = look(folder, PENDING)
    assert point_states(picture) == ["waiting", "waiting"]
    assert "requeued" in picture.points[0].reason


def test_look_without_an_answer_of_slurm(tmp_path: Path) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    save_state(folder, 0, "started")
    picture = look(folder, FakeSlurm(is_down=True))
    assert point_states(picture) == ["started", "waiting"]
    assert picture.trouble == "squeue did not answer within 30 s"
    assert picture.trouble in render(picture)
    assert picture.lives, "the end of the job is not known"


def test_show_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submit_points(tmp_path, POINTS[:2])
    save_state(folder, 0, "done", seconds=12.4, nodes=("n1", "n2"))
    assert show(folder, slurm=FakeSlurm()) == 0
    text = capsys.readouterr().out
    [row] = [line.split() for line in text.splitlines() if line.startswith(POINTS[0].id)]
    assert row[-3:] == ["done", "n1,n2", "12"]
    assert text.endswith("1 of 2 done, 1 to do; no job is left\n")
    assert show(folder, as_json=True, slurm=FakeSlurm()) == 0
    picture = msgspec.json.decode(capsys.readouterr().out, type=Picture)
    assert point_states(picture) == ["done", "missing"]


@pytest.mark.parametrize("command", ["status", "resume", "work"])
def test_commands_refuse_a_folder_without_a_sweep(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["slurm", command, str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} is no sweep" in result.output


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
            save_state(folder, 0, "started")
        elif len(pauses) == 6:
            save_state(folder, 0, "done")
        elif len(pauses) == 8:
            slurm.queued = []

    assert follow(folder, slurm, pause) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 1 done, 1 to do; job 7 pending"
    assert lines[1] == "0 of 1 done, 1 to do; job 7 running"
    assert lines[2] == "1 of 1 done; job 7 running"
    assert lines[-1] == "1 of 1 done; no job is left"
    num_queries = len(slurm.arguments_of("squeue"))
    assert num_queries < len(pauses), "squeue runs less often than states are read"


def test_collect_reports_final_points_and_suggests_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submit_points(tmp_path)
    names = ["runs/a", "runs/b", "runs/c"]
    for name in names:
        (folder / name).mkdir()
        (folder / name / "run.json").touch()
    save_state(folder, 0, "done", run=names[0])
    save_state(folder, 1, "failed", run=names[1], reason="wrong: 3", has_wrong_results=True)
    save_state(folder, 2, "lost-node", run=names[2])
    reports: dict[Path, list[Path]] = {}

    def report(runs: Sequence[Path], output: Path) -> None:
        reports[output] = list(runs)

    assert collect(folder, report, FakeSlurm()) == 1
    assert reports == {folder / "report.html": [folder / "runs/a", folder / "runs/b"]}
    output = capsys.readouterr().out
    assert "runs/a" in output
    assert "(wrong: 3)" in output
    assert "not begun: job 7 ended" in output
    assert f"parbench slurm resume {folder}" in output


def test_collect_without_runs_builds_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submit_points(tmp_path, POINTS[:1])
    save_state(folder, 0, "failed", run="runs/deleted")
    assert collect(folder, lambda runs, output: pytest.fail("no run"), FakeSlurm()) == 4
    assert "resume" not in capsys.readouterr().out, "a failed point is not measured again"
