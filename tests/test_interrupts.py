"""SIGTERM interrupts within, and nowhere else."""

import os
import signal
import threading

import pytest

from bench.interrupts import terminated_as_interrupted


def test_sigterm_interrupts_within_and_is_as_before_after_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_leaves_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def look() -> None:
        with terminated_as_interrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
