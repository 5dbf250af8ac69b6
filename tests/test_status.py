"""Where a sweep stands: every point has a state and, where it is not measured, a reason."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from sweeps import FakeSlurm, job, make_folder, make_sweep, point, queued

from bench.errors import UserError
from parbench import main
from slurm.ledger import FOLDER, Line
from slurm.status import Picture, PointState, follow, look, render, show

P = tuple(point(number) for number in range(4))
NOW = 1767225660.0  # 2026-01-01T00:01:00Z


def write(folder: Path, *lines: tuple[str, str, dict[str, Any]]) -> None:
    """Append lines (point, state, more) a second apart."""
    with (folder / FOLDER / "7.jsonl").open("ab") as file:
        for second, (name, state, more) in enumerate(lines):
            made = {"time": f"2026-01-01T00:00:{second:02}.000Z", "point": name, "state": state, "job": "7", **more}
            file.write(msgspec.json.encode(msgspec.convert(made, Line)) + b"\n")


def states(picture: Picture) -> list[tuple[str, str]]:
    return [(one.state, one.reason) for one in picture.points]


def test_a_running_sweep(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    write(
        folder,
        (P[0].id, "started", {}),
        (P[0].id, "done", {"seconds": 40.0, "nodes": ["n1", "n2"], "run": "runs/a"}),
        (P[1].id, "failed", {"reason": "hang: x", "seconds": 3.0}),
        (P[2].id, "started", {"time": "2026-01-01T00:00:50.000Z", "nodes": ["n1"]}),
    )
    picture = look(folder, FakeSlurm().set(waiting=[queued("7")]), NOW)
    assert states(picture) == [("done", ""), ("failed", "hang: x"), ("running", ""), ("waiting", "")]
    assert picture.points[0].nodes == ("n1", "n2")
    assert picture.points[0].run == "runs/a"
    assert picture.left_seconds == pytest.approx(2 * 20 + 2 * 20 - 10), "points take twice their 20 s; 10 s are gone"
    assert picture.words() == "1 of 4 done, 1 failed, 2 to do; job 7 running, about 1 min 10 s left"
    assert picture.lives
    assert picture.code == 4


def test_jobs_at_work_at_once_share_what_is_left(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P, array=True))
    tasks = [queued("7", task=number, own=str(7 + number)) for number in range(4)]
    picture = look(folder, FakeSlurm().set(waiting=tasks), NOW)
    assert picture.left_seconds == pytest.approx(20)
    assert picture.words() == "0 of 4 done, 4 to do; array 7: 4 running, about 20 s left"


def test_a_pending_sweep_promises_no_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    picture = look(folder, FakeSlurm().set(waiting=[queued("7", "PENDING")]), NOW)
    assert picture.words() == "0 of 4 done, 4 to do; job 7 pending"
    assert {one.state for one in picture.points} == {"waiting"}


def test_a_pending_job_says_why_it_waits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    picture = look(folder, FakeSlurm().set(waiting=[queued("7", "PENDING", reason="Resources")]), NOW)
    assert picture.words().endswith("; job 7 pending (Resources)")


def test_what_an_ended_job_left_is_named_with_its_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    write(
        folder,
        (P[0].id, "started", {}),
        (P[1].id, "postponed", {"reason": "needs about 95 s, 60 s are left"}),
        (P[2].id, "lost-node", {"reason": "n3 is down"}),
    )
    picture = look(folder, FakeSlurm().set(jobs={"7": {"JobId": "7", "JobState": "TIMEOUT"}}), NOW)
    assert states(picture) == [
        ("lost", "job 7 ended while it was measured: job 7 timeout"),
        ("postponed", "needs about 95 s, 60 s are left"),
        ("lost-node", "n3 is down"),
        ("missing", "not begun: job 7 timeout"),
    ]
    assert not picture.lives
    assert picture.words() == "0 of 4 done, 4 to do; no job is left"


def test_a_job_that_slurm_has_forgotten_has_ended(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1]), job("7", P[:1]))
    assert states(look(folder, FakeSlurm(), NOW)) == [("missing", "not begun: job 7 ended")]


def test_a_requeued_jobs_point_waits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1]), job("7", P[:1]))
    write(folder, (P[0].id, "started", {}))
    picture = look(folder, FakeSlurm().set(waiting=[queued("7", "PENDING")]), NOW)
    assert states(picture) == [("waiting", "job 7 was requeued while it was measured")]


def test_what_an_earlier_job_put_off_waits_for_a_later_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1]), job("7", P[:1]), job("9", P[:1]))
    write(folder, (P[0].id, "postponed", {"reason": "needs about 95 s, 60 s are left"}))
    picture = look(folder, FakeSlurm().set(waiting=[queued("9", "PENDING")]), NOW)
    assert states(picture) == [("waiting", "needs about 95 s, 60 s are left")]


def test_of_an_array_each_task_counts_by_its_own_id(tmp_path: Path) -> None:
    """Task 1 has ended and is not at its point any more, though the array lives."""
    folder = make_folder(tmp_path, make_sweep(P[:2]), job("7", P[:2], array=True))
    write(folder, (P[0].id, "started", {"job": "7"}), (P[1].id, "started", {"job": "8"}))
    picture = look(folder, FakeSlurm().set(waiting=[queued("7", task=0, own="7")]), NOW)
    assert [one.state for one in picture.points] == ["running", "lost"]


def test_without_an_answer_of_slurm_the_ledger_tells_what_it_knows(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:3]), job("7", P[:3]))
    write(folder, (P[0].id, "done", {}), (P[1].id, "started", {}))
    picture = look(folder, FakeSlurm().set(down=True), NOW)
    assert [one.state for one in picture.points] == ["done", "started", "waiting"]
    assert picture.trouble == "squeue did not answer within 30 s"
    assert picture.lives, "nobody says that it has ended"
    assert "job 7 unknown, for Slurm does not answer" in picture.words()
    assert "squeue did not answer within 30 s" in render(picture)


def test_slurm_is_asked_of_no_job_whose_points_are_final(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:2]), job("7", P[:2]))
    write(folder, (P[0].id, "done", {}), (P[1].id, "failed", {}))
    slurm = FakeSlurm()
    look(folder, slurm, NOW)
    assert [words[0] for words in slurm.told] == ["squeue"]


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([("done", ""), ("done", "")], 0),
        ([("done", ""), ("failed", "wrong: x")], 1),
        ([("missing", ""), ("failed", "wrong: x")], 1),
        ([("done", ""), ("failed", "hang: x")], 4),
        ([("done", ""), ("postponed", "wrong: is not a verdict here")], 4),
    ],
)
def test_the_sweeps_exit_code(found: list[tuple[str, str]], code: int) -> None:
    points = tuple(PointState(id=str(n), label="", state=state, reason=why) for n, (state, why) in enumerate(found))
    assert Picture(name="", folder="", jobs=(), points=points, left_seconds=None).code == code


def test_the_table_has_a_row_for_each_point_and_ends_in_the_sum(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:2]), job("7", P[:2]))
    write(folder, (P[0].id, "done", {"seconds": 12.4, "nodes": ["n1", "n2"]}))
    text = render(look(folder, FakeSlurm(), NOW)).splitlines()
    assert text[0] == f"test: {folder}"
    assert text[1] == "job 7 ended"
    assert text[3].split() == ["point", "what", "state", "nodes", "seconds", "reason"]
    assert text[4].split("  ")[0] == P[0].id
    assert text[4].split()[-3:] == ["done", "n1,n2", "12"]
    assert text[5].endswith("missing  -      -        not begun: job 7 ended")
    assert text[-1] == "1 of 2 done, 1 to do; no job is left"


def test_show_exits_with_0_whatever_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:2]))
    assert show(folder, slurm=FakeSlurm()) == 0
    assert "no job was submitted" in capsys.readouterr().out
    assert show(folder, as_json=True, slurm=FakeSlurm()) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=Picture)
    assert [one.state for one in told.points] == ["missing", "missing"]


def test_no_sweep_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no sweep"):
        look(tmp_path, FakeSlurm())


@pytest.mark.parametrize("name", ["status", "collect", "cancel", "resume", "work"])
def test_every_command_refuses_what_is_no_sweep_in_one_sentence(name: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["slurm", name, str(tmp_path)])
    assert told.exit_code == 2
    assert told.output == f"parbench: {tmp_path} is no sweep: it holds no readable sweep.json\n"


def test_what_runs_in_a_job_is_not_offered_to_users() -> None:
    told = CliRunner().invoke(main, ["slurm", "--help"]).output
    assert {"status", "collect", "cancel", "resume"} <= set(told.split())
    assert "work" not in {line.split()[0] for line in told.splitlines() if line.startswith("  ")}


def test_following_prints_each_change_and_ends_with_the_jobs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:2]), job("7", P[:2]))
    slurm, out, pauses = FakeSlurm().set(waiting=[queued("7", "PENDING")]), io.StringIO(), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            slurm.set(waiting=[queued("7")])
            write(folder, (P[0].id, "started", {}))
        elif len(pauses) == 6:
            write(folder, (P[0].id, "done", {}), (P[1].id, "done", {}))
        elif len(pauses) == 8:
            slurm.set(waiting=[])

    assert follow(folder, slurm, out, pause) == 0
    told = out.getvalue().splitlines()
    assert told[0] == "0 of 2 done, 2 to do; job 7 pending"
    assert told[1].startswith("0 of 2 done, 2 to do; job 7 running")
    assert told[2].startswith("2 of 2 done; job 7 running")
    assert told[3] == f"test: {folder}"
    assert told[-1] == "2 of 2 done; no job is left"
    assert sum(words[0] == "squeue" for words in slurm.told) < len(pauses), "the ledger is read more often than Slurm"


def test_following_outlasts_a_slurm_that_does_not_answer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1]), job("7", P[:1]))
    slurm = FakeSlurm().set(down=True)
    pauses = iter(range(20))

    def pause(seconds: float) -> None:
        slurm.set(down=next(pauses) < 5)

    assert follow(folder, slurm, io.StringIO(), pause) == 4
    assert next(pauses) > 5
