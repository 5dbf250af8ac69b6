"""What goes wrong ends its case, not the run: real processes, really killed and stopped."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Command, environment

from bench.records import Record, read_records
from bench.runs import load_run

pytestmark = pytest.mark.measures

PARBENCH = str(Path(sys.executable).with_name("parbench"))
QUICK = ("--preset", "smoke", "--budget", "20s")


def only_run(folder: Path) -> Path:
    [path] = (folder / "runs").iterdir()
    return path


def records_of(folder: Path) -> list[Record]:
    return list(read_records(only_run(folder) / "records.jsonl"))


def ranks_of(driver_pid: int) -> list[psutil.Process]:
    """Return the worker processes below a driver, in rank order."""
    children = psutil.Process(driver_pid).children(recursive=True)
    workers = [
        child for child in children if "bench.worker" in child.cmdline() and "bench.agent" not in child.cmdline()
    ]
    return sorted(workers, key=lambda child: int(child.environ()["RANK"]))


@contextmanager
def running(folder: Path, *words: str, **popen: Any) -> Iterator[subprocess.Popen[str]]:
    """Start ``parbench run`` and yield it once it has written a record; it is gone at the end."""
    process = subprocess.Popen(
        [PARBENCH, "run", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )
    try:
        wait_until(lambda: any((folder / "runs").glob("*/records.jsonl")) and bool(records_of(folder)), 60)
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(true: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_a_killed_rank_ends_its_case_and_the_others_go_on(parbench: Command, tmp_path: Path) -> None:
    # rank 1 dies in the second of three cases: at = 0 never comes
    done = parbench("run", *QUICK, "--target", "faults:killed", "--set", "at=0,8,-1")
    records = records_of(tmp_path)
    assert [record.status for record in records] == ["ok", "failed", "ok"]
    assert records[1].reason == "rank 1 died: ended by SIGKILL"
    assert not records[1].metrics
    assert done.returncode == 4
    assert "rank 1 died" in done.stdout


def test_a_stopped_rank_is_a_hang_that_names_it_and_shows_where_the_others_wait(
    parbench: Command, tmp_path: Path
) -> None:
    began = time.monotonic()
    long = ("--preset", "smoke", "--budget", "40s")  # the hang, and new ranks on cores that others may use
    done = parbench("run", *long, "--timeout", "5s", "--target", "faults:stopped", "--set", "at=8,-1")
    hang, after = records_of(tmp_path)
    assert (hang.status, after.status, done.returncode) == ("hang", "ok", 4)
    assert "rank 1 did not arrive" in hang.reason
    waiting, stopped = hang.ranks
    assert "all_reduce" in waiting.stack
    assert "stopped" in stopped.state
    assert time.monotonic() - began < 80


def test_a_rank_that_sleeps_elsewhere_is_named_though_it_answers(parbench: Command, tmp_path: Path) -> None:
    parbench("run", *QUICK, "--timeout", "4s", "--target", "faults:asleep")
    [hang] = records_of(tmp_path)
    assert "rank 1 did not arrive" in hang.reason
    assert "mischief" in hang.ranks[1].stack


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raising", "rank 1 raised RuntimeError: the roof is on fire"),
        ("exiting", "rank 1 died: exit code 7"),
        ("disagreeing", "ranks disagree about what a step does: 1 unlike rank 0"),
    ],
)
def test_whatever_a_rank_does_its_case_has_a_reason(parbench: Command, tmp_path: Path, fault: str, reason: str) -> None:
    done = parbench("run", *QUICK, "--target", f"faults:{fault}")
    [record] = records_of(tmp_path)
    assert (record.status, record.reason, done.returncode) == ("failed", reason, 4)


def test_a_refusal_by_all_ranks_is_skipped_and_by_one_is_failed(parbench: Command, tmp_path: Path) -> None:
    done = parbench("run", *QUICK, "--target", "faults:refusing", "--set", "rank=-1,1")
    skipped, failed = records_of(tmp_path)
    assert (skipped.status, skipped.reason) == ("skipped", "this device has no flux capacitor")
    assert failed.status == "failed"
    assert "rank 0: ready; rank 1: this device has no flux capacitor" in failed.reason
    assert done.returncode == 4


@pytest.mark.parametrize("fault", ["swapped", "late_wrong"])
def test_a_wrong_result_has_no_time(parbench: Command, tmp_path: Path, fault: str) -> None:
    done = parbench("run", *QUICK, "--target", f"faults:{fault}")
    [record] = records_of(tmp_path)
    assert record.status == "wrong"
    assert record.check.passed is False
    assert record.check.wrong
    assert not record.metrics
    assert not record.samples.values
    assert done.returncode == 1


def test_a_case_that_broke_a_launch_is_not_tried_in_the_next(parbench: Command, tmp_path: Path) -> None:
    parbench("run", *QUICK, "--launches", "2", "--target", "faults:killed", "--set", "at=8,-1")
    first = [record for record in records_of(tmp_path) if record.launch == 1]
    assert [record.status for record in first] == ["skipped", "ok"]
    assert "failed in launch 1 (rank 1 died" in first[0].reason


def test_a_killed_driver_leaves_no_rank_and_a_run_to_resume(parbench: Command, tmp_path: Path) -> None:
    numbers = ",".join(map(str, range(8)))
    with running(tmp_path, *QUICK, "--target", "faults:fine", "--set", f"number={numbers}") as driver:
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) >= 3
        driver.kill()
        driver.wait()
        _, alive = psutil.wait_procs(family, timeout=15)
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

    again = parbench("run", "--resume", str(path))
    assert again.returncode == 0
    assert records_of(tmp_path) == after


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path, sign: signal.Signals) -> None:
    numbers = ",".join(map(str, range(8)))
    with running(tmp_path, *QUICK, "--target", "faults:fine", "--set", f"number={numbers}") as driver:
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(sign)
        out, err = driver.communicate(timeout=30)
        assert driver.returncode == 4
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive
    path = only_run(tmp_path)
    assert f"--resume {path.relative_to(tmp_path)}" in err
    assert out.splitlines()[-1] == str(path.relative_to(tmp_path))
    assert 1 <= len(load_run(path).records) < 8
    assert (path / "report.html").exists()


def test_two_runs_at_once_do_not_collide(tmp_path: Path) -> None:
    command = [PARBENCH, "run", *QUICK, "--only", "all_reduce", "--sizes", "1K", "--json"]
    both = [
        subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    for output in outputs:
        [line] = output.splitlines()
        assert json.loads(line)["status"] == "ok"


def test_a_run_that_another_process_writes_is_not_resumed(parbench: Command, tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--target", "faults:fine", "--set", "number=0,1,2,3,4,5,6,7"):
        refused = parbench("run", "--resume", str(only_run(tmp_path)))
    assert refused.returncode == 2
    assert "is being written by another process" in refused.stderr


def in_tiny_tmpfs(tmp_path: Path, options: str, *words: str, beside: str = "") -> subprocess.CompletedProcess[str]:
    """Run parbench with ``out`` on a file system of its own, beside a shell command."""
    out = tmp_path / "out"
    out.mkdir()
    script = f'mount -t tmpfs -o {options} none {out} && {beside} exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", PARBENCH, "run", "--out", str(out), *words]
    return subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux to make a full and a read-only disk")
@pytest.mark.parametrize(("options", "told"), [("size=64k", "the disk is full"), ("ro", os.strerror(errno.EROFS))])
def test_a_full_or_read_only_disk_is_told_before_any_rank_starts(tmp_path: Path, options: str, told: str) -> None:
    began = time.monotonic()
    done = in_tiny_tmpfs(tmp_path, options, *QUICK)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--out" in done.stderr
    assert time.monotonic() - began < 5  # no rank was started: that alone takes longer


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux to make a disk that fills up")
def test_a_disk_that_fills_up_ends_the_run_with_a_sentence_and_shows_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wait = f"until [ -s {out}/*/records.jsonl ]; do sleep 0.1; done"
    fill = f"( {wait}; dd if=/dev/zero of={out}/ballast bs=4k ) 2>/dev/null &"
    numbers = ",".join(map(str, range(8)))
    done = in_tiny_tmpfs(
        tmp_path, "size=10m", *QUICK, "--target", "faults:fine", "--set", f"number={numbers}", beside=fill
    )
    assert done.returncode == 4
    assert "No space left on device: " in done.stderr
    assert "go on with: parbench run --resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert "faults" in done.stdout  # the table of what was measured before
