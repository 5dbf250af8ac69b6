"""Runs inside ranks that another launcher started: one launch, one folder, one voice, and an end whatever happens."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Command, environment
from fakes import wait_until

from bench.gang import loopback_interface
from bench.records import Record, read_records
from bench.runs import load_run

BIN = Path(sys.executable).parent
QUICK = ("--preset", "smoke", "--budget", "10s")
Ranks = list["subprocess.Popen[str]"]

pytestmark = [pytest.mark.slow, pytest.mark.measures]


def only_run(folder: Path) -> Path:
    [path] = (folder / "runs").iterdir()
    return path


def records_of(folder: Path) -> list[Record]:
    return list(read_records(only_run(folder) / "records.jsonl"))


def places(rank: int, size: int, port: int = 1) -> dict[str, str]:
    """Return the variables by which a launcher tells a process which rank it is."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **local}


@contextmanager
def ranks(folder: Path, *words: str, size: int = 2) -> Iterator[Ranks]:
    """Start ``parbench run`` as every rank of a world, by no launcher that would end the others with one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [
        subprocess.Popen(
            [str(BIN / "parbench"), "run", *words],
            cwd=folder,
            env={**environment(), **places(rank, size, port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
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
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
    variables = {name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.run(
        [*command, str(BIN / "parbench"), "run", *QUICK, *words],
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- it works ---


def test_ranks_of_torchrun_make_one_run_of_one_launch_and_only_rank_0_prints(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--only", "all_reduce", "--sizes", "1K")
    assert done.returncode == 0, done.stderr
    run = load_run(only_run(tmp_path))
    assert run.info.environment is not None
    assert run.info.environment["variables"]["GLOO_SOCKET_IFNAME"] == loopback_interface()  # nobody has set it
    assert (run.info.plan.launches, run.info.plan.nproc) == (1, 2)
    assert [(record.status, record.world.size) for record in run.records] == [("ok", 2)]
    lines = done.stdout.splitlines()
    assert lines.count(str(only_run(tmp_path).relative_to(tmp_path))) == 1
    assert sum(line.split(" ")[0] == "all_reduce" for line in lines) == 1


def test_every_rank_ends_well_and_the_environment_is_that_of_the_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path, *QUICK, "--only", "all_reduce", "--sizes", "1K", "--json") as started:
        outputs = [process.communicate(timeout=90) for process in started]
        assert [process.returncode for process in started] == [0, 0], outputs
    assert json.loads(outputs[0][0])["status"] == "ok"
    assert outputs[1] == ("", "")
    shared = load_run(only_run(tmp_path)).info.environment
    assert shared is not None
    assert shared["torch"]["threads"] == 1


def test_one_rank_alone_runs_where_it_is_allowed(tmp_path: Path) -> None:
    words = ("--allow-single", "--only", "all_reduce", "--sizes", "1K", "--json")
    with ranks(tmp_path, *QUICK, *words, size=1) as [process]:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert json.loads(out)["world"]["size"] == 1


# --- it breaks ---


def test_a_killed_rank_is_recorded_and_rank_0_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    with ranks(tmp_path, *QUICK, "--target", "faults:killed", "--set", "at=-1,8,-2") as started:
        out, err = started[0].communicate(timeout=90)
        assert started[0].returncode == 4, err
        assert started[1].wait(10) == -signal.SIGKILL
    records = records_of(tmp_path)
    assert [record.status for record in records] == ["ok", "failed"]  # the third has no ranks to run on
    assert records[1].reason == "rank 1 died: its connection closed"
    assert "rank 1 died" in out
    assert time.monotonic() - began < 60


def test_a_rank_that_raises_is_recorded_and_every_rank_ends(tmp_path: Path) -> None:
    with ranks(tmp_path, *QUICK, "--target", "faults:raising") as started:
        assert started[0].wait(90) == 4
        assert started[1].wait(30) == 1
    [record] = records_of(tmp_path)
    assert record.reason == "rank 1 raised RuntimeError: the roof is on fire"


def test_under_torchrun_a_step_that_raises_still_has_its_tables_its_page_and_rank_0s_exit_code(tmp_path: Path) -> None:
    """torchrun itself always exits with 1, and tells what each rank exited with."""
    done = torchrun(tmp_path, "--target", "faults:raising")
    [record] = records_of(tmp_path)
    assert record.reason == "rank 1 raised RuntimeError: the roof is on fire"
    assert (only_run(tmp_path) / "report.html").exists(), done.stderr
    assert "rank 1 raised RuntimeError: the roof is on fire" in done.stdout
    assert done.stdout.splitlines().count(str(only_run(tmp_path).relative_to(tmp_path))) == 1
    assert done.returncode == 1
    assert re.search(r"rank\s*: 0 .*\n\s*exitcode\s*: 4 ", done.stderr), done.stderr


def test_a_rank_whose_driver_is_killed_ends_itself(tmp_path: Path) -> None:
    with ranks(tmp_path, *QUICK, "--target", "faults:fine", "--set", "number=0,1,2,3,4,5,6,7") as started:
        wait_until(lambda: any((tmp_path / "runs").glob("*/records.jsonl")) and bool(records_of(tmp_path)), 60)
        started[0].kill()
        assert started[1].wait(15) == 1
    assert records_of(tmp_path)


# --- it is refused ---


@pytest.mark.parametrize(
    ("words", "size", "told"),
    [
        (("--nproc", "3"), 2, "--nproc 3: 2 ranks are there already (WORLD_SIZE); leave it out"),
        (("--launches", "2"), 2, "--launches 2: ranks that are there already make one launch; leave it out"),
        ((), 1, "--allow-single"),
        (("--resume", "runs/x"), 2, "--resume starts its own ranks"),
    ],
)
def test_what_ranks_that_are_there_cannot_do_is_one_sentence(
    parbench: Command, tmp_path: Path, words: tuple[str, ...], size: int, told: str
) -> None:
    refused = parbench("run", *words, **places(0, size))
    assert refused.returncode == 2
    [line] = refused.stderr.strip().splitlines()
    assert told in line
    assert not (tmp_path / "runs").exists()
