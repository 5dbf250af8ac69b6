"""Where a rank is in its case, told to the driver when it asks."""

import sys
import threading
import traceback

from bench.messages import Where


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
        """Return the phase, the steps begun, and the stack of the thread that measures."""
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        return Where(phase=self.phase, iteration=self.steps, stack=stack)
