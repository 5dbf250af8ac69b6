"""The loop in a job: each point measured once or named with its reason, whatever ends the job."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fakes import wait_until, within
from standin import counted, standin
from sweeps import FakeSlurm, make_folder, make_sweep, point

from bench.errors import UserError
from slurm.claims import Claims, Owner, is_gone, this_owner
from slurm.ledger import Ledger, Line, read_ledger, standings
from slurm.point_run import Attempt, Command
from slurm.points import Point
from slurm.work import Signals, Worker, choose_points, work

P = tuple(point(number) for number in range(3))
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3,n4"}


def soon(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds).isoformat(timespec="seconds")


def job(seconds: float = 3600.0, **more: str) -> dict[str, str]:
    facts = {"JobId": "7", "JobState": "RUNNING", "TimeLimit": "01:00:00", "EndTime": soon(seconds)}
    return {**facts, "NodeList": "n1,n2,n3,n4", **more}


def cluster(seconds: float = 3600.0, **values: Any) -> FakeSlurm:
    return FakeSlurm().set(**{"jobs": {"7": job(seconds)}, **values})


def run(folder: Path, slurm: FakeSlurm, command: Command | None = None, **more: Any) -> int:
    with within(60):
        given = {"command": command or standin(), "environ": JOB, "slurm": slurm, **more}
        return work(folder, **given)


def words(folder: Path) -> dict[str, tuple[str, str]]:
    """Return each point's state and reason."""
    return {name: (one.state, one.last.reason) for name, one in standings(read_ledger(folder)).items()}


def lines(folder: Path, one: Point) -> list[Line]:
    return [line for line in read_ledger(folder) if line.point == one.id]


def test_every_point_is_measured_once_in_the_sweeps_order(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P)), list[Attempt]()
    assert run(folder, cluster(), standin(cases=2, told=told)) == 0
    assert [attempt.point.id for attempt in told] == [one.id for one in P]
    assert all(attempt.nodes == ("n1", "n2") for attempt in told)
    assert len(counted(folder)) == 6
    assert set(counted(folder).values()) == {1}
    for one in P:
        started, done = lines(folder, one)
        assert (started.state, started.nodes, started.job) == ("started", ("n1", "n2"), "7")
        assert (done.state, done.reason) == ("done", "")
        assert (folder / done.run / "records.jsonl").exists()
        assert done.seconds > 0.1


def test_a_second_job_measures_nothing_again(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P)), list[Attempt]()
    assert run(folder, cluster()) == 0
    assert run(folder, cluster(), standin(told=told)) == 0
    assert told == []
    assert set(counted(folder).values()) == {1}


def test_two_jobs_at_once_share_the_points(tmp_path: Path) -> None:
    """Threads stand for jobs here: a worker hears no signals, so it needs no main thread."""
    points = tuple(point(number) for number in range(8))
    sweep = make_sweep(points)
    folder = make_folder(tmp_path, sweep)
    slurm = cluster(jobs={name: job(JobId=name) for name in ("7", "8", "9")})

    def one_job(name: str) -> int:
        owner = Owner(job=name, restart=0, host="n1", pid=os.getpid(), token=f"token{name}")
        with Ledger(folder, owner.writer, name) as ledger:
            claims = Claims(folder, owner, lambda other: is_gone(other, owner, lambda whose: True))
            environ = {**JOB, "SLURM_JOB_ID": name}
            return Worker(folder, sweep, ledger, claims, slurm, Signals(), standin(cases=1), environ).work(points)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one_job, ("7", "8", "9")))
    assert len(counted(folder)) == 8
    assert set(counted(folder).values()) == {1}
    jobs = {line.job for line in read_ledger(folder) if line.state == "done"}
    assert len(jobs) > 1, "they did share"


def test_the_ledger_is_read_again_after_the_claim(tmp_path: Path) -> None:
    """Another job ends the point and gives it back between our look and our claim."""
    folder, told = make_folder(tmp_path, make_sweep(P[:1])), list[Attempt]()
    other = Owner(job="8", restart=0, host="n9", pid=1, token="other")
    claims = Claims(folder, other, lambda whose: False)
    assert claims.take(P[0].id) is None

    def end(asked: tuple[str, ...]) -> None:
        if asked == ("show job", "8") and not lines(folder, P[0]):
            with Ledger(folder, "8", "8") as ledger:
                ledger.write(P[0].id, "done")

    assert run(folder, cluster(on_call=end), standin(told=told)) == 0
    assert told == []


