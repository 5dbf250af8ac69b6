"""Folders of runs are found, and each is kept before the next is read."""

from pathlib import Path

import pytest
from history_fixtures import put

from bench.errors import UserError
from reports.comparing.history import open_history
from reports.comparing.history_add import add_folders, find_folders


def test_a_run_and_a_folder_of_runs_are_found(tmp_path: Path) -> None:
    paths = [put(tmp_path / "runs", i) for i in range(3)]
    (tmp_path / "runs" / "notes").mkdir()
    assert find_folders(paths[1]) == [paths[1]]
    assert find_folders(tmp_path / "runs") == paths


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_what_holds_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{name} is no run and holds none"):
        find_folders(tmp_path / name)
    assert not (tmp_path / "h.sqlite").exists()


def test_a_run_named_twice_is_added_once(tmp_path: Path) -> None:
    path = put(tmp_path / "runs", 0)
    file = tmp_path / "h.sqlite"
    told = list(add_folders(file, [path, tmp_path / "runs"], branch="main", commit=""))
    assert told == [("run-000", "added")]


def test_what_stood_before_a_damaged_run_is_kept(tmp_path: Path) -> None:
    for i in range(3):
        put(tmp_path / "runs", i)
    (tmp_path / "runs" / "run-001" / "records.jsonl").write_text("no record\n")
    file = tmp_path / "h.sqlite"
    with pytest.raises(UserError, match="line 1 is no record"):
        list(add_folders(file, [tmp_path / "runs"], branch="main", commit=""))
    with open_history(file) as history:
        assert [line.id for line in history.runs()] == ["run-000"]


def test_branch_and_commit_are_those_given(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    list(add_folders(file, [put(tmp_path, 0)], branch="topic", commit="abc"))
    with open_history(file) as history:
        [line] = history.runs()
    assert (line.branch, line.commit) == ("topic", "abc")
