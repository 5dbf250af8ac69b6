"""Folders that a history takes in, and words that select runs: a branch, `main~1`, `last:10`."""

from pathlib import Path

import pytest

from parbench.reports.history.runs import add_folders, find_run, select_runs
from tests.support.refusals import usage_error
from tests.support.reports.history_fixtures import DailyRuns, write_history_run


@pytest.fixture
def branches(no_runs: DailyRuns) -> DailyRuns:
    """Runs 0, 1 and 3 of the branch main, and run 2 of the branch topic."""
    no_runs.add(2)
    no_runs.add(1, branch="topic")
    no_runs.add(1)
    return no_runs


def select(runs: DailyRuns, text: str) -> list[int]:
    lines = select_runs(runs.history.list_runs(), text)
    return [int(line.id.removeprefix("run-")) for line in lines]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("main", [3]),
        ("main~2", [0]),
        ("last~1", [2]),
        ("last:3", [1, 2, 3]),
        ("main:2", [1, 3]),
        ("main:10", [0, 1, 3]),
        ("run-002", [2]),
    ],
)
def test_selector_means_runs(text: str, numbers: list[int], branches: DailyRuns) -> None:
    assert select(branches, text) == numbers


def test_find_run_leaves_out_the_compared_run(branches: DailyRuns) -> None:
    pooled = find_run("main:3", branches.file, excluded="run-003")
    assert len(pooled.records) == 2 * len(find_run("main", branches.file).records)
    assert find_run("main~1", branches.file, excluded="run-003").info.id == "run-001"


@pytest.mark.parametrize("text", ["main~3", "nope", "main:0", "main~x"])
def test_selector_without_a_run_is_refused(text: str, branches: DailyRuns) -> None:
    message = usage_error(select_runs, branches.history.list_runs(), text)
    assert repr(text) in message
    assert "main, topic" in message


def add(file: Path, *folders: Path) -> list[tuple[str, str]]:
    return list(add_folders(file, folders, branch="topic", commit="abc"))


@pytest.mark.parametrize("name", ["notes", "absent"])
def test_add_folders_refuses_a_folder_without_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    (tmp_path / "notes").mkdir()
    path = write_history_run(tmp_path, 0)
    assert str(tmp_path / name) in usage_error(add, file, path, tmp_path / name)
