"""Histories with which most tests of this folder begin."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from parbench.reports.history.database import open_history
from tests.support.reports.history_fixtures import DailyRuns, fill_history


@pytest.fixture(scope="session")
def twelve_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a history of twelve runs of two series; tests only read it."""
    folder = tmp_path_factory.mktemp("twelve")
    with open_history(folder / "h.sqlite", create=True) as history:
        fill_history(history, folder, [1.0] * 12)
    return folder / "h.sqlite"


@pytest.fixture
def runs(twelve_runs: Path, tmp_path: Path) -> Iterator[DailyRuns]:
    """A copy of that history."""
    file = Path(shutil.copy(twelve_runs, tmp_path))
    with open_history(file) as history:
        yield DailyRuns(history, tmp_path, file)


@pytest.fixture
def no_runs(tmp_path: Path) -> Iterator[DailyRuns]:
    """A history without a run."""
    file = tmp_path / "empty.sqlite"
    with open_history(file, create=True) as history:
        yield DailyRuns(history, tmp_path, file)