def test_a_point_of_a_living_job_is_left_to_it(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P)), list[Attempt]()
    Claims(folder, Owner(job="8", restart=0, host="n9", pid=1, token="other"), lambda whose: False).take(P[1].id)
    slurm = cluster(jobs={"7": job(), "8": job(JobId="8")})
    assert run(folder, slurm, standin(told=told)) == 4
    assert [attempt.point.id for attempt in told] == [P[0].id, P[2].id]
    assert lines(folder, P[1]) == []


def test_what_a_killed_job_had_begun_is_gone_on_with(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P[:1])), list[Attempt]()
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
    assert [line.state for line in lines(folder, P[0])] == ["started"]
    time.sleep(0.3)
    requeued = {**JOB, "SLURM_RESTART_COUNT": "1"}
    assert run(folder, cluster(), standin(told=told, each=0.01), environ=requeued) == 0
    assert told[0].run is not None
    assert kept < 6
    assert len(counted(folder)) == 6
    assert set(counted(folder).values()) == {1}
    assert [line.state for line in lines(folder, P[0])] == ["started", "started", "done"]


@pytest.mark.parametrize(
    ("end", "state", "told", "code"),
    [
        ("wrong", "failed", "wrong: collective.all_reduce", 1),
        ("hang", "failed", "hang: collective.all_reduce", 4),
        ("bad-input", "failed", "parbench: --nodes 9", 4),
        ("die", "interrupted", "1 of 2 measurements are missing, the run ended with SIGKILL", 4),
    ],
)
def test_a_bad_end_is_named_and_the_rest_goes_on(tmp_path: Path, end: str, state: str, told: str, code: int) -> None:
    folder = make_folder(tmp_path, make_sweep(P))

    def command(attempt: Attempt) -> list[str]:
        return standin(end=end if attempt.point == P[0] else "ok")(attempt)

    assert run(folder, cluster(), command) == code
    found = words(folder)
    assert found[P[0].id][0] == state
    assert found[P[0].id][1].startswith(told)
    assert {found[one.id][0] for one in P[1:]} == {"done"}


def test_a_point_that_failed_for_its_own_sake_is_not_tried_again(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P[:1])), list[Attempt]()
    assert run(folder, cluster(), standin(end="hang")) == 4
    assert run(folder, cluster(), standin(told=told)) == 4
    assert told == []


def test_what_does_not_fit_is_put_off_and_the_smaller_ones_are_tried(tmp_path: Path) -> None:
    points = (point(0, nodes=4, seconds=100), point(1, seconds=5), point(2, seconds=40))
    folder = make_folder(tmp_path, make_sweep(points, requeue=False))
    slurm = cluster(30)
    assert run(folder, slurm) == 4
    found = words(folder)
    state, reason = found[points[0].id]
    assert state == "postponed"
    needed, left = (int(word) for word in reason.replace("needs about ", "").replace(" s are left", "").split(" s, "))
    assert needed == 108
    assert 27 <= left <= 30
    assert found[points[1].id] == ("done", "")
    assert found[points[2].id] == ("done", ""), "the estimate is scaled by what the first one took"
    assert not any(asked[0] == "requeue" for asked in slurm.told)


def test_a_job_that_was_too_short_requeues_itself_if_it_measured_anything(tmp_path: Path) -> None:
    points = (point(0, seconds=100), point(1, seconds=5))
    folder = make_folder(tmp_path, make_sweep(points))
    slurm = cluster(30)
    run(folder, slurm)
    assert ("requeue", "7") in slurm.told
    again = cluster(30)
    folder = make_folder(tmp_path / "other", make_sweep(points[:1]))
    run(folder, again)
    assert ("requeue", "7") not in again.told, "it would be requeued for ever"
    assert words(folder)[points[0].id][0] == "postponed"


