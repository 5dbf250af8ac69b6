"""Run the commands of tests in a Slurm cluster on this machine."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import environment

PARBENCH = str(Path(sys.executable).with_name("parbench"))
LOCAL_CLUSTER = [sys.executable, "-m", "tests.support.slurm.local_cluster"]


def run_in_cluster(
    command: Sequence[str],
    *,
    timeout: float = 120,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    **cluster: Any,
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a new cluster and return how it ended.

    ``cluster`` are arguments of ``cluster_command``. ``subprocess.TimeoutExpired`` ends the cluster
    too.
    """
    return subprocess.run(
        [*cluster_command(**cluster), "--", *command],
        cwd=cwd,
        env={**environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def cluster_command(*, nodes: int = 4, link: str = "", slow: str = "") -> list[str]:
    """Return the command that starts a cluster; ``slow`` is a node and its rate: ``n3:50mbit``."""
    command = [*LOCAL_CLUSTER, "run", "--nodes", str(nodes)]
    if link:
        command += ["--link", link]
    if slow:
        command += ["--slow", slow]
    return command
