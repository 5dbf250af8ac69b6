"""A submitted sweep: where it stands, followed, collected, cancelled, resumed; every point has a state and a reason."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from parbench.bench.text import UserError
from parbench.cli import main
from parbench.slurm.job.state import SavedState, write_state
from parbench.slurm.sweep.folder import Point, load_jobs, load_sweep
from parbench.slurm.sweep.status import Picture, collect, follow, look, render, show
from parbench.slurm.sweep.submit import cancel, resume
from tests.support.sweeps import (
    FakeSlurm,
    make_folder,
    make_job,
    make_point,
    make_sweep,
    queued_job,
)

P = tuple(make_point(number) for number in range(4))
Told = tuple[int, str, dict[str, Any]]


def write(folder: Path, *states: Told) -> None:
    points = load_sweep(folder).points
    for number, state, more in states:
        given = {"time": "2026-01-01T00:00:01.000Z", "job": "7", "state": state, **more}
        write_state(folder, points[number].id, msgspec.convert(given, SavedState))


def submitted(out: Path, points: Sequence[Point] = P, *saved: Told, **more: Any) -> Path:
    """Return the folder of a sweep whose job is 7, with the saved states of its points."""
    folder = make_folder(out, make_sweep(points, **more), make_job("7", points))
    write(folder, *saved)
    return folder


def states(picture: Picture) -> list[tuple[str, str]]:
    return [(one.state, one.reason) for one in picture.points]


def test_a_running_sweep_and_one_that_waits(tmp_path: Path) -> None:
    folder = submitted(
        tmp_path,
        P,
        (0, "done", {"seconds": 40.0, "nodes": ["n1", "n2"], "run": "runs/a"}),
        (1, "failed", {"reason": "hang: x", "seconds": 3.0}),
        (2, "started", {"nodes": ["n1"]}),
    )
    picture = look(folder, FakeSlurm().set(waiting=[queued_job("7")]))
    assert states(picture) == [
        ("done", ""),
        ("failed", "hang: x"),
        ("running", ""),
        ("waiting", ""),
    ]
    assert (picture.points[0].nodes, picture.points[0].run) == (("n1", "n2"), "runs/a")
    assert picture.words() == "1 of 4 done, 1 failed, 2 to do; job 7 running"
    assert (picture.lives, picture.code) == (True, 4)
    folder = submitted(tmp_path / "pending")
    for reason, words in (("None", ""), ("Resources", " (Resources)")):
        picture = look(folder, FakeSlurm().set(waiting=[queued_job("7", "PENDING", reason=reason)]))
        assert picture.words() == f"0 of 4 done, 4 to do; job 7 pending{words}"
    assert {one.state for one in picture.points} == {"waiting"}


def test_status_of_an_array_counts_its_tasks(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "four", make_sweep(P), make_job("7", P))
    tasks = [queued_job("7", own=str(7 + number)) for number in range(4)]
    picture = look(folder, FakeSlurm().set(waiting=tasks))
    assert picture.words() == "0 of 4 done, 4 to do; array 7: 4 running"
    folder = make_folder(tmp_path / "two", make_sweep(P[:2]), make_job("7", P[:2]))
    write(folder, (0, "started", {"job": "7"}), (1, "started", {"job": "8"}))
    picture = look(folder, FakeSlurm().set(waiting=tasks[:1]))
    assert [one.state for one in picture.points] == ["running", "lost"], (
        "task 1 has ended, though the array lives"
    )


def test_what_an_ended_job_left_is_named_with_its_end_and_waits_for_a_requeued_or_later_one(
    tmp_path: Path,
) -> None:
    folder = submitted(
        tmp_path,
        P,
        (0, "started", {}),
        (1, "postponed", {"reason": "needs about 95 s, 60 s are left"}),
        (2, "lost-node", {"reason": "n3 is down"}),
    )
    picture = look(folder, FakeSlurm().set(jobs={"7": {"JobId": "7", "JobState": "TIMEOUT"}}))
    assert states(picture) == [
        ("lost", "job 7 ended while it was measured: job 7 timeout"),
        ("postponed", "needs about 95 s, 60 s are left"),
        ("lost-node", "n3 is down"),
        ("missing", "not begun: job 7 timeout"),
    ]
    assert not picture.lives
    assert picture.words() == "0 of 4 done, 4 to do; no job is left"
    assert states(look(folder, FakeSlurm()))[3] == ("missing", "not begun: job 7 ended"), (
        "Slurm has forgotten it"
    )
    picture = look(folder, FakeSlurm().set(waiting=[queued_job("7", "PENDING")]))
    assert states(picture)[0] == ("waiting", "job 7 was requeued while it was measured")
    folder = make_folder(
        tmp_path / "two", make_sweep(P[:1]), make_job("7", P[:1]), make_job("9", P[:1])
    )
    write(folder, (0, "postponed", {"reason": "needs about 95 s, 60 s are left"}))
    picture = look(folder, FakeSlurm().set(waiting=[queued_job("9", "PENDING")]))
    assert states(picture) == [("waiting", "needs about 95 s, 60 s are left")]


def test_without_an_answer_of_slurm_the_saved_states_tell(tmp_path: Path) -> None:
    folder = submitted(tmp_path, P[:3], (0, "done", {}), (1, "started", {}))
    picture = look(folder, FakeSlurm().set(down=True))
    assert [one.state for one in picture.points] == ["done", "started", "waiting"]
    assert picture.trouble == "squeue did not answer within 30 s"
    assert picture.lives, "nobody says that it has ended"
    assert "job 7 unknown, for Slurm does not answer" in picture.words()
    assert "squeue did not answer within 30 s" in render(picture)
    slurm, folder = (
        FakeSlurm(),
        submitted(tmp_path / "final", P[:2], (0, "done", {}), (1, "failed", {})),
    )
    look(folder, slurm)
    assert [words[0] for words in slurm.told] == ["squeue"], (
        "it is asked of no job whose points are final"
    )


def test_status_prints_a_row_for_each_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submitted(tmp_path, P[:2], (0, "done", {"seconds": 12.4, "nodes": ["n1", "n2"]}))
    text = render(look(folder, FakeSlurm())).splitlines()
    assert text[:2] == [f"test: {folder}", "job 7 ended"]
    assert text[4].split("  ")[0] == P[0].id
    assert text[4].split()[-3:] == ["done", "n1,n2", "12"]
    assert text[5].endswith("missing  -      -        not begun: job 7 ended")
    assert text[-1] == "1 of 2 done, 1 to do; no job is left"
    assert show(folder, as_json=True, slurm=FakeSlurm()) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=Picture)
    assert [one.state for one in told.points] == ["done", "missing"]


def test_every_command_refuses_what_is_no_sweep_and_work_is_not_offered(tmp_path: Path) -> None:
    offered = [
        line.split()[0]
        for line in CliRunner().invoke(main, ["slurm", "--help"]).output.splitlines()
        if line
    ]
    for name in ("status", "collect", "cancel", "resume", "work"):
        told = CliRunner().invoke(main, ["slurm", name, str(tmp_path)])
        assert told.exit_code == 2
        assert told.output == f"parbench: {tmp_path} is no sweep: it holds no readable sweep.json\n"
        assert (name in offered) == (name != "work")


def test_following_prints_each_change_and_ends_with_the_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submitted(tmp_path, P[:2])
    slurm, pauses = FakeSlurm().set(waiting=[queued_job("7", "PENDING")]), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            slurm.set(waiting=[queued_job("7")])
            write(folder, (0, "started", {}))
        elif len(pauses) == 6:
            write(folder, (0, "done", {}), (1, "done", {}))
        elif len(pauses) == 8:
            slurm.set(waiting=[])

    assert follow(folder, slurm, pause) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "0 of 2 done, 2 to do; job 7 pending"
    assert told[1].startswith("0 of 2 done, 2 to do; job 7 running")
    assert told[2].startswith("2 of 2 done; job 7 running")
    assert (told[3], told[-1]) == (f"test: {folder}", "2 of 2 done; no job is left")
    assert sum(words[0] == "squeue" for words in slurm.told) < len(pauses), (
        "Slurm is asked less often"
    )
    folder, silent, count = (
        submitted(tmp_path / "silent", P[:1]),
        FakeSlurm().set(down=True),
        iter(range(20)),
    )
    assert follow(folder, silent, lambda _: silent.__dict__.update(down=next(count) < 5)) == 4
    assert next(count) > 5, "it outlasts a Slurm that does not answer"


def measured(out: Path, *ends: tuple[str, str]) -> Path:
    """Return a sweep's folder of three points, the first of which ended so; each of those has a run folder."""
    folder = submitted(out, P[:3])
    for number, (state, reason) in enumerate(ends):
        run = folder / "runs" / P[number].id / "r"
        run.mkdir(parents=True)
        (run / "run.json").touch()
        more = {
            "run": str(run.relative_to(folder)),
            "reason": reason,
            "has_wrong_results": "wrong" in reason,
        }
        write(folder, (number, state, more))
    return folder


