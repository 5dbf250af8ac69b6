"""Runs commands of tests in a real Slurm cluster on this machine."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.paths import environment

PARBENCH = str(Path(sys.executable).with_name("parbench"))
LOCAL_CLUSTER = [sys.executable, "-m", "tests.support.local_cluster"]


def run_in_cluster(
    command: Sequence[str],
    *,
    timeout: float = 120,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    **cluster: Any,
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a cluster of its own, and return how it ended; ``subprocess.TimeoutExpired`` ends both."""
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


def cluster_command(
    *,
    nodes: int = 4,
    cpus: int = 2,
    link: str | None = None,
    delay: str | None = None,
    slow: Sequence[str] = (),
) -> list[str]:
    words = [*LOCAL_CLUSTER, "run", "--nodes", str(nodes), "--cpus", str(cpus)]
    words += ["--link", link] if link else []
    words += ["--delay", delay] if delay else []
    return words + [word for text in slow for word in ("--slow", text)]


def tool_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.cluster_tools", *words]


class Cluster:
    """A cluster that runs one command after another, for tests that leave it as it was; it ends with the block."""

    def __init__(self, **cluster: Any) -> None:
        self._process = subprocess.Popen(
            [*cluster_command(**cluster), "--", *tool_command("serve")],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 120,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command inside; it is killed after the timeout, and jobs that it leaves are cancelled."""
        order = {
            "command": list(command),
            "cwd": str(cwd or "/tmp"),
            "timeout": timeout,
            "variables": variables or {},
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code, out, err = json.loads(
            self._process.stdout.readline() or '[4, "", "the cluster has ended"]'
        )
        return subprocess.CompletedProcess(list(command), code, out, err)