def test_no_point_is_put_off_for_ever_because_others_took_long(tmp_path: Path) -> None:
    """With the others' factor of five the last would need 108 s of a job's 60, in every job anew."""
    points = (point(0, seconds=0.02), point(1, seconds=20))
    folder = make_folder(tmp_path, make_sweep(points, requeue=False))
    assert run(folder, cluster(60)) == 4
    assert words(folder)[points[1].id][1].startswith("needs about 108 s, 5")
    assert run(folder, cluster(60)) == 0


def test_a_refused_requeue_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, make_sweep((point(0, seconds=100), point(1, seconds=5))))
    slurm = cluster(30)

    def refuse(asked: tuple[str, ...]) -> None:
        slurm.set(down=asked[0] == "requeue")

    assert run(folder, slurm.set(on_call=refuse)) == 4
    assert "job 7 is not requeued: requeue did not answer" in capsys.readouterr().out


def test_only_the_rest_of_a_begun_run_must_fit(tmp_path: Path) -> None:
    one = point(0, seconds=40)
    folder = make_folder(tmp_path, make_sweep((one,)))
    assert run(folder, cluster(), standin(cases=4, end="die")) == 4
    assert len(counted(folder)) == 3
    assert run(folder, cluster(25)) == 0, "a quarter of 40 s and the margin fit into 25 s"


def test_the_job_s_end_stops_a_point_that_takes_longer_than_expected(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep((point(0, seconds=0.1), point(1, seconds=30)), requeue=True))
    slurm = cluster(10)
    began = time.monotonic()
    assert run(folder, slurm, standin(cases=500, each=0.05)) == 4
    assert time.monotonic() - began < 6
    (started, stopped), (put_off,) = lines(folder, point(0)), lines(folder, point(1))
    assert (started.state, stopped.state, stopped.reason) == ("started", "interrupted", "the job's time ended")
    assert put_off.state == "postponed"
    assert len(counted(folder)) > 2
    assert ("requeue", "7") in slurm.told


def signalled(number: signal.Signals, when: Callable[[], object], then: Callable[[], object] = lambda: None) -> None:
    """Send this process a signal as soon as something is true."""

    def send() -> None:
        wait_until(when)
        then()
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def test_the_warning_lets_a_point_end_that_still_fits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P))
    signalled(signal.SIGUSR1, lambda: len(counted(folder)) >= 1)
    assert run(folder, cluster(), standin(cases=4, each=0.1)) == 0


def test_the_warning_makes_it_ask_anew_when_the_job_ends(tmp_path: Path) -> None:
    """Somebody has cut the job's time since the point began."""
    folder, slurm = make_folder(tmp_path, make_sweep(P[:1])), cluster()
    signalled(signal.SIGUSR1, lambda: len(counted(folder)) >= 1, lambda: slurm.set(jobs={"7": job(5)}))
    assert run(folder, slurm, standin(cases=400, each=0.05)) == 4
    assert words(folder)[P[0].id] == ("interrupted", "the job's time ended")


def test_sigterm_stops_at_once_keeps_what_is_done_and_begins_nothing_else(tmp_path: Path) -> None:
    folder, slurm, ended = make_folder(tmp_path, make_sweep(P)), cluster(), list[float]()
    signalled(signal.SIGTERM, lambda: len(counted(folder)) >= 2, lambda: ended.append(time.monotonic()))
    assert run(folder, slurm, standin(cases=400, each=0.05)) == 4
    assert time.monotonic() - ended[0] < 1.8, "KillWait may be two seconds"
    assert words(folder) == {P[0].id: ("interrupted", "the job was told to stop")}
    assert len(counted(folder)) >= 2
    assert ("requeue", "7") not in slurm.told


def test_sigterm_ends_a_stubborn_child_in_time(tmp_path: Path) -> None:
    folder, ended = make_folder(tmp_path, make_sweep(P)), list[float]()
    signalled(signal.SIGTERM, lambda: len(counted(folder)) >= 1, lambda: ended.append(time.monotonic()))
    assert run(folder, cluster(), standin(cases=400, each=0.05, end="stubborn")) == 4
    assert time.monotonic() - ended[0] < 1.9
    assert words(folder) == {P[0].id: ("interrupted", "the job was told to stop")}


