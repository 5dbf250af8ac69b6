"""Where things stand in this checkout, and the environment in which a process of its own finds the tests' modules."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
_FOLDERS = [str(ROOT), *sorted({str(path.parent) for path in TESTS.rglob("*.py")})]
IMPORT_PATH = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
"""This checkout, and every folder of tests: a rank imports what it is sent by the name of its module alone."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": IMPORT_PATH}
