"""The loop in a job: every point is measured once or gets a reason, whatever ends the job."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.slurm.job import point_run
from parbench.slurm.job.point_run import Attempt, Command
from parbench.slurm.job.state import SavedState, read_states
from parbench.slurm.job.work import task_point, work
from parbench.slurm.sweep.folder import Point, load_sweep
from tests.support.fakes import time_limit, wait_until
from tests.support.standin import Ending, assert_measured_once, count_records, stand_in
from tests.support.sweeps import FakeSlurm, make_folder, make_point, make_sweep

POINTS = (make_point(0), make_point(1), make_point(2))
IDS = tuple(point.id for point in POINTS)
NODES = "n1,n2,n3,n4"
ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": NODES}


def job_facts(seconds_left: float) -> dict[str, dict[str, str]]:
    """Return what scontrol shows of job 7, which ends in ``seconds_left``."""
    end = datetime.fromtimestamp(time.time() + seconds_left)
    facts = {
        "JobId": "7",
        "JobState": "RUNNING",
        "TimeLimit": "01:00:00",
        "EndTime": end.isoformat(timespec="seconds"),
        "NodeList": NODES,
    }
    return {"7": facts}


def make_slurm(seconds_left: float = 3600.0, **answers: Any) -> FakeSlurm:
    return FakeSlurm(jobs=job_facts(seconds_left), **answers)


def write_sweep(parent: Path, points: Sequence[Point] = POINTS, **fields: Any) -> Path:
    return make_folder(parent, make_sweep(points, **fields))


def run_job(
    folder: Path,
    slurm: FakeSlurm | None = None,
    command: Command | None = None,
    *,
    array: bool = False,
    environ: Mapping[str, str] = ENVIRON,
) -> int:
    with time_limit(60):
        return work(
            folder,
            array=array,
            slurm=slurm or make_slurm(),
            command=command or stand_in(),
            environ=environ,
        )


def load_states(folder: Path) -> dict[str, SavedState]:
    return read_states(folder, load_sweep(folder).points)


def state_names(folder: Path) -> list[str]:
    return [state.state for state in load_states(folder).values()]


def call_after_first_record(folder: Path, action: Callable[[], None]) -> None:
    """Call a function from another thread as soon as the sweep has a record."""

    def wait_and_call() -> None:
        wait_until(lambda: len(count_records(folder)) >= 1)
        action()

    threading.Thread(target=wait_and_call, daemon=True).start()


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbench.slurm.job.work._SLURM_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr("parbench.slurm.job.work._RECORDS_INTERVAL_SECONDS", 0.1)


def test_work_measures_each_point_once(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    attempts: list[Attempt] = []
    previous_handler = signal.getsignal(signal.SIGTERM)
    assert run_job(folder, command=stand_in(num_cases=2, attempts=attempts)) == 0
    assert run_job(folder, command=stand_in(attempts=attempts)) == 0
    assert signal.getsignal(signal.SIGTERM) == previous_handler
    assert [attempt.point.id for attempt in attempts] == list(IDS)
    assert {attempt.nodes for attempt in attempts} == {("n1", "n2")}
    assert_measured_once(folder, 6)
    states = load_states(folder)
    assert list(states) == list(IDS)
    for state in states.values():
        assert state.state == "done"
        assert state.reason == ""
        assert state.nodes == ("n1", "n2")
        assert state.job == "7"
        assert state.seconds > 0
        assert (folder / state.run / "records.jsonl").exists()


def test_work_resumes_a_run_after_sigkill(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, POINTS[:1])
    pid = os.fork()
    if pid == 0:
        try:
            command = stand_in(num_cases=40, seconds_per_case=0.05)
            work(folder, command=command, environ=ENVIRON, slurm=make_slurm())
        finally:
            os._exit(0)
    wait_until(lambda: len(count_records(folder)) >= 2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    time.sleep(0.2)  # the child receives SIGTERM because its parent is gone
    num_records = len(count_records(folder))
    assert state_names(folder) == ["started"]
    time.sleep(0.3)
    assert len(count_records(folder)) == num_records < 40
    attempts: list[Attempt] = []
    environ = {**ENVIRON, "SLURM_RESTART_COUNT": "1"}
    assert run_job(folder, command=stand_in(attempts=attempts), environ=environ) == 0
    assert attempts[0].run is not None
    assert_measured_once(folder, 40)


@pytest.mark.parametrize(
    ("ending", "exit_code", "state", "reason"),
    [
        ("wrong", 1, "failed", "3 results are wrong"),
        ("hang", 4, "failed", "no end within 10 s"),
        ("bad-input", 4, "failed", "--nodes 9"),
        ("killed", 4, "interrupted", "1 of 2 measurements are missing"),
    ],
)
def test_work_continues_after_a_failed_point(
    ending: Ending, exit_code: int, state: str, reason: str, tmp_path: Path
) -> None:
    def command(attempt: Attempt) -> list[str]:
        point_ending = ending if attempt.point == POINTS[0] else "ok"
        return stand_in(num_cases=2, ending=point_ending)(attempt)

    folder = write_sweep(tmp_path, POINTS[:2])
    assert run_job(folder, command=command) == exit_code
    states = load_states(folder)
    assert states[IDS[0]].state == state
    assert reason in states[IDS[0]].reason
    assert states[IDS[1]].state == "done"
    attempts: list[Attempt] = []
    assert run_job(folder, command=stand_in(attempts=attempts)) == (
        0 if ending == "killed" else exit_code
    )
    assert len(attempts) == (1 if ending == "killed" else 0)


LONG_AND_SHORT = (make_point(0, nodes=4, seconds=100), make_point(1, seconds=15))


@pytest.mark.parametrize(
    ("points", "requeue", "requeued_jobs"),
    [
        (LONG_AND_SHORT, True, [("7",)]),
        (LONG_AND_SHORT, False, []),
        (LONG_AND_SHORT[:1], True, []),
    ],
    ids=["requeued", "not-allowed", "nothing-measured"],
)
def test_work_postpones_a_point_and_requeues_the_job(
    points: Sequence[Point],
    requeue: bool,
    requeued_jobs: list[tuple[str, ...]],
    tmp_path: Path,
) -> None:
    folder = write_sweep(tmp_path, points, requeue=requeue)
    slurm = make_slurm(seconds_left=30)
    assert run_job(folder, slurm) == 4
    assert state_names(folder) == ["postponed", "done"][: len(points)]
    assert "needs about 108 s" in load_states(folder)[points[0].id].reason
    assert slurm.arguments_of("requeue") == requeued_jobs


def test_work_needs_time_only_for_missing_records(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, (make_point(0, seconds=40),))
    assert run_job(folder, command=stand_in(num_cases=4, ending="killed")) == 4
    assert len(count_records(folder)) == 3
    # a quarter of 40 s and the margin of 8 s
    assert run_job(folder, make_slurm(seconds_left=25)) == 0


def test_work_stops_a_point_when_the_job_ends(tmp_path: Path) -> None:
    points = (make_point(0), make_point(1, seconds=0.1), make_point(2))
    folder = write_sweep(tmp_path, points)
    slurm = make_slurm()

    def command(attempt: Attempt) -> list[str]:
        if attempt.point == points[0]:
            return stand_in()(attempt)
        slurm.jobs = job_facts(seconds_left=9.5)
        return stand_in(num_cases=500, seconds_per_case=0.05)(attempt)

    assert run_job(folder, slurm, command) == 4
    assert state_names(folder) == ["done", "interrupted", "postponed"]
    assert load_states(folder)[points[1].id].reason == "the job's time ended"
    assert slurm.arguments_of("requeue") == [("7",)]


@pytest.mark.parametrize("ending", ["ok", "ignores-sigterm"])
def test_work_stops_at_sigterm(ending: Ending, tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    slurm = make_slurm()
    call_after_first_record(folder, send_sigterm)
    assert (
        run_job(folder, slurm, stand_in(num_cases=400, seconds_per_case=0.05, ending=ending)) == 4
    )
    states = load_states(folder)
    assert list(states) == [IDS[0]]
    assert states[IDS[0]].state == "interrupted"
    assert states[IDS[0]].reason == "the job was told to stop"
    assert len(count_records(folder)) < 400
    assert slurm.arguments_of("requeue") == []


def test_work_does_not_blame_ranks_killed_by_the_job(tmp_path: Path) -> None:
    """The signal that ends the job may reach the ranks before it reaches their driver."""
    folder = write_sweep(tmp_path, POINTS[:1])
    attempts: list[Attempt] = []
    call_after_first_record(folder, send_sigterm)
    command = stand_in(num_cases=30, seconds_per_case=0.1, ending="ranks-died")
    assert run_job(folder, command=command) == 4
    assert state_names(folder) == ["interrupted"]
    assert run_job(folder, command=stand_in(attempts=attempts)) == 0
    assert attempts[0].run is not None
    assert {record.status for record in count_records(folder)} == {"ok"}
    assert_measured_once(folder, 30)


def lose_n2(slurm: FakeSlurm, hanging_point: Point, attempts: list[Attempt]) -> Command:
    """Return a command during which node n2 goes down, and one point hangs."""

    def command(attempt: Attempt) -> list[str]:
        slurm.nodes = {"n2": "down"}
        ending: Ending = "hang" if attempt.point == hanging_point else "ok"
        return stand_in(ending=ending, attempts=attempts)(attempt)

    return command


def test_work_goes_on_without_a_dead_node(tmp_path: Path) -> None:
    node_counts = (4, 4, 3, 2)
    points = [make_point(number, nodes=count) for number, count in enumerate(node_counts)]
    folder = write_sweep(tmp_path, points, on_dead_node="go-on")
    slurm = make_slurm()
    attempts: list[Attempt] = []
    assert run_job(folder, slurm, lose_n2(slurm, points[0], attempts)) == 4
    assert state_names(folder) == ["lost-node", "lost-node", "done", "done"]
    states = load_states(folder)
    assert states[points[0].id].reason.startswith("n2 is down: hang: ")
    assert states[points[1].id].reason == "needs 4 nodes; n2 is down, 3 are left"
    assert [attempt.nodes for attempt in attempts[1:]] == [("n1", "n3", "n4"), ("n1", "n3")]


def test_work_ends_the_job_at_a_dead_node(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, on_dead_node="fail")
    slurm = make_slurm()
    attempts: list[Attempt] = []
    assert run_job(folder, slurm, lose_n2(slurm, POINTS[0], attempts)) == 4
    assert state_names(folder) == ["lost-node"] * 3
    assert 'on_dead_node = "fail"' in load_states(folder)[IDS[1]].reason
    assert len(attempts) == 1
    assert run_job(folder, command=stand_in(attempts=attempts)) == 0
    assert attempts[1].point == POINTS[0]
    assert attempts[1].run is None, "a run in which a node died is not resumed"


@pytest.mark.usefixtures("fast_polling")
def test_work_stops_a_point_whose_node_dies(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, POINTS[:1], on_dead_node="go-on")
    slurm = make_slurm()

    def lose_n1() -> None:
        slurm.nodes = {"n1": "down*"}

    call_after_first_record(folder, lose_n1)
    assert run_job(folder, slurm, stand_in(num_cases=400, seconds_per_case=0.05)) == 4
    assert len(count_records(folder)) < 400
    assert load_states(folder)[IDS[0]].reason.startswith("n1 is down: ")


def test_work_does_not_excuse_a_hang_by_an_unused_node(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, POINTS[:1], on_dead_node="go-on")
    assert run_job(folder, make_slurm(nodes={"n4": "down"}), stand_in(ending="hang")) == 4
    assert state_names(folder) == ["failed"]


def test_work_measures_the_point_of_an_array_task(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    environ = {**ENVIRON, "SLURM_ARRAY_TASK_ID": "1"}
    assert run_job(folder, array=True, environ=environ) == 0
    assert list(load_states(folder)) == [IDS[1]]
    with pytest.raises(UserError, match="SLURM_ARRAY_TASK_ID='3'"):
        task_point(make_sweep(POINTS), "3")


def test_work_runs_outside_of_slurm(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, POINTS[:1])
    assert run_job(folder, FakeSlurm(is_down=True), environ={}) == 0
    assert load_states(folder)[IDS[0]].job == "none"


@pytest.mark.usefixtures("fast_polling")
def test_work_ends_a_child_with_unreadable_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_sweep(tmp_path, POINTS[:1])

    def fail_to_read(run: Path | None) -> tuple[()]:
        if run is None:
            return ()
        raise UserError("records.jsonl cannot be read: Stale file handle")

    monkeypatch.setattr(point_run, "broken_records", fail_to_read)
    assert run_job(folder, command=stand_in(num_cases=400, seconds_per_case=0.05)) == 4
    assert state_names(folder) == ["failed"]
    assert "Stale file handle" in load_states(folder)[IDS[0]].reason
    num_records = len(count_records(folder))
    time.sleep(0.2)
    assert len(count_records(folder)) == num_records < 400
