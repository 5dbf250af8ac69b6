"""A child that measures stops when its parent is told to, once, and is waited for: real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from parbench.bench.launch.processes import run_child, terminated_as_interrupted
from tests.support.fakes import wait_until
from tests.support.paths import ROOT

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
from parbench.bench.launch.processes import run_child
try:
    run_child([sys.executable, "-c", {child!r}, sys.argv[1]])
except KeyboardInterrupt:
    Path(sys.argv[1], "interrupted").write_text(str(Path(sys.argv[1], "kept").exists()))
"""


def parent(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process that waits for a child, in a group of its own as a shell does, and return once that runs."""
    command = [sys.executable, "-c", PARENT.format(child=CHILD), str(folder)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, process_group=0
    )
    wait_until((folder / "ready").exists, 20)
    return process


def test_a_child_has_the_variables_that_are_given_and_ends_with_its_code_and_its_words() -> None:
    before = signal.getsignal(signal.SIGTERM)
    code = (
        "import os, sys; print('a record'); print('no such case', file=sys.stderr); "
        "sys.exit(int(os.environ['CODE']))"
    )
    words = [sys.executable, "-c", code]
    done = run_child(words, env={**os.environ, "CODE": "7"}, catch_stderr=True)
    assert (done.returncode, done.stderr) == (7, "no such case\n")
    assert signal.getsignal(signal.SIGTERM) is before, "signals are heard as before afterwards"
    with pytest.raises(FileNotFoundError):
        run_child(["absent-python"])


@pytest.mark.parametrize(
    ("tell", "sign"),
    [
        (os.kill, signal.SIGTERM),
        (os.kill, signal.SIGINT),
        (os.killpg, signal.SIGINT),
    ],  # the last is a terminal's
)
def test_a_signal_stops_the_child_once_which_keeps_what_it_has(
    tmp_path: Path, tell: Callable[[int, int], None], sign: signal.Signals
) -> None:
    with parent(tmp_path) as process:
        tell(process.pid, sign)
        process.wait(timeout=20)
    assert (tmp_path / "interrupted").read_text() == "True", "the parent waited for it"
    assert (tmp_path / "kept").read_text() == "SIGTERM"


def test_a_parent_that_is_killed_leaves_no_child(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        process.kill()
        process.wait(timeout=20)
    wait_until((tmp_path / "kept").exists, 20)


def test_sigterm_interrupts_within_on_the_main_thread_alone_and_is_as_before_after_it() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before

    def look() -> None:
        with terminated_as_interrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
