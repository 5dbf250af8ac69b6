"""The fork server and its ranks: what launches do not share, that they end whole, and what is known of their end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parbench.bench.launch.control_channel import DriverServer, Hello
from parbench.bench.launch.launchers import ForkServer, Launcher, local_state
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.text import UserError
from tests.support.fake_runs import MODULES
from tests.support.fakes import HOSTNAME, wait_until
from tests.support.paths import IMPORT_PATH


def hello(pid: int, *, rank: int = 0, host: str = HOSTNAME) -> Hello:
    return Hello(rank=rank, size=2, host=host, pid=pid, environment={})


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Fork ranks that do what ``acts`` says instead of a driver's job, with all modules of the catalogue imported."""
    targets = {one.target.partition(":")[0] for one in load_catalogue(MODULES)}
    log = tmp_path_factory.mktemp("server") / "log"
    variables = {"PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "2"}
    with ForkServer(
        ["absent", "tests.support.acts", *sorted(targets)], variables, log, 60
    ) as opened:
        yield opened
        assert log.read_text() == ""


def launch(server: ForkServer, folder: Path, *acts: str) -> Launcher:
    """Start a rank for each act, and return once all have begun."""
    gang = server.launch(len(acts), folder, {f"ACT_{rank}": act for rank, act in enumerate(acts)})
    wait_until(lambda: all((folder / f"{rank}.pid").exists() for rank in range(len(acts))), 60)
    return gang


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]


def told(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}.log").read_text()))


def test_each_launch_has_its_own_variables_output_chance_and_place_in_memory_and_no_thread_or_gpu(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACT_0", "raise")
    one, other = (tmp_path / name for name in ("gang-0", "gang-1"))
    for folder in (one, other):
        gang = launch(server, folder, "look", "look")
        wait_until(gang.ended)
        assert gang.exits() == {0: 0, 1: 0}
    gang = launch(server, tmp_path / "gang-2", "look")
    wait_until(gang.ended)
    ranks = [
        told(one, 0),
        told(one, 1),
        told(other, 0),
        told(other, 1),
        told(tmp_path / "gang-2", 0),
    ]
    assert [rank["variables"] for rank in ranks] == [
        {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            **{f"ACT_{n}": "look" for n in range(int(size))},
        }
        for rank, size in (("0", "2"), ("1", "2"), ("0", "2"), ("1", "2"), ("0", "1"))
    ]
    for name, value in {"threads": 1, "parallel": 2, "cuda": False}.items():
        assert [rank[name] for rank in ranks] == [value] * 5, name
    for name in ("chance", "numpy_chance", "address", "pid"):
        assert len({rank[name] for rank in ranks}) == 5, name
    for rank in ranks:
        assert (rank["stdin"], rank["parent"]) == ("", ranks[0]["parent"])
        assert rank["session"] != os.getsid(0), (
            "an interrupt on the terminal does not reach the ranks"
        )


def test_how_each_rank_ended_is_known_and_one_bad_end_is_the_launchs_but_the_others_stay_until_they_are_ended(
    server: ForkServer, tmp_path: Path
) -> None:
    gang = launch(server, tmp_path / "gang", "stay", "stop", "wait")
    wait_until(lambda: psutil.Process(pids(tmp_path / "gang")[1]).status() == psutil.STATUS_STOPPED)
    assert (gang.can_restart, gang.ended(), gang.exits()) == (True, False, {})
    (tmp_path / "gang" / "go").touch()
    wait_until(gang.ended)
    assert gang.exits() == {2: 7}
    assert "SystemExit" not in (tmp_path / "gang" / "rank-2.log").read_text()
    assert all(map(psutil.pid_exists, pids(tmp_path / "gang")[:2]))
    gang.end([])
    wait_until(lambda: gang.exits() == {0: -9, 1: -9, 2: 7})
    assert not any(map(psutil.pid_exists, pids(tmp_path / "gang")))
    raised = launch(server, tmp_path / "raised", "raise")
    wait_until(raised.ended)
    assert raised.exits() == {0: 1}
    assert raised.last_error() == "RuntimeError: the roof is on fire (raised/rank-0.log)"


def test_a_rank_starts_a_new_python_where_forks_cannot_use_gpus(
    server: ForkServer, tmp_path: Path
) -> None:
    with DriverServer() as hub:
        gang = server.launch(
            1, tmp_path / "gang", {**hub.variables(), "PARBENCH_DEVICE": "cpu", "ACT_LOST": "1"}
        )
        event = hub.next(60)
        assert event is not None
        assert isinstance(event[1], Hello)
        assert psutil.Process(event[1].pid).cmdline()[1:] == ["-m", "parbench.bench.rank.worker"]
        gang.end([])
        wait_until(lambda: gang.exits() == {0: -9})


def test_ranks_do_not_outlive_a_server_that_is_killed_and_the_next_launch_has_another(
    server: ForkServer, tmp_path: Path
) -> None:
    gang = launch(server, tmp_path / "gang-0", "stay", "stop")
    server._process.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, pids(tmp_path / "gang-0"))))
    assert (gang.ended(), gang.exits()) == (True, {})
    gang.end([])
    after = launch(server, tmp_path / "gang-1", "look")
    wait_until(after.ended)
    assert after.exits() == {0: 0}


