"""The work budget of a test tier: processes that its tests start, and seconds that they measure.

Wall time depends on what else a machine does. These two counts do not, so a test session fails when
its tier exceeds them. ``conftest.py`` registers the plugin.
"""

import os
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.text import UserError, parse_duration
from tests.support.paths import IMPORT_PATH
from tests.support.process_count.sitecustomize import FILE_VARIABLE

MAX_NAMED_TESTS = 10
WORK_PROPERTY = "parbench-work"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What tests cost, whatever else the machine does."""

    processes: int = 0  # Python processes that started or were forked
    budget_seconds: float = 0.0  # the sum of ``--budget`` on their command lines

    def __add__(self, other: "Work") -> "Work":
        return Work(
            processes=self.processes + other.processes,
            budget_seconds=self.budget_seconds + other.budget_seconds,
        )

    def __str__(self) -> str:
        return f"{self.processes} processes, {self.budget_seconds:.0f} s of time budgets"


TIER_LIMITS = {
    "not full": Work(processes=250, budget_seconds=400),
    "full": Work(processes=530, budget_seconds=1400),
    "full and not measures": Work(processes=250, budget_seconds=400),
    "full and measures": Work(processes=280, budget_seconds=1000),
}
"""The most work of a tier or its part, by the marker expression that selects it.

Retries and workers that start anew vary a count by a few processes, so limits leave a fifth above
it.
"""


def read_work(file: Path, offset: int = 0) -> Work:
    """Return the work that processes appended to a file from an offset in bytes on."""
    if not file.exists():
        return Work()
    lines = file.read_bytes()[offset:].decode().splitlines()
    return Work(processes=len(lines), budget_seconds=sum(map(budget_seconds, lines)))


def budget_seconds(text: str) -> float:
    """Return the seconds of a time budget, 0 for none and for one that parbench would refuse."""
    try:
        return parse_duration(text) if text else 0.0
    except UserError:
        return 0.0


def find_excess(tier: str, work: Work) -> list[str]:
    """Return a sentence for each limit of a tier that the work exceeds."""
    limit = TIER_LIMITS.get(tier)
    if limit is None:
        return []
    excess = []
    if work.processes > limit.processes:
        excess.append(f"{work.processes} processes exceed the limit of {limit.processes}")
    if work.budget_seconds > limit.budget_seconds:
        excess.append(
            f"{work.budget_seconds:.0f} s of time budgets exceed the limit of "
            f"{limit.budget_seconds:.0f} s"
        )
    return excess


class WorkMeter:
    """A pytest plugin that measures the work of tests, prints it, and enforces the limits."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "processes"
        self._offset = 0
        self._work_by_phase: dict[tuple[str, str], Work] = {}

    def count_processes(self) -> None:
        """Let every Python process that starts from now on count itself."""
        os.environ[FILE_VARIABLE] = str(self._file)
        os.environ["PYTHONPATH"] = IMPORT_PATH

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the work of a phase to its report, which pytest-xdist sends to the main one."""
        report = yield
        work = read_work(self._file, self._offset)
        self._offset = self._file.stat().st_size if self._file.exists() else 0
        report.user_properties.append((WORK_PROPERTY, (work.processes, work.budget_seconds)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        processes, seconds = properties.get(WORK_PROPERTY, (0, 0.0))
        work = Work(processes=processes, budget_seconds=seconds)
        # A repeated test replaces its earlier attempts.
        self._work_by_phase[report.nodeid, report.when] = work

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_main_process = not hasattr(session.config, "workerinput")
        if is_main_process and find_excess(self._tier, self.total()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"work of the tests: {self.total()}")
        excess = find_excess(self._tier, self.total())
        if not excess:
            return
        for sentence in excess:
            terminalreporter.write_line(f"FAILED work budget: {sentence}", red=True)
        terminalreporter.write_line("Most work, largest first. Move a test to the full tier:")
        by_work = sorted(self._work_by_phase.items(), key=lambda item: -item[1].processes)
        for (name, _phase), work in by_work[:MAX_NAMED_TESTS]:
            terminalreporter.write_line(f"  {name}: {work}")

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()

    def total(self) -> Work:
        return sum(self._work_by_phase.values(), start=Work())
