"""A fault ends its case and not the run: real ranks and drivers are killed, stopped and wrong."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.launch import ranks as ranks_module
from parbench.bench.launch.processes import PARBENCH
from parbench.bench.results.records import Record, read_records
from parbench.bench.results.runs import list_runs
from tests.support.fakes import wait_until
from tests.support.paths import IMPORT_PATH, Command, environment

FAULTS = ("--preset", "smoke", "--budget", "60s", "--timeout", "3s")
EIGHT_FINE_CASES = ("tests.support.faults:fine", "--set", "number=0,1,2,3,4,5,6,7")

StartRun = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_run(tmp_path: Path, request: pytest.FixtureRequest) -> StartRun:
    """Start ``parbench run`` in the test's folder; it is killed at the end of the test."""

    def start(*args: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*PARBENCH, "run", *args],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def end() -> None:
            process.kill()
            process.communicate()

        request.addfinalizer(end)
        return process

    return start


def only_run(folder: Path) -> Path:
    [path] = list_runs(folder / "runs")
    return path


def has_records(folder: Path) -> bool:
    return any(file.stat().st_size for file in folder.glob("runs/*/records.jsonl"))


def read_run(folder: Path) -> list[Record]:
    return list(read_records(only_run(folder) / "records.jsonl"))


def test_run_survives_faulty_ranks_and_driver_kill(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--preset", "smoke", "--budget", "60s", "--timeout", "2s", "--format=json")
    target = ("tests.support.faults:several", "--set", "how=swapped,stopped,killed")
    driver = start_run(*options, *target)

    # The driver is killed while rank 1 is stopped in the second case.
    wait_until(lambda: has_records(tmp_path) or driver.poll() is not None, 150)
    assert driver.poll() is None, driver.communicate()
    processes = psutil.Process(driver.pid).children(recursive=True)
    assert len(processes) >= 3
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive

    path = only_run(tmp_path)
    [wrong] = read_run(tmp_path)
    with (path / "records.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"case":{"id"')  # as a kill during a write leaves it
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    monkeypatch.setattr(ranks_module, "_GRACE_SECONDS", 1.0)
    resumed = CliRunner().invoke(cli.main, ["run", "--resume", str(path), "--format=json"])
    assert resumed.exit_code == 1, resumed.output
    assert resumed.stderr.splitlines()[-1] == str(path)

    records = read_run(tmp_path)
    assert records[0] == wrong
    assert wrong.status == "wrong"
    assert wrong.check.passed is False
    assert wrong.check.wrong
    _, stopped, killed = records
    assert stopped.status == "hang"
    assert stopped.reason == "timed out after 2 s: rank 1 did not arrive"
    assert "all_reduce" in stopped.ranks[0].stack
    assert "stopped" in stopped.ranks[1].state
    assert killed.status == "failed"
    assert killed.reason == "rank 1 died: ended by SIGKILL"
    for record in records:
        assert not record.metrics
        assert not record.samples.values


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_keeps_records_and_reports(
    start_run: StartRun, tmp_path: Path, sign: signal.Signals
) -> None:
    driver = start_run(*FAULTS, *EIGHT_FINE_CASES)
    wait_until(lambda: has_records(tmp_path), 60)
    processes = psutil.Process(driver.pid).children(recursive=True)

    driver.send_signal(sign)
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 4
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    path = only_run(tmp_path)
    assert f"--resume {path.relative_to(tmp_path)}" in stderr
    assert stdout.splitlines()[-1] == str(path.relative_to(tmp_path))
    assert 1 <= len(read_run(tmp_path)) < 8
    assert (path / "report.html").exists()


@pytest.mark.full
def test_new_ranks_wait_for_the_end_of_hung_ranks(parbench: Command, tmp_path: Path) -> None:
    parbench("run", *FAULTS, "tests.support.faults:stubborn", "--set", "number=0,1")
    hang, fine = read_run(tmp_path)
    assert hang.status == "hang"
    assert hang.reason == "timed out after 3 s: rank 1 did not arrive"
    assert hang.ranks[0].state.endswith("waits for rank 1")
    assert (fine.status, fine.reason) == ("ok", "")
    assert fine.notes == []


@pytest.mark.full
def test_two_runs_at_once_do_not_collide(start_run: StartRun, tmp_path: Path) -> None:
    args = ("--preset", "smoke", "all_reduce", "--sizes", "1K", "--format=json")
    processes = [start_run(*args), start_run(*args)]
    for process in processes:
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        [line] = stdout.splitlines()
        assert json.loads(line)["status"] == "ok"
    assert len(list_runs(tmp_path / "runs")) == 2
