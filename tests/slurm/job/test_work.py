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

from parbench.bench.results.runs import load_run
from parbench.slurm.job import work as work_module
from parbench.slurm.job.child import Command, PointRequest
from parbench.slurm.job.work import get_task_point, work
from parbench.slurm.sweep import progress as progress_module
from parbench.slurm.sweep.folder import JobAttempt, Point, load_attempt, load_sweep
from parbench.slurm.sweep.progress import read_progress
from tests.support.fakes import time_limit, wait_until
from tests.support.refusals import usage_error
from tests.support.slurm.processes import find_processes
from tests.support.slurm.standin import Ending, assert_measured_once, count_records, stand_in
from tests.support.slurm.sweeps import FakeSlurm, make_folder, make_point, make_sweep

POINTS = (make_point(0), make_point(1), make_point(2))
IDS = tuple(point.id for point in POINTS)
NODES = "n1,n2,n3,n4"
ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": NODES}


def describe_job(seconds_left: float) -> dict[str, dict[str, str]]:
    """Return the properties of job 7 that scontrol shows, which ends in ``seconds_left``."""
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
    return FakeSlurm(jobs=describe_job(seconds_left), **answers)


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
    slurm = slurm or make_slurm()
    command = command or stand_in()
    with time_limit(60):
        return work(
            folder,
            array=array,
            slurm=slurm,
            command=command,
            environ=environ,
        )


def list_states(folder: Path) -> list[str]:
    """Return the state of each point, in the order of the points."""
    points = load_sweep(folder).points
    return [read_progress(folder, point.id).state for point in points]


def load_attempts(folder: Path) -> list[JobAttempt]:
    attempts = [load_attempt(folder, point.id) for point in load_sweep(folder).points]
    return [attempt for attempt in attempts if attempt != JobAttempt()]


def list_reasons(folder: Path) -> list[str]:
    return [attempt.reason for attempt in load_attempts(folder)]