def test_ranks_that_the_jobs_end_killed_are_not_blamed(tmp_path: Path) -> None:
    """The driver may see its ranks die of the signal that ends the job, before it hears of it itself."""
    script = (
        "import sys, time, signal\nfrom pathlib import Path\nfrom fakes import case, plan\n"
        "from reports_fixtures import bad, ok\nfrom bench.runs import create_run, open_writer, utc_now\n"
        "path = create_run(Path(sys.argv[1]), plan([case(0), case(1)]), '0')[0]\n"
        "writer = open_writer(path)\nwith writer as w:\n"
        "    def blame(number, frame):\n        w.write(bad(case(1), started=utc_now()))\n        sys.exit(4)\n"
        "    signal.signal(signal.SIGTERM, blame)\n    w.write(ok(case(0), started=utc_now()))\n    time.sleep(60)"
    )
    folder, told = make_folder(tmp_path, make_sweep(P[:1])), list[Attempt]()
    signalled(signal.SIGTERM, lambda: len(counted(folder)) >= 1)
    python = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}\n"
    command = standin()(Attempt(folder=folder, sweep=make_sweep(P), point=P[0], nodes=(), run=None))
    assert run(folder, cluster(), lambda a: [command[0], "-c", python + script, f"{a.folder}/runs/{a.point.id}"]) == 4
    assert words(folder)[P[0].id][0] == "interrupted"
    assert run(folder, cluster(), standin(told=told)) == 0
    assert told[0].run is not None
    assert sorted(status for *_, status in counted(folder)) == ["ok", "ok"]


def test_a_dead_node_ends_its_point_and_the_rest_goes_on_without_it(tmp_path: Path) -> None:
    points = (point(0, nodes=4), point(1, nodes=4), point(2, nodes=3), point(3, nodes=2))
    folder, told = make_folder(tmp_path, make_sweep(points, on_dead_node="go-on")), list[Attempt]()
    slurm = cluster()

    def command(attempt: Attempt) -> list[str]:
        slurm.set(nodes={"n2": "down"})
        return standin(end="hang" if attempt.point.nodes == 4 else "ok", told=told)(attempt)

    assert run(folder, slurm, command) == 4
    found = words(folder)
    assert found[points[0].id][0] == "lost-node"
    assert found[points[0].id][1].startswith("n2 is down: hang: collective.all_reduce")
    assert found[points[1].id] == ("lost-node", "needs 4 nodes; n2 is down, 3 are left")
    assert [found[one.id] for one in points[2:]] == [("done", ""), ("done", "")]
    assert [attempt.nodes for attempt in told[1:]] == [("n1", "n3", "n4"), ("n1", "n3")]


def test_a_silent_host_counts_as_dead(tmp_path: Path) -> None:
    points = (point(0, nodes=3), point(1, nodes=3))
    folder, told = make_folder(tmp_path, make_sweep(points, on_dead_node="go-on")), list[Attempt]()

    def command(attempt: Attempt) -> list[str]:
        return standin(end="hang" if attempt.point == points[0] else "ok", silent="n2.cluster", told=told)(attempt)

    assert run(folder, cluster(), command) == 4
    assert words(folder)[points[0].id][1].startswith("n2 gives no answer: hang: ")
    assert words(folder)[points[1].id] == ("done", "")
    assert told[1].nodes == ("n1", "n3", "n4")


def test_a_child_is_not_left_to_wait_for_a_node_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.work._ASK_EVERY_SECONDS", 0.5)
    folder, slurm = make_folder(tmp_path, make_sweep(P[:1], on_dead_node="go-on")), cluster()
    signalled(signal.SIGUSR1, lambda: len(counted(folder)) >= 1, lambda: slurm.set(nodes={"n1": "down*"}))
    began = time.monotonic()
    assert run(folder, slurm, standin(cases=400, each=0.05)) == 4
    assert time.monotonic() - began < 8
    assert words(folder)[P[0].id][1].startswith("n1 is down: ")


