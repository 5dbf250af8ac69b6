"""The work budget of a test tier: processes that its tests start, and seconds that they measure.

Wall time depends on what else a machine does. These two counts do not, so a test session fails when
its tier exceeds them. ``conftest.py`` registers the plugin.
"""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from parbench.bench.text import parse_duration
from tests.support.paths import IMPORT_PATH
from tests.support.process_count.sitecustomize import FILE_VARIABLE


class Work(NamedTuple):
    """The cost of tests, independent of other work of the machine."""

    processes: int  # Python processes that started or were forked
    budget_seconds: float  # the sum of ``--budget`` on their command lines

    def __str__(self) -> str:
        return f"{self.processes} processes, {self.budget_seconds:.0f} s of time budgets"


TIER_LIMITS = {
    "not full": Work(250, 400),
    "full": Work(530, 1400),
    "full and not measures": Work(250, 400),
    "full and measures": Work(280, 1000),
}
"""The most work of a tier or its part, by the marker expression that selects it.

Retries and restarted workers vary a count by a few processes, so limits leave a fifth above it.
"""


class WorkMeter:
    """A pytest plugin that counts the work of a session and fails it above its limit."""

    def __init__(self, tier: str) -> None:
        self._limit = TIER_LIMITS.get(tier)
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "processes"
        self._file.touch()
        # Python processes that start from now on count themselves, also those of pytest-xdist.
        os.environ[FILE_VARIABLE] = str(self._file)
        os.environ["PYTHONPATH"] = IMPORT_PATH

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.exceeds_limit():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"work of the tests: {self.count()}")
        if self.exceeds_limit():
            terminalreporter.write_line(
                f"FAILED: the limit of this tier is {self._limit}. Move tests to the full tier.",
                red=True,
            )

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()

    def count(self) -> Work:
        budgets = self._file.read_text().splitlines()
        seconds = sum(parse_duration(budget) for budget in budgets if budget)
        return Work(len(budgets), seconds)

    def exceeds_limit(self) -> bool:
        if self._limit is None:
            return False
        work = self.count()
        too_many_processes = work.processes > self._limit.processes
        return too_many_processes or work.budget_seconds > self._limit.budget_seconds
