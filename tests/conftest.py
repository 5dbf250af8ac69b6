"""Fixtures that more than one test file uses."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # ranks and tests share few cores; torch reads it when it is imported

from parbench.bench.machine.machine import inspect_machine
from parbench.bench.results.runs import Run
from tests.support.paths import Command, environment
from tests.support.ranks import Ranks
from tests.support.smoke import smoke


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return smoke(tmp_path_factory.mktemp("smoke"))


@pytest.fixture
def parbench(tmp_path: Path) -> Command:
    """Run ``parbench`` in an empty folder, as a person would; the tests' own modules are importable there."""

    script = Path(sys.executable).with_name(
        "parbench"
    )  # which a checkout that is not installed lacks
    start = [str(script)] if script.exists() else [sys.executable, "-m", "parbench"]

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*start, *words],
            cwd=tmp_path,
            env={**environment(), **variables},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run


def pytest_configure() -> None:
    """Take signals as a terminal's foreground does: a shell's background ignores SIGINT, and nohup SIGHUP."""
    for sign, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(sign) == signal.SIG_IGN:
            signal.signal(sign, usual)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none, and try again what a busy machine disturbs or a rank's death."""
    for item in items:
        if item.get_closest_marker("measures"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))
        elif {"two_ranks", "four_ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun="RankDiedError"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not inspect_machine(os.environ).gpus:
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
