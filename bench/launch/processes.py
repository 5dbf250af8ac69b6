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
    """Let the kernel send this signal when the thread that started this process ends. 0 is none."""
    ctypes.CDLL(None).prctl(1, sign)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants of this process."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def get_process_space() -> str:
    """Return a text that is equal for processes that can see each other by process id.

    Host names do not suffice, because those of containers and images may be equal. Machines differ
    in their boot id, and the containers of a machine in their namespace.
    """
    texts = [socket.gethostname()]
    with suppress(OSError):
        texts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        texts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(texts)


def describe_exit(code: int) -> str:
    """Return an exit code as text. A negative code is a signal."""
    names = {sign.value: sign.name for sign in signal.Signals}  # real-time signals have none
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"


def exit_now(code: int) -> NoReturn:
    """Exit without cleanup, because a thread may wait forever and the interpreter ends slowly."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def convert_sigterm_to_interrupt() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt`` in the block, as Ctrl-C does.

    It has no effect outside of the main thread, which alone can handle signals.
    """
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
    """Run a command without input. Its output is discarded.

    Raises ``OSError`` if it cannot be started. With ``catch_stderr`` the result has its errors as
    text. SIGTERM and Ctrl-C end the child by SIGTERM, which stops ``parbench run`` cleanly, and
    then raise ``KeyboardInterrupt``.
    """
    with Popen(
        command,
        env=env,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE if catch_stderr else None,
        text=True,
        errors="replace",
        process_group=0,  # so that Ctrl-C of a terminal does not reach it, next to this SIGTERM
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    ) as child:
        try:
            with convert_sigterm_to_interrupt():
                _, errors = child.communicate()
        except KeyboardInterrupt:
            child.terminate()
            child.communicate()
            raise
    return CompletedProcess(command, child.returncode, stderr=errors)
