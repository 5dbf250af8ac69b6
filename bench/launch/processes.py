"""Starting and ending processes so that none is left behind, and SIGTERM as an interrupt."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen
from typing import NoReturn

PARBENCH = (sys.executable, "-m", "parbench")
"""The command line that starts parbench with the Python interpreter of this process."""


def die_with_parent(sign: int, parent: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends.

    If the parent has ended already, this process sends itself the signal.

    Args:
        sign: the number of the signal.
        parent: the process id of the parent.
    """
    ctypes.CDLL(None).prctl(1, sign)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), sign)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents have ended."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def get_process_space() -> str:
    """Return a text that is equal for processes that can see each other by process id.

    It consists of the host name, the boot id of the kernel and the namespace of process ids. Host
    names do not suffice, because those of containers and images may be equal.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot_id} {Path('/proc/self/ns/pid').readlink()}"


def describe_exit(code: int) -> str:
    """Return an exit code as text: ``exit code 1``, or ``ended by SIGKILL`` for the code -9."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def exit_now(code: int) -> NoReturn:
    """Exit this process with a code, without cleanup except to flush its standard output.

    Cleanup might wait forever for a thread, and the interpreter ends slowly.
    """
    sys.stdout.flush()
    os._exit(code)


@contextmanager
def convert_sigterm_to_interrupt() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt`` within the ``with`` statement, as Ctrl-C does.

    Only the main thread can call this, because other threads cannot handle signals.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_child(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, catch_stderr: bool = False
) -> CompletedProcess[str]:
    """Run a command to its end, without input, and return its exit code in a ``CompletedProcess``.

    The standard output of the command is discarded. SIGTERM and Ctrl-C end the child by SIGTERM,
    which stops ``parbench run`` cleanly, and then raise ``KeyboardInterrupt``. Raises ``OSError``
    if the command cannot be started.

    Args:
        command: the program and its arguments.
        env: the environment variables of the child, None for those of this process.
        catch_stderr: True if the result has the standard error of the child as text. Otherwise the
            child writes to the standard error of this process.
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
        preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
    ) as child:
        try:
            with convert_sigterm_to_interrupt():
                _, errors = child.communicate()
        except KeyboardInterrupt:
            child.terminate()
            child.communicate()
            raise
    return CompletedProcess(command, child.returncode, stderr=errors)
