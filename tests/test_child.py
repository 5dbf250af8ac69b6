"""A child that measures stops when its parent is told to, once, and is waited for: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.child import Ended, run_child

ROOT = Path(__file__).parent.parent
CHILD = """
import signal, sys, time
from pathlib import Path
folder, heard = Path(sys.argv[1]), []
def stop(number, frame):
    heard.append(signal.Signals(number).name)
for sign in (signal.SIGTERM, signal.SIGINT):
    signal.signal(sign, stop)
(folder / "ready").touch()
while not heard:
    time.sleep(0.01)
time.sleep(0.3)  # as long as it takes to stop cleanly
(folder / "kept").write_text(" ".join(heard))
"""
PARENT = """
import sys, time
from pathlib import Path
from bench.child import run_child
try:
    run_child([sys.executable, "-c", {child!r}, sys.argv[1]])
except KeyboardInterrupt:
    Path(sys.argv[1], "interrupted").write_text(str(Path(sys.argv[1], "kept").exists()))
"""


def wait_for(come: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def parent(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process that waits for a child, in a group of its own as a shell does, and return once that runs."""
    command = [sys.executable, "-c", PARENT.format(child=CHILD), str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, process_group=0)
    wait_for((folder / "ready").exists)
    return process


def test_a_child_ends_with_its_code_and_its_words() -> None:
    words = [sys.executable, "-c", "import sys; print('a record'); print('no such case', file=sys.stderr); sys.exit(2)"]
    assert run_child(words, catch_stderr=True) == Ended(code=2, told="no such case\n")


def test_a_child_has_the_variables_that_are_given() -> None:
    words = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"]
    assert run_child(words, env={**os.environ, "CODE": "7"}).code == 7


def test_a_command_that_is_none_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        run_child(["absent-python"])


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_child_which_keeps_what_it_has(tmp_path: Path, sign: signal.Signals) -> None:
    with parent(tmp_path) as process:
        process.send_signal(sign)
        process.wait(timeout=20)
    assert (tmp_path / "interrupted").read_text() == "True", "the parent waited for it"
    assert (tmp_path / "kept").read_text() == "SIGTERM"


def test_a_terminals_interrupt_is_heard_once(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=20)
    assert (tmp_path / "kept").read_text() == "SIGTERM"


def test_a_parent_that_is_killed_leaves_no_child(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        process.kill()
        process.wait(timeout=20)
    wait_for((tmp_path / "kept").exists)


def test_signals_are_heard_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_child([sys.executable, "-c", ""])
    assert signal.getsignal(signal.SIGTERM) is before
