"""A history of twelve similar runs, with which most tests of this folder begin."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from parbench.reports.history.database import History, open_history
from tests.support.history_fixtures import fill_history


@pytest.fixture(scope="session")
def twelve_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a history of twelve runs of two series; tests only read it."""
    folder = tmp_path_factory.mktemp("twelve")
    with open_history(folder / "h.sqlite", create=True) as history:
        fill_history(history, folder, [1.0] * 12)
    return folder / "h.sqlite"


@pytest.fixture
def history(twelve_runs: Path, tmp_path: Path) -> Iterator[History]:
    """A copy of that history in `tmp_path / "h.sqlite"`."""
    with open_history(Path(shutil.copy(twelve_runs, tmp_path))) as history:
        yield history
