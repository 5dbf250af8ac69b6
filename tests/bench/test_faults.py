"""What goes wrong ends its case, not the run: real processes, really killed and stopped, ours and other launchers'."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from parbench.bench.machine.environment import interface_of
from parbench.bench.results.records import Record, read_records
from parbench.bench.results.runs import load_run
from tests.support.fakes import wait_until
from tests.support.paths import Command, environment

BIN = Path(sys.executable).parent
PARBENCH = str(BIN / "parbench")
QUICK = ("--preset", "smoke", "--budget", "60s")  # new ranks on cores that others may use take long
ONE = ("--only", "all_reduce", "--sizes", "1K")
MANY = ("--target", "tests.support.faults:fine", "--set", "number=0,1,2,3,4,5,6,7")


def only_run(folder: Path) -> Path:
    [path] = (folder / "runs").iterdir()
    return path


def records_of(folder: Path) -> list[Record]:
    return list(read_records(only_run(folder) / "records.jsonl"))


def has_begun(folder: Path) -> bool:
    return any((folder / "runs").glob("*/records.jsonl")) and bool(records_of(folder))


def start(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [PARBENCH, "run", *words], cwd=folder, env={**environment(), **variables}, **pipes
    )


@contextmanager
def running(folder: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """Start ``parbench run`` and yield it once it has written a record; it is gone at the end."""
    process = start(folder, *words)
    try:
        wait_until(lambda: has_begun(folder), 60)
        yield process
    finally:
        process.kill()
        process.communicate()


# --- ranks of our own ---


def several(
    parbench: Command, folder: Path, *faults: str
) -> tuple[dict[str, Record], "CompletedProcess[str]"]:
    """Return the records of a run of these faults, by their names, and what it printed."""
    done = parbench(
        "run",
        *QUICK,
        "--timeout",
        "3s",
        "--target",
        "tests.support.faults:several",
        "--set",
        f"how={','.join(faults)}",
    )
    found = {str(record.case.params["how"]): record for record in records_of(folder)}
    assert [*found] == [*faults]
    return found, done


def test_a_killed_a_stopped_and_a_wrong_rank_end_their_case_and_the_rest_goes_on(
    parbench: Command, tmp_path: Path
) -> None:
    found, done = several(parbench, tmp_path, "killed", "swapped", "stopped", "fine")
    assert {how: record.status for how, record in found.items()} == {
        "killed": "failed",
        "swapped": "wrong",
        "stopped": "hang",
        "fine": "ok",
    }
    assert done.returncode == 1
    assert found["killed"].reason == "rank 1 died: ended by SIGKILL"
    assert "rank 1 died" in " ".join(done.stdout.split())  # which is as wide as a terminal
    assert found["stopped"].reason == "no end within 3 s: rank 1 did not arrive"
    waiting, stopped = found["stopped"].ranks
    assert "all_reduce" in waiting.stack
    assert "stopped" in stopped.state
    assert not found["swapped"].check.passed
    assert found["swapped"].check.wrong
    for how in ("killed", "swapped", "stopped"):
        assert not found[how].metrics, "what went wrong has no time"
        assert not found[how].samples.values


@pytest.mark.full
def test_new_ranks_start_when_those_that_hung_are_gone_and_may_take_no_sigterm(
    parbench: Command, tmp_path: Path
) -> None:
    parbench(
        "run",
        *QUICK,
        "--timeout",
        "3s",
        "--target",
        "tests.support.faults:stubborn",
        "--set",
        "number=0,1",
    )
    hang, after = records_of(tmp_path)
    assert (hang.status, hang.reason) == ("hang", "no end within 3 s: rank 1 did not arrive")
    assert hang.ranks[0].state.endswith("waits for rank 1")
    assert (after.status, after.reason, after.notes) == ("ok", "", [])


def test_a_killed_driver_leaves_no_rank_and_a_run_to_resume(
    parbench: Command, tmp_path: Path
) -> None:
    with running(tmp_path, *QUICK, *MANY) as driver:
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) >= 3
        driver.kill()
        driver.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
    path = only_run(tmp_path)
    with (path / "records.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"case":{"id"')  # what a kill in the middle of a write leaves
    before = records_of(tmp_path)
    assert 1 <= len(before) < 8

    resumed = parbench("run", "--resume", str(path))
    assert resumed.returncode == 0, resumed.stderr
    after = records_of(tmp_path)
    assert after[: len(before)] == before
    assert sorted(record.case.params["number"] for record in after) == list(range(8))
    assert resumed.stdout.splitlines()[-1] == str(path)


@pytest.mark.parametrize(
    "sign", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_an_interrupted_run_keeps_what_is_done_and_says_how_to_go_on(
    tmp_path: Path, sign: signal.Signals
) -> None:
    with running(tmp_path, *QUICK, *MANY) as driver:
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(sign)
        out, err = driver.communicate(timeout=60)
        assert driver.returncode == 4
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
    path = only_run(tmp_path)
    assert f"--resume {path.relative_to(tmp_path)}" in err
    assert out.splitlines()[-1] == str(path.relative_to(tmp_path))
    assert 1 <= len(load_run(path).records) < 8
    assert (path / "report.html").exists()


@pytest.mark.full
def test_two_runs_at_once_do_not_collide(tmp_path: Path) -> None:
    both = [start(tmp_path, *QUICK, *ONE, "--json") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    for output in outputs:
        [line] = output.splitlines()
        assert json.loads(line)["status"] == "ok"


# --- ranks that another launcher started ---


@contextmanager
def ranks(folder: Path, *words: str, size: int = 2) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start ``parbench run`` as every rank of a world, by no launcher that would end the others with one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    started = [
        start(folder, *QUICK, *words, RANK=str(rank), LOCAL_RANK=str(rank), **sizes, **shared)
        for rank in range(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def torchrun(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Start ``parbench run`` as two ranks by the real launcher, which ends all ranks with the first that ends badly."""
    command = [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        PARBENCH,
        "run",
        *QUICK,
    ]
    variables = {
        name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"
    }
    environ = {**variables, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_ranks_of_torchrun_make_one_run_of_one_launch_and_only_rank_0_prints(
    tmp_path: Path,
) -> None:
    done = torchrun(tmp_path, *ONE)
    assert done.returncode == 0, done.stderr
    run = load_run(only_run(tmp_path))
    assert run.info.environment is not None
    assert run.info.environment["variables"]["GLOO_SOCKET_IFNAME"] == interface_of(
        "127.0.0.1"
    )  # nobody has set it
    assert (run.info.plan.launches, run.info.plan.nproc) == (1, 2)
    assert [(record.status, record.world.size) for record in run.records] == [("ok", 2)]
    lines = done.stdout.splitlines()
    assert lines.count(str(only_run(tmp_path).relative_to(tmp_path))) == 1
    assert sum(line.startswith("  all_reduce ") for line in lines) == 1


@pytest.mark.full
def test_under_torchrun_a_step_that_raises_still_has_its_tables_its_page_and_rank_0s_exit_code(
    tmp_path: Path,
) -> None:
    """torchrun itself always exits with 1, and tells what each rank exited with."""
    done = torchrun(tmp_path, "--target", "tests.support.faults:raising")
    [record] = records_of(tmp_path)
    assert record.reason == "rank 1 raised RuntimeError: the roof is on fire"
    assert (only_run(tmp_path) / "report.html").exists(), done.stderr
    assert "rank 1 raised RuntimeError: the roof is on fire" in " ".join(done.stdout.split())
    assert done.stdout.splitlines().count(str(only_run(tmp_path).relative_to(tmp_path))) == 1
    assert done.returncode == 1
    assert re.search(r"rank\s*: 0 .*\n\s*exitcode\s*: 4 ", done.stderr), done.stderr


@pytest.mark.full
def test_every_rank_ends_well_also_one_alone_where_it_is_allowed(tmp_path: Path) -> None:
    for size, words in ((2, ()), (1, ("--allow-single",))):
        folder = tmp_path / str(size)
        folder.mkdir()
        with ranks(folder, *ONE, "--json", *words, size=size) as started:
            outputs = [process.communicate(timeout=90) for process in started]
            assert [process.returncode for process in started] == [0] * size, outputs
        record = json.loads(outputs[0][0])
        assert (record["status"], record["world"]["size"]) == ("ok", size)
        assert outputs[1:] == [("", "")] * (size - 1)
        shared = load_run(only_run(folder)).info.environment
        assert shared is not None
        assert shared["torch"]["threads"] == 1
