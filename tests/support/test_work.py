"""The work meter counts the processes of tests, and fails a session that starts too many."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import environment
from tests.support.process_count.sitecustomize import FILE_VARIABLE
from tests.support.work import count_processes

CONFTEST = """
from tests.support import work

def pytest_configure(config):
    work.MAX_PROCESSES["not full"] = 1
    meter = work.WorkMeter("not full")
    meter.start()
    config.pluginmanager.register(meter)
"""
TEST_WITH_TWO_PROCESSES = """
import subprocess, sys

def test_starts_two():
    for _ in range(2):
        subprocess.run([sys.executable, "-c", ""], check=True)
"""


def test_processes_and_forks_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "processes"
    command = [sys.executable, "-c", "import os; os.fork()"]
    subprocess.run(command, env={**environment(), FILE_VARIABLE: str(file)}, check=True)
    assert count_processes(file) == 2


@pytest.mark.full
def test_session_fails_over_the_limit(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_two.py").write_text(TEST_WITH_TWO_PROCESSES)
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in completed.stdout
    assert completed.returncode == 1
    assert "at most 1 processes are allowed" in completed.stdout
    assert "test_starts_two: 2 processes" in completed.stdout
