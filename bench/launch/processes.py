"""Processes that leave none behind: children told to stop with this one, and SIGTERM as an interrupt."""

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_PR_SET_PDEATHSIG = 1


def die_with_parent(sign: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(sign))


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does; only a main thread can hear signals."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended: its exit code, and what it wrote on standard error, empty where that was not caught."""

    code: int
    told: str = ""


def run_child(command: Sequence[str], *, env: Mapping[str, str] | None = None, catch_stderr: bool = False) -> Ended:
    """Run a command without input, its output discarded; ``OSError`` if it cannot be started.

    SIGTERM and Ctrl-C end the child by SIGTERM, which stops ``parbench run`` cleanly, then raise ``KeyboardInterrupt``.
    """
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if catch_stderr else None,
        text=True,
        errors="replace",
        process_group=0,  # a terminal's Ctrl-C would reach it beside our SIGTERM, and disturb its stopping
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    ) as child:
        try:
            with terminated_as_interrupted():
                _, told = child.communicate()
        except KeyboardInterrupt:
            child.terminate()
            child.communicate()
            raise
    return Ended(code=child.returncode, told=told or "")
