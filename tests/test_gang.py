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

from bench import gang as module
from bench.channel import Hub
from bench.gang import JoinedGang, TorchrunGang, local_state, loopback_interface, loopback_variables
from bench.messages import Hello

pytestmark = pytest.mark.measures

Start = Callable[..., TorchrunGang]


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
    started: list[TorchrunGang] = []

    def start(script: str = "exec sleep 60", *, number: int = 0, **variables: str) -> TorchrunGang:
        fake = tmp_path / "python"
        fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nenv > {tmp_path}/env\necho hello\n{script}\n')
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(fake))
        begun = TorchrunGang(3, tmp_path / "logs", number, variables)
        started.append(begun)
        return begun

    yield start
    for begun in started:
        begun.end([])


def variables_of(folder: Path) -> dict[str, str]:
    wait_until(lambda: (folder / "env").exists() and "PARBENCH_EXITS" in (folder / "env").read_text())
    return dict(line.partition("=")[::2] for line in (folder / "env").read_text().splitlines())


# --- starting ---


def test_torchrun_is_asked_for_the_ranks_on_this_node(gang: Start, tmp_path: Path) -> None:
    gang()
    variables_of(tmp_path)
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == ["-m", "bench.agent"]
    assert words[-2:] == ["-m", "bench.worker"]
    assert words[words.index("--nproc-per-node") + 1] == "3"
    assert words[words.index("--local-addr") + 1] == "127.0.0.1"
    assert words[words.index("--log-dir") + 1] == str(tmp_path / "logs" / "gang-0")
    assert "--standalone" in words


def test_ranks_are_given_the_hub_and_cannot_be_shadowed(
    gang: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARBENCH_DRIVER", "of another run")
    gang(PARBENCH_DRIVER="127.0.0.1:1")
    told = variables_of(tmp_path)
    assert told["PARBENCH_DRIVER"] == "127.0.0.1:1"
    assert told["PYTHONSAFEPATH"] == "1"
    assert told["PARBENCH_DRIVER_PID"] == str(os.getpid())
    assert told["PATH"] == os.environ["PATH"]


def test_what_torchrun_says_is_in_the_gangs_own_log(gang: Start, tmp_path: Path) -> None:
    gang(number=0)
    gang(number=1)
    logs = [tmp_path / "logs" / f"gang-{number}" / "torchrun.log" for number in (0, 1)]
    wait_until(lambda: [log.read_text() for log in logs] == ["hello\n"] * 2)


def test_an_interrupt_on_the_terminal_does_not_reach_the_ranks(gang: Start) -> None:
    begun = gang()
    pid = begun._process.pid
    assert os.getsid(pid) == pid != os.getsid(0)


# --- the end ---


def test_a_gang_has_ended_when_torchrun_has(gang: Start) -> None:
    begun = gang("read line < /dev/stdin; exit 1")  # stdin is empty
    wait_until(begun.ended)
    assert begun.exits() == {}


def test_a_gang_that_runs_has_not_ended(gang: Start) -> None:
    assert not gang().ended()


def test_the_exit_codes_are_those_that_were_written(gang: Start) -> None:
    begun = gang('echo \'{"1":-9,"0":1}\' > $PARBENCH_EXITS')
    wait_until(begun.ended)
    assert begun.exits() == {0: 1, 1: -9}


def test_an_end_kills_ranks_that_are_stopped_and_torchrun(gang: Start, sleeper: "subprocess.Popen[bytes]") -> None:
    begun = gang()
    sleeper.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    begun.end([hello(sleeper.pid)])
    assert sleeper.wait(10) == -signal.SIGKILL
    assert begun.ended()
    assert time.monotonic() - began < 4


def test_an_end_leaves_processes_of_other_hosts_alone(gang: Start, sleeper: "subprocess.Popen[bytes]") -> None:
    gang().end([hello(sleeper.pid, host="elsewhere")])
    time.sleep(0.1)
    assert sleeper.poll() is None


def test_an_end_of_ranks_that_are_gone_does_no_harm(gang: Start, sleeper: "subprocess.Popen[bytes]") -> None:
    sleeper.kill()
    sleeper.wait()
    begun = gang()
    begun.end([hello(sleeper.pid)])
    begun.end([hello(sleeper.pid)])
    assert begun.ended()


def test_a_torchrun_that_does_not_end_is_killed(gang: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.3)
    begun = gang("trap '' TERM\ntouch $PARBENCH_EXITS.trapped\nwhile true; do sleep 0.05; done")
    wait_until(lambda: (tmp_path / "logs" / "gang-0" / "exits.json.trapped").exists())
    began = time.monotonic()
    begun.end([])
    assert 0.3 <= time.monotonic() - began < 3
    assert begun._process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_real_ranks_come_say_who_they_are_and_end_whole(tmp_path: Path) -> None:
    with Hub() as hub:
        begun = TorchrunGang(2, tmp_path, 0, {**hub.variables(), "OMP_NUM_THREADS": "1"})
        try:
            said = [event.what for event in (hub.next(60), hub.next(60)) if event is not None]
            hellos = [told for told in said if isinstance(told, Hello)]
            assert sorted(told.rank for told in hellos) == [0, 1]
            assert [told.environment["torch"]["threads"] for told in hellos] == [1, 1]
            family = [psutil.Process(begun._process.pid), *(psutil.Process(told.pid) for told in hellos)]
            os.kill(hellos[0].pid, signal.SIGSTOP)
            wait_until(lambda: local_state(hellos[0]) == "stopped")
            began = time.monotonic()
            begun.end(hellos)
            assert time.monotonic() - began < 10
            _, alive = psutil.wait_procs(family, timeout=10)
            assert alive == []
        finally:
            begun.end([])
    assert list(tmp_path.glob("gang-0/**/stderr.log"))


@pytest.mark.slow
def test_ranks_do_not_outlive_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    with Hub() as hub:
        begun = TorchrunGang(2, tmp_path, 0, hub.variables())
        assert [hub.next(60) is None, hub.next(60) is None] == [False, False]
        family = psutil.Process(begun._process.pid).children(recursive=True)
        assert len(family) >= 2
        begun._process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        wait_until(begun.ended)


# --- ranks that were there, and what can be seen of any ---


def test_ranks_that_were_there_are_left_to_their_launcher(sleeper: "subprocess.Popen[bytes]") -> None:
    joined = JoinedGang()
    joined.end([hello(sleeper.pid)])
    time.sleep(0.05)
    assert sleeper.poll() is None
    assert (joined.can_restart, joined.ended(), joined.exits()) == (False, False, {})


def test_the_state_of_a_process_is_told_where_it_can_be_seen(sleeper: "subprocess.Popen[bytes]") -> None:
    assert local_state(hello(os.getpid())) == "running"
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: local_state(hello(sleeper.pid)) == "stopped")
    assert local_state(hello(sleeper.pid, host="elsewhere")) is None
    sleeper.kill()
    sleeper.wait()
    assert local_state(hello(sleeper.pid)) == "gone"


def test_the_loopback_interface_bears_127_0_0_1(monkeypatch: pytest.MonkeyPatch) -> None:
    name = loopback_interface()
    assert name in {interface for _, interface in socket.if_nameindex()}
    assert loopback_variables() == {"GLOO_SOCKET_IFNAME": name}
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert loopback_interface() is None
    assert loopback_variables() == {}
