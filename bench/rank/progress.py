"""Where a rank is in its case, told to the driver when it asks."""

import sys
import threading
import traceback

from bench.launch.messages import Where

# Where a rank waits for others: DDP's buckets are waited for in autograd's engine, NCCL's work in a synchronize.
_WAITS = ("torch.distributed", "torch.autograd", "torch.cuda")


class Progress:
    """Counts the steps that this rank has begun in its present case; one thread measures, another reads."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.phase = "starting"
        self.steps = 0

    def enter(self, phase: str) -> None:
        """Begin a phase of a case: prepare, check, warm-up, timed."""
        self.phase = phase
        if phase == "prepare":
            self.steps = 0

    def where(self) -> Where:
        """Return where the thread that measures is."""
        frame = sys._current_frames().get(self._thread)
        modules = [deeper.f_globals.get("__name__", "") for deeper, _ in traceback.walk_stack(frame)] if frame else []
        return Where(
            phase=self.phase,
            steps=self.steps,
            communicates=any(name.startswith(_WAITS) for name in modules),
            stack="".join(traceback.format_stack(frame)) if frame else "",
        )
