"""Fixtures and settings of all tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ranks and tests share few cores. torch reads the variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from parbench.bench.machine.machine import inspect_machine
from parbench.bench.results.runs import Run
from tests.support.paths import IMPORT_PATH, Command, run_command
from tests.support.ranks import Ranks
from tests.support.smoke import run_smoke_subset


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo ranks that run functions of tests; started once."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four gloo ranks that run functions of tests; started once."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run of two operations and a training step on two ranks; measured once."""
    return run_smoke_subset(tmp_path_factory.mktemp("smoke"))


@pytest.fixture
def parbench(tmp_path: Path) -> Command:
    """Run ``parbench`` in an empty folder as a user would."""
    script = Path(sys.executable).with_name("parbench")
    is_installed = script.exists()
    command = [str(script)] if is_installed else [sys.executable, "-m", "parbench"]

    def run(*args: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return run_command([*command, *args], tmp_path, variables)

    return run


def pytest_configure(config: pytest.Config) -> None:
    # Output depends on the width and the colors of a terminal. pytest-xdist sets COLUMNS.
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
        os.environ.pop(name, None)
    # Processes of tests import this checkout.
    os.environ["PYTHONPATH"] = IMPORT_PATH
    restore_signals()


def restore_signals() -> None:
    """Handle SIGINT and SIGHUP as in a terminal: background jobs and nohup ignore them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that this machine or tier does not run; repeat those that need quiet cores."""
    for item in items:
        if item.get_closest_marker("measures"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not inspect_machine(os.environ).gpus:
        deselect(config, items, gpu_tests)
    if "cuda_stub" not in config.option.markexpr:
        deselect(
            config, items, [item for item in items if item.get_closest_marker("cuda_stub")]
        )


def deselect(
    config: pytest.Config, items: list[pytest.Item], deselected: list[pytest.Item]
) -> None:
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