def call_after_first_record(folder: Path, action: Callable[[], None]) -> None:
    """Call a function from another thread as soon as the sweep has a record."""

    def wait_and_call() -> None:
        wait_until(lambda: len(count_records(folder)) >= 1)
        action()

    threading.Thread(target=wait_and_call, daemon=True).start()


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_work_measures_each_point_once(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    requests: list[PointRequest] = []
    command = stand_in(num_cases=2, requests=requests)
    assert run_job(folder, command=command) == 0
    assert run_job(folder, command=command) == 0
    assert [request.point.id for request in requests] == list(IDS)
    assert {request.nodes for request in requests} == {("n1", "n2")}
    assert_measured_once(folder, 6)
    assert list_states(folder) == ["complete", "complete", "complete"]
    assert load_attempts(folder)[0] == JobAttempt(job="7", nodes=("n1", "n2"))


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
    # The child receives SIGTERM because its parent has ended.
    wait_until(lambda: not find_processes(str(folder)))
    assert list_states(folder) == ["partial"]
    assert load_attempts(folder)[0].is_running
    assert len(count_records(folder)) < 40
    environ = {**ENVIRON, "SLURM_RESTART_COUNT": "1"}
    assert run_job(folder, environ=environ) == 0
    assert_measured_once(folder, 40)


def end_first_point(ending: Ending) -> Command:
    """Return a command whose child ends in this way for the first point."""
    fail = stand_in(num_cases=2, ending=ending)
    succeed = stand_in(num_cases=2)

    def command(request: PointRequest) -> list[str]:
        return fail(request) if request.point.id == IDS[0] else succeed(request)

    return command


@pytest.mark.parametrize(
    ("ending", "exit_code", "reason"),
    [("wrong", 1, "3 results are wrong"), ("hang", 4, "timed out after 10 s")],
)
def test_work_continues_after_a_failed_point(
    ending: Ending, exit_code: int, reason: str, tmp_path: Path
) -> None:
    folder = write_sweep(tmp_path, POINTS[:2])
    assert run_job(folder, command=end_first_point(ending)) == exit_code
    assert list_states(folder) == ["complete", "complete"]
    assert reason in read_progress(folder, IDS[0]).not_done_reason
    requests: list[PointRequest] = []
    assert run_job(folder, command=stand_in(requests=requests)) == exit_code
    assert requests == [], "a failed point is complete"


@pytest.mark.parametrize(
    ("ending", "state", "reason"),
    [
        ("bad-input", "absent", "exit code 2: error: --nodes 9: job 7 has 4"),
        ("killed", "partial", "1 of 2 measurements are missing, the run ended with SIGKILL"),
    ],
)
def test_work_repeats_a_point_that_is_not_complete(
    ending: Ending, state: str, reason: str, tmp_path: Path
) -> None:
    folder = write_sweep(tmp_path, POINTS[:2])
    assert run_job(folder, command=end_first_point(ending)) == 4
    assert list_states(folder) == [state, "complete"]
    assert reason in list_reasons(folder)[0]
    assert run_job(folder, command=stand_in(num_cases=2)) == 0
    assert_measured_once(folder, 4)


class StaleFiles:
    """A network file system on which reading fails a number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failures = 0
        monkeypatch.setattr(progress_module, "load_run", self._load_run)

    def _load_run(self, path: Path) -> Any:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise OSError(116, "Stale file handle")
        return load_run(path)


def test_read_error_does_not_end_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second of a run its records are read, and the file system does not answer."""
    monkeypatch.setattr(work_module, "_RECORDS_INTERVAL_SECONDS", 0.05)
    files = StaleFiles(monkeypatch)
    folder = write_sweep(tmp_path, POINTS[:2])
    running: list[int] = []

    def command(request: PointRequest) -> list[str]:
        running.append(len(find_processes(str(folder / "runs"))))
        files.num_failures = 3
        return stand_in(num_cases=6, seconds_per_case=0.1)(request)

    assert run_job(folder, command=command) == 0
    assert list_states(folder) == ["complete", "complete"]
    assert running == [0, 0], "no child runs next to another one"
    assert_measured_once(folder, 12)


def test_unreadable_run_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_module, "_RECORDS_INTERVAL_SECONDS", 0.05)
    folder = write_sweep(tmp_path, POINTS[:1])
    assert run_job(folder, command=stand_in(num_cases=2, ending="killed")) == 4
    files = StaleFiles(monkeypatch)
    files.num_failures = 1000
    requests: list[PointRequest] = []
    assert run_job(folder, command=stand_in(requests=requests)) == 4
    assert requests == []
    assert "Stale file handle" in list_reasons(folder)[0]
    files.num_failures = 0
    assert run_job(folder) == 0
    assert_measured_once(folder, 2)


LONG_POINT = make_point(0, nodes=4, seconds=100)
SHORT_POINT = make_point(1, seconds=15)


@pytest.mark.parametrize(
    ("points", "requeue", "requeued"),
    [
        ([LONG_POINT, SHORT_POINT], True, [("7",)]),
        ([LONG_POINT, SHORT_POINT], False, []),
        ([LONG_POINT], True, []),
    ],
    ids=["requeue", "no-requeue", "nothing-measured"],
)
def test_work_postpones_a_point_and_requeues_the_job(
    points: list[Point], requeue: bool, requeued: list[tuple[str]], tmp_path: Path
) -> None:
    folder = write_sweep(tmp_path, points, slurm={"requeue": requeue})
    slurm = make_slurm(seconds_left=30)
    assert run_job(folder, slurm) == 4
    assert list_states(folder) == ["absent", "complete"][: len(points)]
    assert "postponed: needs about 108 s" in list_reasons(folder)[0]
    assert slurm.arguments_of("requeue") == requeued


def test_work_needs_time_only_for_missing_records(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [make_point(0, seconds=40)])
    assert run_job(folder, command=stand_in(num_cases=4, ending="killed")) == 4
    assert len(count_records(folder)) == 3
    # a quarter of 40 s and the margin of 8 s
    assert run_job(folder, make_slurm(seconds_left=25)) == 0


def test_work_stops_a_point_when_the_job_ends(tmp_path: Path) -> None:
    points = (make_point(0), make_point(1, seconds=0.1), make_point(2))
    folder = write_sweep(tmp_path, points)
    slurm = make_slurm()

    def command(request: PointRequest) -> list[str]:
        if request.point == points[0]:
            return stand_in()(request)
        slurm.jobs = describe_job(seconds_left=9.5)
        return stand_in(num_cases=500, seconds_per_case=0.05)(request)

    assert run_job(folder, slurm, command) == 4
    assert list_states(folder) == ["complete", "partial", "absent"]
    assert list_reasons(folder)[1] == "the job's time ended"
    assert slurm.arguments_of("requeue") == [("7",)]


