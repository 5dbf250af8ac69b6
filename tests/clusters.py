"""A real SLURM cluster on this machine, for tests of what is run in one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PARBENCH = str(Path(sys.executable).with_name("parbench"))


def in_cluster(
    command: Sequence[str],
    *,
    nodes: int = 4,
    cpus: int = 2,
    link: str | None = None,
    delay: str | None = None,
    slow: Sequence[str] = (),
    timeout: float = 120,
    cwd: Path | None = None,
    variables: dict[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a cluster of its own, and return how it ended; ``subprocess.TimeoutExpired`` ends both."""
    return subprocess.run(
        [*cluster_words(nodes=nodes, cpus=cpus, link=link, delay=delay, slow=slow), "--", *command],
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def cluster_words(
    *, nodes: int, cpus: int = 2, link: str | None = None, delay: str | None = None, slow: Sequence[str] = ()
) -> list[str]:
    """Return the words that start a cluster, up to its command's ``--``."""
    words = [PARBENCH, "slurm", "local", "--nodes", str(nodes), "--cpus", str(cpus)]
    words += ["--link", link] if link else []
    words += ["--delay", delay] if delay else []
    return words + [word for text in slow for word in ("--slow", text)]


def tool(*words: str) -> list[str]:
    """Return a command that runs ``tests/cluster_tools.py`` with this Python."""
    return [sys.executable, str(Path(__file__).with_name("cluster_tools.py")), *words]
