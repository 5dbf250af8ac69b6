"""The position of a rank in its current case, which the watchdog reports if the rank hangs."""

import sys
import threading
import time
import traceback

from parbench.bench.launch.messages import HangReport
from parbench.bench.world import accelerator


class Progress:
    """The position of a rank in its current case, which is reported if the rank hangs."""

    def __init__(self) -> None:
        """Store the id of the calling thread, which measures and whose position is reported."""
        self._thread = threading.get_ident()
        self.phase = "starting"
        """One of ``starting``, ``prepare``, ``check``, ``warm-up``, ``timed`` and ``explain``."""
        self.steps = 0
        """The number of samples and untimed steps that the rank has begun in the current case."""
        self.seconds = 0.0
        """The ``time.monotonic()`` at which all ranks last began a block or a step together."""

    def restart(self) -> None:
        """Note that all ranks begin a block or a step now, from which the timeout is counted."""
        self.seconds = time.monotonic()

    def make_hang_report(self) -> HangReport:
        """Return a report about the position of the measuring thread, with its Python stack.

        The position is the phase of the case and the number of begun steps. The watchdog thread
        calls this while the measuring thread hangs, and adds the index of the block and the state
        of the process groups.
        """
        # DDP waits for its buckets in autograd's engine, and NCCL's work in a synchronize.
        waiting_modules = ("torch.distributed", "torch.autograd", accelerator.WAITING_MODULE)
        frame = sys._current_frames().get(self._thread)
        frames = [frame for frame, _ in traceback.walk_stack(frame)] if frame else []
        modules = [frame.f_globals.get("__name__", "") for frame in frames]
        return HangReport(
            phase=self.phase,
            steps=self.steps,
            communicates=any(name.startswith(waiting_modules) for name in modules),
            stack="".join(traceback.format_stack(frame)) if frame else "",
        )
