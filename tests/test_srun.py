"""srun as the gang's starter: its words, what it tells of an end, and that a step is not left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import HERE, wait_until

from bench.errors import UserError
from bench.messages import Hello
from bench.plan import Spread
from bench.srun import SrunGang, check_srun, more_options, parse_exits, srun_command

SPREAD = Spread(nodes=2, ntasks_per_node=3, placement="cyclic")


def hello(pid: int, host: str = "elsewhere", step: str = "17.3") -> Hello:
    return Hello(rank=0, size=6, host=host, pid=pid, environment={}, step=step)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "FakeSlurm":
    return FakeSlurm(tmp_path, monkeypatch)


class FakeSlurm:
    """Programs named srun and scancel that note what they are told; tests of the real ones run on a cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.program("srun", "exec sleep 60")
        self.program("scancel", "true")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        noted = f"{self.folder}/{name}"
        path.write_text(
            f'#!/bin/sh\necho "$@" >> {noted}.words\nenv > {noted}.part\nmv {noted}.part {noted}.env\n{script}\n'
        )
        path.chmod(0o755)

    def words(self, name: str) -> list[str]:
        wait_until(lambda: (self.folder / f"{name}.env").exists() and (self.folder / f"{name}.words").exists())
        return (self.folder / f"{name}.words").read_text().split()

    def gang(self, nodelist: str | None = None) -> SrunGang:
        return SrunGang(SPREAD, self.folder / "logs", 4, {"PARBENCH_DRIVER": "10.0.0.1:5"}, nodelist)


# --- its words ---


def test_the_step_is_said_whole_and_nothing_is_left_to_inherit() -> None:
    words = srun_command(SPREAD, Path("/shared/logs"), {"SLURM_CPUS_PER_TASK": "4"}, "n[2-3]", ["--container-image=x"])
    assert words == [
        "srun",
        "--nodes=2",
        "--ntasks=6",
        "--ntasks-per-node=3",
        "--distribution=cyclic",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--overlap",
        "--input=none",
        "--export=ALL",
        "--cpus-per-task=4",
        "--nodelist=n[2-3]",
        "--output=/shared/logs/rank-%t.log",
        "--error=/shared/logs/rank-%t.log",
        "--container-image=x",
        sys.executable,
        "-m",
        "bench.srun_rank",
    ]


def test_what_was_not_asked_for_is_not_said() -> None:
    words = srun_command(SPREAD, Path("/shared/logs"), {})
    assert not [word for word in words if word.startswith(("--cpus-per-task", "--nodelist"))]


def test_options_of_the_site_are_one_a_line() -> None:
    assert more_options({}) == []
    assert more_options({"PARBENCH_SRUN_OPTIONS": "--container-image=a b\n\n--mem=0\n"}) == [
        "--container-image=a b",
        "--mem=0",
    ]


def test_without_srun_nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="srun is not in the PATH"):
        check_srun()


# --- what it tells of an end ---


@pytest.mark.parametrize(
    ("text", "exits"),
    [
        ("", {}),
        ("srun: error: n3: task 2: Exited with exit code 3\n", {2: 3}),
        ("srun: error: n3: task 2: Killed\n", {2: -9}),
        ("srun: error: n3: task 2: Killed (core dumped)\n", {2: -9}),
        ("srun: error: n1: task 5: Segmentation fault (core dumped)\n", {5: -11}),
        ("srun: error: n1: tasks 4,6-7: Aborted\n", {4: -6}),
        ("srun: error: n1: task 0: Out Of Memory\n", {}),
        ("srun: Job step creation temporarily disabled\nsrun: error: a-b.c: task 12: Terminated\n", {12: -15}),
        ("srun: error: n3: task 2: Killed\nsrun: error: n1: tasks 0-1: Terminated\n", {2: -9}),
        ("srun: error: Task launch for StepId=1.0 failed on node n3: Communication connection failure\n", {}),
    ],
)
def test_the_first_that_ended_badly_is_known_and_those_killed_for_it_are_not_blamed(
    text: str, exits: dict[int, int]
) -> None:
    assert parse_exits(text) == exits


def test_the_first_error_is_told(slurm: FakeSlurm) -> None:
    slurm.program("srun", "echo srun: job 7 queued; echo 'srun: error: n3: no answer' >&2; echo srun: error: more >&2")
    gang = slurm.gang()
    wait_until(gang.ended)
    assert gang.told() == "srun: error: n3: no answer"
    assert gang.exits() == {}


def test_a_step_that_says_nothing_tells_nothing(slurm: FakeSlurm) -> None:
    slurm.program("srun", "true")
    gang = slurm.gang()
    wait_until(gang.ended)
    assert gang.told() == ""


# --- its life ---


def test_ranks_are_started_with_the_drivers_address_and_log_beside_the_others(slurm: FakeSlurm) -> None:
    gang = slurm.gang("n2")
    words = slurm.words("srun")
    assert "--nodelist=n2" in words
    assert f"--output={slurm.folder}/logs/gang-4/rank-%t.log" in words
    environment = (slurm.folder / "srun.env").read_text()
    assert "PARBENCH_DRIVER=10.0.0.1:5" in environment
    assert "PYTHONSAFEPATH=1" in environment
    assert not gang.ended()
    gang.end([])
    assert gang.ended()


def test_the_end_kills_ranks_here_and_has_slurm_kill_those_elsewhere_once(slurm: FakeSlurm) -> None:
    gang = slurm.gang()
    slurm.words("srun")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as here:
        gang.end([hello(here.pid, HERE), hello(here.pid), hello(here.pid)])
        assert here.wait(10) == -signal.SIGKILL
    assert gang.ended()
    assert slurm.words("scancel") == ["--signal=KILL", "17.3"]


def test_a_step_that_has_ended_is_not_cancelled(slurm: FakeSlurm) -> None:
    slurm.program("srun", "true")
    gang = slurm.gang()
    wait_until(gang.ended)
    gang.end([hello(os.getpid())])
    assert not (slurm.folder / "scancel.words").exists()


def test_an_end_without_scancel_is_an_end(slurm: FakeSlurm) -> None:
    gang = slurm.gang()
    slurm.words("srun")
    (slurm.folder / "scancel").unlink()
    gang.end([hello(1)])
    assert gang.ended()
