"""Where things stand in this checkout, and the environment in which a process of its own finds the tests' modules."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
IMPORT_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""A process that a test starts imports ``parbench`` and ``tests`` from this checkout."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": IMPORT_PATH}
