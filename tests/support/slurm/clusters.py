"""Run the commands of tests in a Slurm cluster on this machine."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.paths import run_command

PARBENCH = str(Path(sys.executable).with_name("parbench"))
LOCAL_CLUSTER = [sys.executable, "-m", "tests.support.slurm.local_cluster"]


def run_in_cluster(
    command: Sequence[str],
    *,
    timeout: float = 120,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    nodes: int = 4,
    link: str = "",
    slow: str = "",
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a new cluster of nodes n1, n2 and so on, and return how it ended.

    ``link`` is the rate of all links, and ``slow`` a node with its own rate, such as ``n3:50mbit``.
    ``subprocess.TimeoutExpired`` ends the cluster too.
    """
    start = [*LOCAL_CLUSTER, "run", "--nodes", str(nodes)]
    if link:
        start += ["--link", link]
    if slow:
        start += ["--slow", slow]
    return run_command([*start, "--", *command], cwd or Path.cwd(), variables, timeout=timeout)
