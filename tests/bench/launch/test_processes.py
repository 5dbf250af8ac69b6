"""A child that measures is stopped once with its parent, and no child is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parbench.bench.launch.processes import (
    convert_sigterm_to_interrupt,
    die_with_parent,
    run_child,
)
from tests.support.fakes import wait_until
from tests.support.paths import environment

# The child notes each signal until it has taken 0.3 s to stop.
CHILD = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
names = []
def note(number, frame):
    names.append(signal.Signals(number).name)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
(folder / "ready").touch()
while not names:
    time.sleep(0.01)
time.sleep(0.3)
(folder / "signals").write_text(" ".join(names))
"""
PARENT = f"""
import sys
from pathlib import Path
from parbench.bench.launch.processes import run_child
folder = Path(sys.argv[1])
try:
    run_child([sys.executable, "-c", {CHILD!r}, str(folder)])
except KeyboardInterrupt:
    (folder / "interrupted").write_text(str((folder / "signals").exists()))
"""


def start_parent(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process with a child in a process group of its own, as a shell does."""
    command = [sys.executable, "-c", PARENT, str(folder)]
    process = subprocess.Popen(command, env=environment(), process_group=0)
    wait_until((folder / "ready").exists, 20)
    return process


def test_run_child_passes_variables_and_returns_the_exit() -> None:
    code = (
        "import os, sys; print('no such case', file=sys.stderr); sys.exit(int(os.environ['X']))"
    )
    command = [sys.executable, "-c", code]
    result = run_child(command, env={**os.environ, "X": "7"}, catch_stderr=True)
    assert result.returncode == 7
    assert result.stderr == "no such case\n"


@pytest.mark.parametrize(
    ("kill", "sign"),
    # A terminal sends Ctrl-C to the whole process group.
    [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT)],
)
def test_signal_to_the_parent_stops_the_child_once(
    tmp_path: Path, kill: Callable[[int, int], None], sign: signal.Signals
) -> None:
    with start_parent(tmp_path) as process:
        kill(process.pid, sign)
        process.wait(timeout=20)
    assert (tmp_path / "interrupted").read_text() == "True", "the parent waited for the child"
    assert (tmp_path / "signals").read_text() == "SIGTERM"


def test_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    with start_parent(tmp_path) as process:
        process.kill()
        process.wait(timeout=20)
    wait_until((tmp_path / "signals").exists, 20)


def test_sigterm_raises_keyboard_interrupt_and_is_restored() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), convert_sigterm_to_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("has_parent", [True, False])
def test_child_of_an_ended_parent_ends(has_parent: bool) -> None:
    parent = os.getpid() if has_parent else os.getppid()
    command = [sys.executable, "-c", ""]
    child = subprocess.run(
        command, preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent), check=False
    )
    assert child.returncode == (0 if has_parent else -signal.SIGKILL)