def test_a_dead_node_that_a_point_did_not_use_is_not_its_excuse(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1], on_dead_node="go-on"))
    assert run(folder, cluster(nodes={"n4": "down"}), standin(end="hang")) == 4
    assert words(folder)[P[0].id][0] == "failed"


def test_with_fail_a_dead_node_ends_the_job_and_names_the_rest(tmp_path: Path) -> None:
    folder, slurm = make_folder(tmp_path, make_sweep(P)), cluster()

    def command(attempt: Attempt) -> list[str]:
        slurm.set(nodes={"n2": "down"})
        return standin(end="hang")(attempt)

    assert run(folder, slurm, command) == 4
    found = words(folder)
    assert found[P[0].id][1].startswith("n2 is down: hang: ")
    rest = ("lost-node", 'n2 is down, and on_dead_node = "fail" ends the job')
    assert [found[one.id] for one in P[1:]] == [rest, rest]


def test_a_point_that_a_dead_node_spoilt_is_measured_afresh_by_the_next_job(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P[:1])), list[Attempt]()
    slurm = cluster()

    def command(attempt: Attempt) -> list[str]:
        slurm.set(nodes={"n2": "down"})
        return standin(end="hang")(attempt)

    run(folder, slurm, command)
    assert run(folder, cluster(), standin(told=told)) == 0
    assert told[0].run is None
    assert len(list((folder / "runs" / P[0].id).iterdir())) == 2


def test_old_hangs_of_a_run_gone_on_with_blame_no_node_of_today(tmp_path: Path) -> None:
    folder, told = make_folder(tmp_path, make_sweep(P[:1], on_dead_node="go-on")), list[Attempt]()
    run(folder, cluster(nodes={}), standin(cases=3, end="die"))
    (path,) = (folder / "runs" / P[0].id).iterdir()
    spoil(path)
    assert run(folder, cluster(), standin(told=told)) == 4
    assert words(folder)[P[0].id][0] == "failed"


def spoil(path: Path) -> None:
    """Append a hang of n2 to a run, as an earlier job may have left it."""
    from fakes import case
    from reports_fixtures import bad

    from bench.records import RankState
    from bench.runs import open_writer

    states = (("n1", "timed, step 3"), ("n2", "no answer"))
    ranks = [RankState(rank=rank, host=host, pid=1, state=state) for rank, (host, state) in enumerate(states)]
    with open_writer(path) as writer:
        writer.write(bad(case(2), 0, "hang", "rank 1 did not arrive", ranks=ranks))


def test_a_damaged_run_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:2]))
    broken = folder / "runs" / P[0].id / "20260101T000000Z-n1-abcdef"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{}")
    (broken / "records.jsonl").touch()
    assert run(folder, cluster()) == 4
    state, reason = words(folder)[P[0].id]
    assert state == "failed"
    assert "run.json is not what parbench wrote" in reason
    assert words(folder)[P[1].id][0] == "done"


def test_without_slurm_it_still_measures(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1]))
    assert run(folder, FakeSlurm().set(down=True), environ={}) == 0
    assert lines(folder, P[0])[0].job == "none"


def test_which_points_a_process_is_to_measure() -> None:
    sweep = make_sweep(P)
    assert choose_points(sweep, None, None) == P
    assert choose_points(sweep, P[1].id, None) == (P[1],)
    assert choose_points(sweep, None, "2") == (P[2],)
    with pytest.raises(UserError, match="no point nope"):
        choose_points(sweep, "nope", None)
    for task in ("3", "", "-1", "x"):
        with pytest.raises(UserError, match="none of the sweep's 3 points, from 0"):
            choose_points(sweep, None, task)


def test_an_arrays_task_measures_its_own_point(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P))
    assert run(folder, cluster(), array=True, environ={**JOB, "SLURM_ARRAY_TASK_ID": "1"}) == 0
    assert words(folder) == {P[1].id: ("done", "")}


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    run(make_folder(tmp_path, make_sweep(P[:1])), cluster(), standin(cases=1))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_the_owner_of_a_claim_is_this_job(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P[:1]))
    run(folder, cluster(), standin(cases=1))
    assert f'"job":"7","restart":0,"host":"{this_owner(JOB).host}"' in (folder / "claims" / f"{P[0].id}.0").read_text()