def test_runs_that_ended_are_reported_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Path] = []

    def collected(name: str, *ends: tuple[str, str], gone: str | None = None) -> list[str]:
        folder = measured(tmp_path / name, *ends)
        if gone is not None:
            (folder / "runs" / gone / "r" / "run.json").unlink()
        given.clear()
        codes.append(collect(folder, lambda runs, output: given.extend(runs), FakeSlurm()))
        return capsys.readouterr().out.replace(str(folder), "SWEEP").splitlines()

    codes: list[int] = []
    done, labels = ("done", ""), [f"{one.label}  runs/{one.id}/r" for one in P]
    told = collected("done", done, done, done)
    assert told[0] == f"{P[0].id}  done         {labels[0]}"
    assert told[3:] == ["3 of 3 done; no job is left", "SWEEP/report.html"]
    assert [run.parent.name for run in given] == [one.id for one in P[:3]]
    told = collected("wrong", done, ("failed", "wrong: 3 results"))
    assert told[1] == f"{P[1].id}  failed       {labels[1]}  (wrong: 3 results)"
    assert len(given) == 2
    told = collected("lost", done, ("lost-node", "n3 is down"))
    assert [run.parent.name for run in given] == [P[0].id]
    assert told[2] == f"{P[2].id}  missing      {P[2].label}  (not begun: job 7 ended)"
    assert told[-1] == "next: parbench slurm resume SWEEP"
    assert "next" not in "".join(collected("hang", done, ("failed", "hang: x"), done)), (
        "resume would not try it again"
    )
    collected("gone", done, done, done, gone=P[1].id)
    assert len(given) == 2
    assert "SWEEP/report.html" not in collected("none")
    assert codes == [0, 1, 4, 4, 0, 4]
    assert collect(measured(tmp_path / "without", done), None, FakeSlurm()) == 4


