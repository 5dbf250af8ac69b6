"""The gang: all ranks of one launch. torchrun starts them on this node, or they are there already; srun's is apart."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from bench.launch.messages import Hello

_PATIENCE_SECONDS = 5.0


class Gang(Protocol):
    """What the driver needs of a gang; it learns everything else from the ranks themselves."""

    can_restart: bool

    def ended(self) -> bool:
        """Say whether the gang is known to have ended."""

    def exits(self) -> dict[int, int]:
        """Return the exit codes of the ranks that ended badly, as far as they are known."""

    def told(self) -> str:
        """Return what the launcher itself said went wrong, nothing if it said nothing worth repeating."""

    def end(self, ranks: Iterable[Hello]) -> None:
        """End every rank, stopped ones too."""


class TorchrunGang:
    """Ranks on this node, started by torchrun with a free port; their output goes to ``logs/gang-<number>``."""

    can_restart = True

    def __init__(self, nproc: int, logs: Path, number: int, variables: Mapping[str, str]) -> None:
        self._folder = logs / f"gang-{number}"
        self._folder.mkdir(parents=True)
        self._exits = self._folder / "exits.json"
        command = [sys.executable, "-m", "bench.rank.agent", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(nproc), "--log-dir", str(self._folder), "--redirects", "3"]
        environment = {
            **os.environ,
            **variables,
            "PYTHONSAFEPATH": "1",
            "PARBENCH_EXITS": str(self._exits),
            "PARBENCH_DRIVER_PID": str(os.getpid()),
        }
        self._process = start_process([*command, "-m", "bench.rank.worker"], environment, self._folder / "torchrun.log")

    def ended(self) -> bool:
        """Say whether torchrun has ended."""
        return self._process.poll() is not None

    def exits(self) -> dict[int, int]:
        """Return the ranks' exit codes as torchrun saw them; negative is a signal."""
        if not self._exits.exists():
            return {}
        return msgspec.json.decode(self._exits.read_bytes(), type=dict[int, int])

    def told(self) -> str:
        """Nothing: torchrun's words are about itself."""
        return ""

    def end(self, ranks: Iterable[Hello]) -> None:
        """Kill the ranks and end torchrun; returns when they are gone."""
        host = socket.gethostname()
        for hello in ranks:
            if hello.host == host:
                kill(hello.pid)
        end_process(self._process)


class JoinedGang:
    """Ranks that another launcher started, this process among them: they cannot be started again from here."""

    can_restart = False

    def ended(self) -> bool:
        """The launcher watches its ranks; here only their connections tell."""
        return False

    def exits(self) -> dict[int, int]:
        """Nothing is known: the exit codes are the launcher's."""
        return {}

    def told(self) -> str:
        """Nothing is known."""
        return ""

    def end(self, ranks: Iterable[Hello]) -> None:
        """Nothing to do: ranks end when the driver's process does, and their launcher sees it."""


def local_state(hello: Hello) -> str | None:
    """Return the process state of a rank on this host, such as ``stopped``; None where it cannot be seen."""
    if hello.host != socket.gethostname():
        return None
    try:
        return str(psutil.Process(hello.pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def loopback_interface() -> str | None:
    """Return the name of the interface that holds 127.0.0.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None


def loopback_variables() -> dict[str, str]:
    """Return what keeps gloo's groups within this node; ranks of NCCL have one too, for control."""
    loopback = loopback_interface()
    # by host name gloo may pick an interface that is not even up
    return {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback}


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a launcher whose output goes to a file; Ctrl-C is the driver's alone."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Ask a launcher to end, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill(pid: int) -> None:
    """Kill a process of this host, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
