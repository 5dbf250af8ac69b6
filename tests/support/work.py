"""The work limit of a test tier: the Python processes that its tests start.

Wall time depends on the other load of a machine. The number of processes does not, so a test
session fails when its tier exceeds it. ``conftest.py`` registers the plugin.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import IMPORT_PATH
from tests.support.process_count.sitecustomize import FILE_VARIABLE

MAX_NAMED_TESTS = 10
WORK_PROPERTY = "parbench-processes"
MAX_PROCESSES = {"not full": 600, "full": 6000}
"""The most processes of a tier, by the marker expression that selects it."""


def count_processes(file: Path) -> int:
    """Return how many processes have started; each appended a byte to the file."""
    return file.stat().st_size if file.exists() else 0


class WorkMeter:
    """A pytest plugin that counts the processes of each test and enforces the limit of the tier."""

    def __init__(self, tier: str) -> None:
        self._limit = MAX_PROCESSES.get(tier)
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "processes"
        self._num_reported = 0
        self._processes_by_test: Counter[str] = Counter()

    def start(self) -> None:
        """Let every Python process that starts from now on count itself."""
        os.environ[FILE_VARIABLE] = str(self._file)
        os.environ["PYTHONPATH"] = IMPORT_PATH

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the count of a phase to its report, which pytest-xdist sends to the main process."""
        report = yield
        num_processes = count_processes(self._file)
        report.user_properties.append((WORK_PROPERTY, num_processes - self._num_reported))
        self._num_reported = num_processes
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        self._processes_by_test[report.nodeid] += properties.get(WORK_PROPERTY, 0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_main_process = not hasattr(session.config, "workerinput")
        if is_main_process and self._exceeds_limit():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"processes of the tests: {self._processes_by_test.total()}")
        if not self._exceeds_limit():
            return
        message = f"FAILED: at most {self._limit} processes are allowed. Move to the full tier:"
        terminalreporter.write_line(message, red=True)
        for name, num_processes in self._processes_by_test.most_common(MAX_NAMED_TESTS):
            terminalreporter.write_line(f"  {name}: {num_processes} processes")

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()

    def _exceeds_limit(self) -> bool:
        return self._limit is not None and self._processes_by_test.total() > self._limit