def test_a_server_and_its_ranks_end_with_the_driver_and_a_launch_ends_the_one_before(
    server: ForkServer, tmp_path: Path
) -> None:
    launch(server, tmp_path / "gang-0", "stay")
    launch(server, tmp_path / "gang-1", "stop")
    wait_until(lambda: not any(map(psutil.pid_exists, pids(tmp_path / "gang-0"))))
    assert server._process.stdin is not None
    server._process.stdin.close()  # as the system does when the driver is gone
    wait_until(
        lambda: server.ended() and not any(map(psutil.pid_exists, pids(tmp_path / "gang-1")))
    )


@pytest.mark.parametrize("end", ["the launch", "the driver"])
def test_what_a_rank_started_and_left_behind_ends_with_the_launch_or_the_driver(
    tmp_path: Path, end: str
) -> None:
    folder = tmp_path / "gang"
    with ForkServer(
        ["tests.support.acts"], {"PYTHONPATH": IMPORT_PATH}, tmp_path / "log", 60
    ) as own:
        gang = launch(own, folder, "litter")
        wait_until(gang.ended)
        assert gang.exits() == {0: 0}
        child = psutil.Process(int((folder / "child.pid").read_text()))
        assert child.ppid() == own._process.pid
        if end == "the launch":
            gang.end([])
            wait_until(lambda: not child.is_running())
            assert not own.ended()
    wait_until(lambda: not child.is_running())


def test_a_folder_of_logs_that_cannot_be_made_is_a_sentence_and_starts_nothing(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(UserError, match=r"logs/gang-0 cannot be written: Not a directory$"):
        server.launch(2, tmp_path / "logs" / "gang-0", {})


def test_ranks_that_were_there_are_left_to_their_launcher(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    joined = Launcher()
    joined.end([hello(sleeper.pid)])
    time.sleep(0.1)
    assert sleeper.poll() is None
    assert (joined.can_restart, joined.ended(), joined.exits()) == (False, False, {})


def test_the_state_of_a_process_is_told_where_it_can_be_seen(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    assert local_state(hello(os.getpid())) == "running"
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: local_state(hello(sleeper.pid)) == "stopped")
    assert local_state(hello(sleeper.pid, host="elsewhere")) is None
    sleeper.kill()
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE)
    assert local_state(hello(sleeper.pid)) == "gone", "though nobody has asked for its exit code"
    sleeper.wait()
    assert local_state(hello(sleeper.pid)) == "gone"
