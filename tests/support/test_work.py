"""The work meter counts processes and time budgets, and fails a session over the limit."""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import environment
from tests.support.process_count.sitecustomize import FILE_VARIABLE
from tests.support.work import Work, read_work


def test_processes_and_forks_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "work"
    code = "import os; pid = os.fork(); pid and os.waitpid(pid, 0)"
    command = [sys.executable, "-c", code, "--budget", "2m"]
    subprocess.run(command, env={**environment(), FILE_VARIABLE: str(file)}, check=True)
    assert read_work(file) == Work(processes=2, budget_seconds=120.0)


def test_session_fails_over_the_limit(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support import work\n"
        "work.TIER_LIMITS['not full'] = work.Work(processes=1)\n"
        "def pytest_configure(config):\n"
        "    meter = work.WorkMeter('not full')\n"
        "    meter.count_processes()\n"
        "    config.pluginmanager.register(meter)\n"
    )
    (tmp_path / "test_two.py").write_text(
        "import subprocess, sys\n"
        "def test_starts_two():\n"
        "    for _ in range(2):\n"
        "        subprocess.run([sys.executable, '-c', ''], check=True)\n"
    )
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
    assert "2 processes exceed the limit of 1" in completed.stdout
    assert "test_starts_two" in completed.stdout
