"""The loop in a job: each point measured once or named with its reason, whatever ends the job."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.records import RankState, Record
from parbench.bench.results.runs import open_writer
from parbench.bench.text import UserError
from parbench.slurm.job import point_run
from parbench.slurm.job.point_run import Attempt, Command
from parbench.slurm.job.state import SavedState, read_states
from parbench.slurm.job.work import task_point, work
from parbench.slurm.sweep.folder import Point, load_sweep
from tests.support.fakes import make_fake_case, time_limit, wait_until
from tests.support.reports_fixtures import failed_record
from tests.support.standin import counted, standin
from tests.support.sweeps import FakeSlurm, make_folder, make_point, make_sweep

P = tuple(make_point(number) for number in range(3))
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3,n4"}


def job(seconds: float = 3600.0, **more: str) -> dict[str, str]:
    end = datetime.fromtimestamp(time.time() + seconds).isoformat(timespec="seconds")
    facts = {
        "JobId": "7",
        "JobState": "RUNNING",
        "TimeLimit": "01:00:00",
        "EndTime": end,
        "NodeList": "n1,n2,n3,n4",
    }
    return {**facts, **more}


def cluster(seconds: float = 3600.0, **values: Any) -> FakeSlurm:
    return FakeSlurm().set(**{"jobs": {"7": job(seconds)}, **values})


def run(
    folder: Path, slurm: FakeSlurm | None = None, command: Command | None = None, **more: Any
) -> int:
    with time_limit(60):
        given = {
            "command": command or standin(cases=1, each=0),
            "environ": JOB,
            "slurm": slurm or cluster(),
            **more,
        }
        return work(folder, **given)


def folder_of(out: Path, points: Sequence[Point] = P, **more: Any) -> Path:
    return make_folder(out, make_sweep(points, **more))


def states(folder: Path) -> dict[str, SavedState]:
    return read_states(folder, load_sweep(folder).points)


def words(folder: Path) -> dict[str, tuple[str, str]]:
    return {name: (state.state, state.reason) for name, state in states(folder).items()}


def assert_measured_once(folder: Path, measurements: int) -> None:
    assert set(counted(folder).values()) == {1}
    assert len(counted(folder)) == measurements


def test_every_point_is_measured_once_in_the_sweeps_order_and_by_no_second_job(
    tmp_path: Path,
) -> None:
    folder, told, again = folder_of(tmp_path), list[Attempt](), list[Attempt]()
    before = signal.getsignal(signal.SIGTERM)
    assert run(folder, command=standin(cases=2, told=told)) == 0
    assert run(folder, command=standin(told=again)) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert [attempt.point.id for attempt in told] == [one.id for one in P]
    assert all(attempt.nodes == ("n1", "n2") for attempt in told)
    assert again == []
    assert_measured_once(folder, 6)
    for state in states(folder).values():
        assert (state.state, state.reason, state.nodes, state.job) == (
            "done",
            "",
            ("n1", "n2"),
            "7",
        )
        assert (folder / state.run / "records.jsonl").exists()
        assert state.seconds > 0.1


def test_what_a_killed_job_had_begun_is_gone_on_with(tmp_path: Path) -> None:
    folder, told = folder_of(tmp_path, P[:1]), list[Attempt]()
    pid = os.fork()
    if pid == 0:
        try:
            work(folder, command=standin(cases=6, each=0.2), environ=JOB, slurm=cluster())
        finally:
            os._exit(0)
    wait_until(lambda: len(counted(folder)) >= 2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kept = len(counted(folder))
    assert words(folder) == {P[0].id: ("started", "")}
    time.sleep(0.7)
    assert len(counted(folder)) <= kept + 1, (
        "the child hears that its parent was killed, as its ranks will be"
    )
    requeued = {**JOB, "SLURM_RESTART_COUNT": "1"}
    assert run(folder, command=standin(told=told, each=0.01), environ=requeued) == 0
    assert told[0].run is not None
    assert kept < 6
    assert_measured_once(folder, 6)
    assert words(folder) == {P[0].id: ("done", "")}


def test_a_bad_end_is_named_the_rest_goes_on_and_a_fault_of_its_own_is_not_tried_again(
    tmp_path: Path,
) -> None:
    ends = {
        "wrong": ("failed", "wrong: collective.all_reduce", 1),
        "hang": ("failed", "hang: collective.all_reduce", 4),
        "bad-input": ("failed", "parbench: --nodes 9", 4),
        "die": ("interrupted", "1 of 2 measurements are missing, the run ended with SIGKILL", 4),
    }
    for end, (state, reason, code) in ends.items():
        folder, told = folder_of(tmp_path / end, P[:2]), list[Attempt]()

        def command(attempt: Attempt, end: str = end) -> list[str]:
            return standin(end=end if attempt.point == P[0] else "ok", each=0)(attempt)

        assert run(folder, command=command) == code, end
        found = words(folder)
        assert found[P[0].id][0] == state
        assert found[P[0].id][1].startswith(reason)
        assert found[P[1].id] == ("done", "")
        if end == "hang":
            assert run(folder, command=standin(told=told)) == 4
            assert told == []


def test_work_postpones_a_point_and_requeues_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = (make_point(0, nodes=4, seconds=100), make_point(1, seconds=15))
    folder, slurm = folder_of(tmp_path / "one", points), cluster(30)
    assert run(folder, slurm) == 4
    state, reason = words(folder)[points[0].id]
    assert state == "postponed"
    assert reason.startswith("needs about 108 s, 2")
    assert words(folder)[points[1].id] == ("done", "")
    assert ("requeue", "7") in slurm.told
    for name, some, more in (
        ("none measured", points[:1], {}),
        ("not wanted", points, {"requeue": False}),
    ):
        folder, slurm = folder_of(tmp_path / name, some, **more), cluster(30)
        assert run(folder, slurm) == 4
        assert words(folder)[points[0].id][0] == "postponed"
        assert ("requeue", "7") not in slurm.told, name
    folder, slurm = folder_of(tmp_path / "refused", points), cluster(30)
    assert run(folder, slurm.set(on_call=lambda asked: slurm.set(down=asked[0] == "requeue"))) == 4
    assert "job 7 is not requeued: requeue did not answer" in capsys.readouterr().out


def test_work_needs_time_only_for_the_rest_of_a_begun_point(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, (make_point(0, seconds=40),))
    assert run(folder, command=standin(cases=4, each=0, end="die")) == 4
    assert len(counted(folder)) == 3
    assert run(folder, cluster(25)) == 0, "a quarter of 40 s and the margin fit into 25 s"


def test_the_job_s_end_stops_a_point_that_takes_longer_than_expected(tmp_path: Path) -> None:
    points = (make_point(0), make_point(1, seconds=0.1), make_point(2))
    folder, slurm = folder_of(tmp_path, points), cluster()

    def command(attempt: Attempt) -> list[str]:
        if attempt.point == points[0]:
            return standin(cases=1, each=0)(attempt)
        slurm.set(jobs={"7": job(9.5)})
        return standin(cases=500, each=0.05)(attempt)

    assert run(folder, slurm, command) == 4
    assert words(folder)[points[1].id] == ("interrupted", "the job's time ended")
    assert words(folder)[points[2].id][0] == "postponed"
    assert len(counted(folder)) < 501
    assert ("requeue", "7") in slurm.told


def when_measuring(folder: Path, change: Callable[[], object]) -> None:
    """Call something as soon as a record is written."""

    def wait() -> None:
        wait_until(lambda: len(counted(folder)) >= 1)
        change()

    threading.Thread(target=wait, daemon=True).start()


def test_work_notices_a_time_limit_that_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parbench.slurm.job.work._SLURM_INTERVAL_SECONDS", 0.3)
    monkeypatch.setattr("parbench.slurm.job.work._RECORDS_INTERVAL_SECONDS", 0.3)
    folder, slurm = folder_of(tmp_path, P[:1]), cluster()
    when_measuring(folder, lambda: slurm.set(jobs={"7": job(5)}))
    assert run(folder, slurm, standin(cases=400, each=0.05)) == 4
    assert words(folder)[P[0].id] == ("interrupted", "the job's time ended")


@pytest.mark.parametrize("end", ["ok", "stubborn"])
def test_sigterm_stops_at_once_keeps_what_is_done_and_begins_nothing_else(
    tmp_path: Path, end: str
) -> None:
    folder, slurm, ended = folder_of(tmp_path), cluster(), list[float]()

    def stop() -> None:
        ended.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    when_measuring(folder, stop)
    assert run(folder, slurm, standin(cases=400, each=0.05, end=end)) == 4
    assert time.monotonic() - ended[0] < 5, (
        "KillWait may be two seconds; a child has six where only its time ends"
    )
    assert words(folder) == {P[0].id: ("interrupted", "the job was told to stop")}
    assert ("requeue", "7") not in slurm.told


def test_ranks_that_the_jobs_end_killed_are_not_blamed(tmp_path: Path) -> None:
    """The driver may see its ranks die of the signal that ends the job, before it hears of it itself."""
    folder, told = folder_of(tmp_path, P[:1]), list[Attempt]()
    when_measuring(folder, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(folder, command=standin(cases=3, each=0.5, end="blames")) == 4
    assert words(folder)[P[0].id][0] == "interrupted"
    assert run(folder, command=standin(told=told)) == 0
    assert told[0].run is not None
    assert {status for *_, status in counted(folder)} == {"ok"}
    assert_measured_once(folder, 3)


def losing_n2(slurm: FakeSlurm, told: list[Attempt], hang_nodes: int) -> Command:
    def command(attempt: Attempt) -> list[str]:
        slurm.set(nodes={"n2": "down"})
        return standin(
            cases=1, each=0, end="hang" if attempt.point.nodes == hang_nodes else "ok", told=told
        )(attempt)

    return command


def test_a_dead_node_ends_its_point_and_the_rest_goes_on_without_it(tmp_path: Path) -> None:
    points = (
        make_point(0, nodes=4),
        make_point(1, nodes=4),
        make_point(2, nodes=3),
        make_point(3, nodes=2),
    )
    folder, told, slurm = (
        folder_of(tmp_path, points, on_dead_node="go-on"),
        list[Attempt](),
        cluster(),
    )
    assert run(folder, slurm, losing_n2(slurm, told, 4)) == 4
    found = words(folder)
    assert found[points[0].id][0] == "lost-node"
    assert found[points[0].id][1].startswith("n2 is down: hang: collective.all_reduce")
    assert found[points[1].id] == ("lost-node", "needs 4 nodes; n2 is down, 3 are left")
    assert [found[one.id] for one in points[2:]] == [("done", ""), ("done", "")]
    assert [attempt.nodes for attempt in told[1:]] == [("n1", "n3", "n4"), ("n1", "n3")]


def test_with_fail_a_dead_node_ends_the_job_and_the_next_measures_its_point_afresh(
    tmp_path: Path,
) -> None:
    folder, told, slurm = folder_of(tmp_path), list[Attempt](), cluster()
    assert run(folder, slurm, losing_n2(slurm, told, 2)) == 4
    found = words(folder)
    assert found[P[0].id][1].startswith("n2 is down: hang: ")
    rest = ("lost-node", 'n2 is down, and on_dead_node = "fail" ends the job')
    assert [found[one.id] for one in P[1:]] == [rest, rest]
    told.clear()
    assert run(folder, command=standin(cases=1, each=0, told=told)) == 0
    assert told[0].run is None
    assert len(list((folder / "runs" / P[0].id).iterdir())) == 2


def test_a_child_is_not_left_to_wait_for_a_node_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parbench.slurm.job.work._SLURM_INTERVAL_SECONDS", 0.3)
    monkeypatch.setattr("parbench.slurm.job.work._RECORDS_INTERVAL_SECONDS", 0.3)
    folder, slurm = folder_of(tmp_path, P[:1], on_dead_node="go-on"), cluster()
    when_measuring(folder, lambda: slurm.set(nodes={"n1": "down*"}))
    assert run(folder, slurm, standin(cases=400, each=0.05)) == 4
    assert len(counted(folder)) < 400
    assert words(folder)[P[0].id][1].startswith("n1 is down: ")


def test_a_node_that_did_no_harm_to_a_point_is_not_its_excuse(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "unused", P[:1], on_dead_node="go-on")
    assert run(folder, cluster(nodes={"n4": "down"}), standin(end="hang")) == 4
    assert words(folder)[P[0].id][0] == "failed"
    folder = folder_of(tmp_path / "old", P[:1], on_dead_node="go-on")
    run(folder, cluster(), standin(cases=3, each=0, end="die"))
    (path,) = (folder / "runs" / P[0].id).iterdir()
    states = (("n1", "timed, step 3"), ("n2", "no answer"))
    ranks = [
        RankState(rank=rank, host=host, pid=1, state=state)
        for rank, (host, state) in enumerate(states)
    ]
    with open_writer(path) as writer:  # as an earlier job may have left it
        writer.write(
            failed_record(make_fake_case(2), 0, "hang", "rank 1 did not arrive", ranks=ranks)
        )
    assert run(folder) == 4
    assert words(folder)[P[0].id][0] == "failed"


def test_work_measures_the_point_of_an_array_task(tmp_path: Path) -> None:
    for task in ("3", "-1", ""):
        with pytest.raises(UserError, match="not one of the 3 points, from 0"):
            task_point(make_sweep(P), task)
    folder = folder_of(tmp_path)
    assert run(folder, array=True, environ={**JOB, "SLURM_ARRAY_TASK_ID": "1"}) == 0
    assert words(folder) == {P[1].id: ("done", "")}


def test_work_runs_outside_of_slurm(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, P[:1])
    assert run(folder, FakeSlurm().set(down=True), environ={}) == 0
    assert states(folder)[P[0].id].job == "none"


def test_work_ends_the_child_when_a_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, children = folder_of(tmp_path, P[:2]), list[int]()
    real = point_run.Child.__init__

    def start(child: point_run.Child, attempt: Attempt, command: Command) -> None:
        real(child, attempt, command)
        children.append(child._process.pid)
        if attempt.point == P[1]:
            assert not Path(f"/proc/{children[0]}").exists(), "two points at once on the same nodes"

    def fail(run: Path | None) -> tuple[Record, ...]:
        if run is None:
            return ()
        raise UserError("records.jsonl cannot be read: Stale file handle")

    monkeypatch.setattr(point_run.Child, "__init__", start)
    monkeypatch.setattr("parbench.slurm.job.work._RECORDS_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(point_run, "broken_records", fail)
    assert run(folder, command=standin(cases=100, each=0.05)) == 4
    assert len(children) == 2
    assert words(folder)[P[0].id] == ("failed", "records.jsonl cannot be read: Stale file handle")
