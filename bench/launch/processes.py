"""Starting and ending processes so that none is left behind, and SIGTERM as an interrupt."""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen
from typing import NoReturn

PARBENCH = (sys.executable, "-m", "parbench")
"""The command that starts parbench with the running interpreter."""


def die_with_parent(sign: int) -> None:
    """Be sent this signal when the thread that started this process ends; 0 is none from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, sign)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Be the parent of what children of this process start and leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def process_space() -> str:
    """Return a text that processes share which can see each other by process id.

    Host names do not suffice: those of containers and images may be equal. The boot id tells machines apart, and the
    namespace tells the containers of one machine apart.
    """
    texts = [socket.gethostname()]
    with suppress(OSError):
        texts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        texts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(texts)


def describe_exit(code: int) -> str:
    """Describe how a process ended that left this code; a negative one is a signal's."""
    names = {sign.value: sign.name for sign in signal.Signals}  # real-time signals have none
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"


def exit_now(code: int) -> NoReturn:
    """End at once: a thread may wait for ever, and the interpreter's own way out takes noticeably long."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does; only a main thread can hear signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_child(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, catch_stderr: bool = False
) -> CompletedProcess[str]:
    """Run a command without input, its output discarded; ``OSError`` if it cannot be started.

    SIGTERM and Ctrl-C end the child by SIGTERM, which stops ``parbench run`` cleanly, then raise ``KeyboardInterrupt``.
    """
    with Popen(
        command,
        env=env,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE if catch_stderr else None,
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
    return CompletedProcess(command, child.returncode, stderr=told)