@pytest.mark.parametrize("ending", ["ok", "ignores-sigterm"])
def test_work_stops_at_sigterm(ending: Ending, tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    slurm = make_slurm()
    call_after_first_record(folder, send_sigterm)
    command = stand_in(num_cases=400, seconds_per_case=0.05, ending=ending)
    assert run_job(folder, slurm, command) == 4
    assert list_states(folder) == ["partial", "absent", "absent"]
    [attempt] = load_attempts(folder)
    assert attempt.is_running, "the status shows how Slurm ended the job"
    assert len(count_records(folder)) < 400
    assert slurm.arguments_of("requeue") == []


def test_work_does_not_blame_ranks_killed_by_the_job(tmp_path: Path) -> None:
    """The signal that ends the job may reach the ranks before it reaches their driver."""
    folder = write_sweep(tmp_path, POINTS[:1])
    call_after_first_record(folder, send_sigterm)
    command = stand_in(num_cases=30, seconds_per_case=0.1, ending="ranks-died")
    assert run_job(folder, command=command) == 4
    assert list_states(folder) == ["partial"]
    assert run_job(folder) == 0
    assert {record.status for record in count_records(folder)} == {"ok"}
    assert_measured_once(folder, 30)


def lose_n2(slurm: FakeSlurm, requests: list[PointRequest]) -> Command:
    """Return a command during which node n2 goes down, and the first point hangs."""

    def command(request: PointRequest) -> list[str]:
        slurm.nodes = {"n2": "down"}
        ending: Ending = "hang" if not requests else "ok"
        return stand_in(ending=ending, requests=requests)(request)

    return command


def test_work_goes_on_without_a_dead_node(tmp_path: Path) -> None:
    node_counts = (4, 4, 3, 2)
    points = [make_point(number, nodes=count) for number, count in enumerate(node_counts)]
    folder = write_sweep(tmp_path, points, slurm={"on_dead_node": "go-on"})
    slurm = make_slurm()
    requests: list[PointRequest] = []
    assert run_job(folder, slurm, lose_n2(slurm, requests)) == 4
    assert list_states(folder) == ["absent", "absent", "complete", "complete"]
    first, second, *_ = list_reasons(folder)
    assert first.startswith("n2 is down: hang: ")
    assert second == "needs 4 nodes, 3 are left: n2 is down"
    nodes = [request.nodes for request in requests[1:]]
    assert nodes == [("n1", "n3", "n4"), ("n1", "n3")]


def test_work_ends_the_job_at_a_dead_node(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    slurm = make_slurm()
    requests: list[PointRequest] = []
    assert run_job(folder, slurm, lose_n2(slurm, requests)) == 4
    assert list_states(folder) == ["absent", "absent", "absent"]
    assert 'on_dead_node = "fail"' in list_reasons(folder)[1]
    assert len(requests) == 1
    assert run_job(folder, command=stand_in(requests=requests)) == 0
    assert requests[1].point == POINTS[0]
    assert requests[1].run is None, "a run in which a node died is not resumed"


def test_work_does_not_excuse_a_hang_by_an_unused_node(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, POINTS[:1], slurm={"on_dead_node": "go-on"})
    slurm = make_slurm(nodes={"n4": "down"})
    assert run_job(folder, slurm, stand_in(ending="hang")) == 4
    assert list_states(folder) == ["complete"]


def test_work_measures_the_point_of_an_array_task(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path)
    environ = {**ENVIRON, "SLURM_ARRAY_TASK_ID": "1"}
    assert run_job(folder, array=True, environ=environ) == 0
    sweep = load_sweep(folder)
    assert list_states(folder) == ["absent", "complete", "absent"]
    assert "SLURM_ARRAY_TASK_ID='3'" in usage_error(get_task_point, sweep, "3")


def test_work_runs_outside_of_slurm(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, POINTS[:1])
    assert run_job(folder, FakeSlurm(is_down=True), environ={}) == 0
    assert list_states(folder) == ["complete"]
