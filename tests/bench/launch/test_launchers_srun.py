"""srun as the gang's starter: its words, where its ranks sit and meet, what it tells of an end, and no step stays."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.launch import launchers
from parbench.bench.launch.control_channel import Hello
from parbench.bench.launch.driver import placement_warnings, rank_placement
from parbench.bench.launch.launchers import SrunLauncher, parse_exits, srun_command
from parbench.bench.machine.environment import RankPlace
from parbench.bench.machine.slurm_allocation import NodeLayout, check_srun, srun_words
from parbench.bench.rank import worker
from parbench.bench.rank.worker import Meeting
from tests.support.fakes import HOSTNAME, wait_until
from tests.support.refusals import usage_error

SPREAD = NodeLayout(nodes=2, ntasks_per_node=3, placement="cyclic")


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
        wait_until(
            lambda: (
                (self.folder / f"{name}.env").exists() and (self.folder / f"{name}.words").exists()
            )
        )
        return (self.folder / f"{name}.words").read_text().split()

    def gang(self, nodelist: str | None = None, number: int = 4) -> SrunLauncher:
        return SrunLauncher(
            SPREAD, self.folder / "logs", number, {"PARBENCH_DRIVER": "10.0.0.1:5"}, nodelist
        )


def test_the_step_is_said_whole_and_nothing_is_left_to_inherit_and_srun_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = {"SLURM_CPUS_PER_TASK": "4", "PARBENCH_SRUN_OPTIONS": "--container-image=x"}
    words = srun_command(SPREAD, Path("/shared/logs"), told, "n[2-3]")
    always = (
        "srun --nodes=2 --ntasks=6 --ntasks-per-node=3 --distribution=cyclic --kill-on-bad-exit=1"
    )
    step = ["--mpi=none", "--overlap", "--input=none", "--export=ALL"]
    logs = ["--output=/shared/logs/rank-%t.log", "--error=/shared/logs/rank-%t.log"]
    ranks = [sys.executable, "-m", "parbench.bench.rank.worker", "srun"]
    asked = ["--cpus-per-task=4", "--nodelist=n[2-3]"]
    assert words == [*always.split(), *asked, *logs, *step, "--container-image=x", *ranks]
    assert srun_command(SPREAD, Path("/shared/logs"), {}) == [*always.split(), *logs, *step, *ranks]
    told = {
        "PARBENCH_SRUN_OPTIONS": "--container-image=a b\n\n--mem=0\n"
    }  # options of the site are one a line
    assert srun_words(told, "-N1") == ["srun", "-N1", *step, "--container-image=a b", "--mem=0"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "srun is not in the PATH" in usage_error(check_srun)


def test_the_first_that_ended_badly_is_known_and_those_killed_for_it_are_not_blamed() -> None:
    for text, exits in {
        "": {},
        "srun: error: n3: task 2: Exited with exit code 3\n": {2: 3},
        "srun: error: n3: task 2: Killed (core dumped)\n": {2: -9},
        "srun: error: n1: task 5: Segmentation fault (core dumped)\n": {5: -11},
        "srun: error: n1: tasks 4,6-7: Aborted\n": {4: -6},
        "srun: error: n1: task 0: Out Of Memory\n": {},
        "srun: Job step creation temporarily disabled\nsrun: error: a-b.c: task 12: Terminated\n": {
            12: -15
        },
        "srun: error: n3: task 2: Killed\nsrun: error: n1: tasks 0-1: Terminated\n": {2: -9},
        "srun: error: Task launch for StepId=1.0 failed on node n3: Communication connection failure\n": {},
    }.items():
        assert parse_exits(text) == exits, text


def test_the_first_error_is_told_or_nothing(slurm: FakeSlurm) -> None:
    told = (
        "echo srun: job 7 queued; echo 'srun: error: n3: no answer' >&2; echo srun: error: more >&2"
    )
    for number, (script, error) in enumerate(((told, "srun: error: n3: no answer"), ("true", ""))):
        slurm.program("srun", script)
        gang = slurm.gang(number=number)
        wait_until(gang.ended)
        assert (gang.last_error(), gang.exits()) == (error, {})
        gang.end([hello(os.getpid())])  # a step that has ended is not cancelled
        assert not (slurm.folder / "scancel.words").exists()


def test_ranks_are_started_with_the_drivers_address_and_killed_here_and_by_slurm_elsewhere_once(
    slurm: FakeSlurm,
) -> None:
    gang = slurm.gang("n2")
    words = slurm.words("srun")
    assert {"--nodelist=n2", f"--output={slurm.folder}/logs/gang-4/rank-%t.log"} <= set(words)
    told = set((slurm.folder / "srun.env").read_text().splitlines())
    assert {"PARBENCH_DRIVER=10.0.0.1:5"} <= told
    assert not gang.ended()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as here:
        gang.end([hello(here.pid, HOSTNAME), hello(here.pid), hello(here.pid)])
        assert here.wait(10) == -signal.SIGKILL
    assert gang.ended()
    assert slurm.words("scancel") == ["--signal=KILL", "17.3"]

    gang = slurm.gang(number=5)
    (slurm.folder / "scancel").unlink()
    gang.end([hello(1)])  # an end without scancel is an end
    assert gang.ended()


def test_rank_0_binds_a_free_port_and_the_others_find_what_it_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for value in (b"one gang", b"another"):
        first, second = Meeting(0), Meeting(1)
        where = first.offer("127.0.0.1")
        assert second.offer("127.0.0.1") == ""
        store = first.join(where)
        store.set("here", value.decode())
        other = second.join(where)
        other.set_timeout(timedelta(seconds=10))
        assert other.get("here") == value
        assert other is not store
    assert Meeting(0).offer("127.0.0.1") != where, "two gangs on a host meet apart"


def test_gloo_takes_the_interface_that_reaches_the_driver_unless_the_user_has_named_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "interface_of", {"127.0.0.1": "eth7"}.get)
    for address, before, after in (
        ("127.0.0.1", None, "eth7"),
        ("127.0.0.1", "ib0", "ib0"),
        ("10.0.0.1", None, None),  # of no interface
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")
        if before is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        Meeting(1).offer(address)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == after


BLOCK = NodeLayout(nodes=2, ntasks_per_node=2)
CYCLIC = NodeLayout(nodes=2, ntasks_per_node=2, placement="cyclic")


def seated(
    hosts: str, cpus: tuple[tuple[int, ...], ...] = ((0, 1),) * 4, **place: Any
) -> list[Hello]:
    """Return what ranks say on hosts of a letter each, promised two CPUs."""
    return [
        Hello(
            rank=rank,
            size=4,
            host=host,
            pid=1,
            environment={"variables": {"SLURM_CPUS_PER_TASK": str(len(max(cpus, key=len)))}},
            place=RankPlace(host=host, cpus=cpus[rank], numa_nodes=(0,), **place),
        )
        for rank, host in enumerate(hosts)
    ]


def test_hosts_are_listed_by_rank_with_their_switch_paths_and_one_host_is_no_news() -> None:
    assert rank_placement([*seated("ab", switches="s.l1"), *seated("a")]) == {
        "hosts": ["a", "b", "a"],
        "switches": {"a": "s.l1", "b": "s.l1"},
    }
    assert rank_placement(seated("ab")) == {"hosts": ["a", "b"]}
    assert rank_placement(seated("aa")) == {}


def test_ranks_that_sit_otherwise_than_asked_raise_a_doubt() -> None:
    for spread, fine, others in (
        (BLOCK, ("aabb", "bbaa"), ("abab", "abba")),
        (CYCLIC, ("abab", "baba"), ("aabb", "abba")),
    ):
        for hosts in fine:
            assert placement_warnings(spread, seated(hosts)) == (), hosts
        for hosts in others:
            told = f"placement {spread.placement} was asked for; ranks are on {', '.join(hosts)}"
            assert placement_warnings(spread, seated(hosts)) == (told,)
    for hosts, found in {
        "aaab": "3 on a, 1 on b",
        "aaaa": "4 on a",
        "aabc": "2 on a, 1 on b, 1 on c",
    }.items():
        told = f"2 nodes with 2 ranks each were asked for; there are {found}"
        assert placement_warnings(BLOCK, seated(hosts)) == (told,)
    fewer = seated("aabb", ((0, 1), (0,), (0, 1), (4, 5)))
    assert placement_warnings(BLOCK, fewer) == (
        "rank 1 on a may use CPUs 0; SLURM_CPUS_PER_TASK is 2",
    )
    shared = seated("aabb", ((3,), (3,), (3,), (2,)))
    assert placement_warnings(BLOCK, shared) == ("2 ranks share CPU 3 of a",)
    nowhere = [
        Hello(rank=rank, size=4, host=host, pid=1, environment={})
        for rank, host in enumerate("aabb")
    ]
    assert placement_warnings(BLOCK, nowhere) == ()


def test_an_srun_that_does_not_end_is_killed(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_PATIENCE_SECONDS", 0.3)
    slurm.program(
        "srun", f"trap '' TERM; touch {slurm.folder}/deaf; while true; do sleep 0.05; done"
    )
    gang = slurm.gang()
    wait_until((slurm.folder / "deaf").exists)
    gang.end([])
    assert gang._process.returncode == -signal.SIGKILL
