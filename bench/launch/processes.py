"""No process is left behind: a child asks to be ended with its parent."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(sign: signal.Signals) -> None:
    """Ask Linux to send this process ``sign`` when its parent ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(sign))
