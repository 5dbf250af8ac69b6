"""A child of ours that measures: told to stop when this process is, and waited for, so that it keeps what it has."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.launch.interrupts import terminated_as_interrupted
from bench.launch.processes import die_with_parent


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
