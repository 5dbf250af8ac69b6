"""Folders of this checkout, and the environment of processes that tests start."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
PROCESS_COUNT = SUPPORT / "process_count"
IMPORT_PATH = os.pathsep.join(
    [str(PROCESS_COUNT), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
"""``PYTHONPATH`` of a process that imports ``parbench`` and ``tests`` from this checkout."""


def environment() -> dict[str, str]:
    """Return a copy of the environment in which this checkout can be imported."""
    return {**os.environ, "PYTHONPATH": IMPORT_PATH}
