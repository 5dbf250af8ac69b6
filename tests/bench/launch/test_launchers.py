"""The gang of torchrun: how it is started, that it ends whole, and what is known of its end."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fakes import HERE, wait_until

from bench.launch import launchers
from bench.launch.control_channel import DriverServer, Hello
from bench.launch.launchers import (
    Launcher,
    TorchrunLauncher,
    local_state,
    loopback_variables,
)
from bench.machine.environment import interface_of

Start = Callable[..., TorchrunLauncher]


def hello(pid: int, *, rank: int = 0, host: str = HERE) -> Hello:
    return Hello(rank=rank, size=2, host=host, pid=pid, environment={})


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a gang whose torchrun is a shell script: its arguments and variables are told in files."""
    started: list[TorchrunLauncher] = []

    def start(script: str = "exec sleep 60", *, number: int = 0, **variables: str) -> TorchrunLauncher:
        fake = tmp_path / "python"
        fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nenv > {tmp_path}/env\necho hello\n{script}\n')
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(fake))
        begun = TorchrunLauncher(3, tmp_path / "logs", number, variables)
        started.append(begun)
        return begun

    yield start
    for begun in started:
        begun.end([])


def test_torchrun_is_asked_for_the_ranks_on_this_node_which_are_given_the_hub(
    gang: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARBENCH_DRIVER", "of another run")
    begun = gang(PARBENCH_DRIVER="127.0.0.1:1")
    wait_until(lambda: (tmp_path / "env").exists() and "PARBENCH_EXITS" in (tmp_path / "env").read_text())
    wait_until(lambda: (tmp_path / "logs" / "gang-0" / "torchrun.log").read_text() == "hello\n")
    words = (tmp_path / "words").read_text().split()
    assert (words[:2], words[-2:]) == (["-m", "bench.launch.torchrun_entry"], ["-m", "bench.rank.worker"])
    assert "--standalone" in words
    for option, value in {
        "--nproc-per-node": "3",
        "--local-addr": "127.0.0.1",
        "--log-dir": str(tmp_path / "logs" / "gang-0"),
    }.items():
        assert words[words.index(option) + 1] == value
    told = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert told["PARBENCH_DRIVER"] == "127.0.0.1:1"
    assert told["PYTHONSAFEPATH"] == "1", "ranks cannot be shadowed"
    assert told["PARBENCH_DRIVER_PID"] == str(os.getpid())
    assert told["PATH"] == os.environ["PATH"]
    pid = begun._process.pid
    assert os.getsid(pid) == pid != os.getsid(0), "an interrupt on the terminal does not reach the ranks"


def test_a_gang_has_ended_when_torchrun_has_with_the_exit_codes_that_were_written(gang: Start) -> None:
    assert not gang(number=0).ended()
    without = gang("read line < /dev/stdin; exit 1", number=1)  # stdin is empty
    wait_until(without.ended)
    assert without.exits() == {}
    begun = gang('echo \'{"1":-9,"0":1}\' > $PARBENCH_EXITS', number=2)
    wait_until(begun.ended)
    assert begun.exits() == {0: 1, 1: -9}


def test_an_end_kills_ranks_of_this_host_stopped_or_gone_and_torchrun(
    gang: Start, sleeper: "subprocess.Popen[bytes]"
) -> None:
    joined = Launcher()
    joined.end([hello(sleeper.pid)])  # ranks that were there are left to their launcher
    gang(number=0).end([hello(sleeper.pid, host="elsewhere")])
    time.sleep(0.1)
    assert sleeper.poll() is None
    assert (joined.can_restart, joined.ended(), joined.exits()) == (False, False, {})

    begun = gang(number=1)
    sleeper.send_signal(signal.SIGSTOP)
    begun.end([hello(sleeper.pid)])
    assert sleeper.wait(10) == -signal.SIGKILL
    assert begun.ended()
    begun.end([hello(sleeper.pid)])


def test_a_torchrun_that_does_not_end_is_killed(gang: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_PATIENCE_SECONDS", 0.3)
    begun = gang("trap '' TERM\ntouch $PARBENCH_EXITS.trapped\nwhile true; do sleep 0.05; done")
    wait_until(lambda: (tmp_path / "logs" / "gang-0" / "exits.json.trapped").exists())
    began = time.monotonic()
    begun.end([])
    assert time.monotonic() - began >= 0.3
    assert begun._process.returncode == -signal.SIGKILL


@pytest.mark.full
def test_ranks_do_not_outlive_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    with DriverServer() as hub:
        begun = TorchrunLauncher(2, tmp_path, 0, hub.variables())
        assert [hub.next(60) is None, hub.next(60) is None] == [False, False]
        family = psutil.Process(begun._process.pid).children(recursive=True)
        assert len(family) >= 2
        begun._process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        wait_until(begun.ended)


def test_the_state_of_a_process_is_told_where_it_can_be_seen(sleeper: "subprocess.Popen[bytes]") -> None:
    assert local_state(hello(os.getpid())) == "running"
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: local_state(hello(sleeper.pid)) == "stopped")
    assert local_state(hello(sleeper.pid, host="elsewhere")) is None
    sleeper.kill()
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE)
    assert local_state(hello(sleeper.pid)) == "gone", "though nobody has asked for its exit code"
    sleeper.wait()
    assert local_state(hello(sleeper.pid)) == "gone"


def test_the_loopback_interface_bears_127_0_0_1(monkeypatch: pytest.MonkeyPatch) -> None:
    name = interface_of("127.0.0.1")
    assert name in {interface for _, interface in socket.if_nameindex()}
    assert loopback_variables() == {"GLOO_SOCKET_IFNAME": name}
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert (interface_of("127.0.0.1"), loopback_variables()) == (None, {})
