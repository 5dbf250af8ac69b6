"""Folders of this checkout, and the environment of processes that tests start."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Command = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
IMPORT_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""``PYTHONPATH`` of a process that imports ``parbench`` and ``tests`` from this checkout."""


def environment() -> dict[str, str]:
    """Return a copy of the environment in which this checkout can be imported.

    A pytest that a test starts is not a worker of pytest-xdist.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    return {**variables, "PYTHONPATH": IMPORT_PATH}


def run_command(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    timeout: float = 180.0,
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder with additional variables, and return how it ended."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