def test_only_its_own_living_jobs_are_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(
        tmp_path, make_sweep(P), *(make_job(number, P) for number in ("7", "8", "9"))
    )
    tasks = [queued_job("9", own=f"2{number}") for number in range(2)]
    slurm = FakeSlurm().set(waiting=[queued_job("7"), *tasks, queued_job("55"), queued_job("8888")])
    assert cancel(folder, slurm) == 0
    assert slurm.told == [("squeue",), ("scancel", "7", "9")]
    assert capsys.readouterr().out == "job 7: cancelled\njob 9: cancelled\n"
    assert cancel(folder, FakeSlurm().set(waiting=[queued_job("88")])) == 0
    assert capsys.readouterr().out == "no job of this sweep waits or runs\n"
    with pytest.raises(UserError, match="did not answer"):
        cancel(folder, FakeSlurm().set(down=True))


def unfinished(out: Path, *told: str, **more: Any) -> Path:
    points = (
        make_point(0, nodes=4),
        make_point(1, nodes=2),
        make_point(2, nodes=2),
        make_point(3, nodes=1),
    )
    return submitted(
        out, points, *((number, state, {}) for number, state in enumerate(told)), **more
    )


def ids(folder: Path, *numbers: int) -> tuple[str, ...]:
    return tuple(load_jobs(folder)[0].points[number] for number in numbers)


def test_one_job_more_is_as_large_as_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unfinished(tmp_path / "two", "done", "lost-node", "failed")
    assert resume(folder, FakeSlurm()) == 0
    [_, more] = load_jobs(folder)
    assert (more.id, more.nodes, more.points) == ("101", 2, ids(folder, 1, 3))
    script = (folder / "scripts" / f"{more.name}.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert f"slurm work {folder}\n" in script
    assert (
        capsys.readouterr().out
        == f"job 101: 2 of 4 points, on 2 nodes\nnext: parbench slurm status {folder}\n"
    )
    resume(folder, FakeSlurm())
    assert len({one.name for one in load_jobs(folder)}) == 3, "a second one overwrites no script"
    for state in ("started", "interrupted", "postponed"):
        folder = unfinished(tmp_path / state, state, "done", "done", "done")
        resume(folder, FakeSlurm())
        assert load_jobs(folder)[1].points == ids(folder, 0), "what is not final is missing"
    folder = unfinished(tmp_path / "array", "done", "done", mode="array")
    resume(folder, FakeSlurm())
    jobs = load_jobs(folder)[1:]
    assert [one.points for one in jobs] == [ids(folder, 2), ids(folder, 3)]
    for one, task in zip(jobs, (2, 3), strict=True):
        assert f"#SBATCH --array={task}\n" in (folder / "scripts" / f"{one.name}.sh").read_text(), (
            "its old number"
        )


def test_what_cannot_be_resumed_is_refused_and_leaves_the_sweep_as_it_was(tmp_path: Path) -> None:
    refusing = FakeSlurm()
    refusing.set(on_call=lambda words: refusing.set(down=words[0] == "sbatch"))
    finished = ("done", "done", "failed", "done")
    for told, slurm, words in (
        (finished, FakeSlurm(), r"nothing of .* is missing: its 4 points are done or failed"),
        (
            finished[:1],
            FakeSlurm().set(waiting=[queued_job("7", "PENDING")]),
            r"still wait or run \(7\): let them end, or",
        ),
        (finished[:1], FakeSlurm().set(down=True), "cannot be told: squeue did not answer"),
        (finished[:1], refusing, "sbatch did not answer"),
    ):
        folder = unfinished(tmp_path / words[:3], *told)
        before = (folder / "sweep.json").read_bytes()
        with pytest.raises(UserError, match=words):
            resume(folder, slurm)
        assert ((folder / "sweep.json").read_bytes(), len(load_jobs(folder))) == (before, 1)
    folder, twice = unfinished(tmp_path / "array", mode="array"), FakeSlurm()
    twice.set(
        on_call=lambda words: twice.set(down=[one[0] for one in twice.told].count(words[0]) == 2)
    )
    with pytest.raises(
        UserError,
        match=r"^nothing is left submitted: jobs 101 were cancelled: sbatch did not answer",
    ):
        resume(folder, twice)
