"""Folders that a history takes in, and words that select runs: a branch, `main~1`, `last:10`."""

from pathlib import Path

import pytest

from parbench.reports.history.database import Line, open_history
from parbench.reports.history.runs import add_folders, find_run, means_run, select_lines
from tests.support.history_fixtures import fill_history, write_history_run
from tests.support.refusals import usage_error


def make_line(i: int, branch: str) -> Line:
    return Line(
        number=i,
        id=f"run-{i}",
        started=f"2026-01-{i:02}",
        host="node-a",
        parbench="0.1.0",
        preset="node",
        branch=branch,
        commit="",
        path="",
        num_series=2,
        num_bad=0,
    )


LINES = [make_line(1, "main"), make_line(2, "main"), make_line(3, "topic"), make_line(4, "main")]


def select(text: str, compared: str = "") -> list[int]:
    return [line.number for line in select_lines(LINES, text, without=compared)]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("main", [4]),
        ("main~0", [4]),
        ("main~2", [1]),
        ("topic", [3]),
        ("last~1", [3]),
        ("last:3", [2, 3, 4]),
        ("main:2", [2, 4]),
        ("main:10", [1, 2, 4]),
        ("run-3", [3]),
    ],
)
def test_selector_means_runs(text: str, numbers: list[int]) -> None:
    assert select(text) == numbers


def test_selector_of_several_leaves_out_the_compared_run() -> None:
    assert select("main:2", compared="run-4") == [1, 2]
    assert select("main~1", compared="run-4") == [2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("main~3", "3 runs"),
        ("nope", "main, topic"),
        ("main:0", "at least 1"),
        ("main~x", "a branch"),
        ("a b", "a branch"),
    ],
)
def test_selector_without_a_run_is_refused(text: str, problem: str) -> None:
    message = usage_error(select_lines, LINES, text)
    assert repr(text) in message
    assert problem in message


def test_selector_differs_from_a_path() -> None:
    assert means_run("main~1")
    assert means_run("last:10")
    assert not means_run("main")
    assert not means_run("a/b~1")


def test_folder_comes_before_a_branch_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "h.sqlite"
    monkeypatch.chdir(tmp_path)
    assert "history not found" in usage_error(find_run, "main~1", file)
    assert "no such folder" in usage_error(find_run, "main", file)
    with open_history(file, create=True) as history:
        fill_history(history, tmp_path, [1.0, 1.0])
    (tmp_path / "run-000").rename("main")
    assert find_run("main", file).info.id == "run-000"
    assert find_run("last", file).info.id == "run-001"


def add(file: Path, *folders: Path) -> list[tuple[str, str]]:
    return list(add_folders(file, folders, branch="topic", commit="abc"))


def test_add_folders_adds_each_run_once(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    runs = tmp_path / "runs"
    paths = [write_history_run(runs, i) for i in range(2)]
    assert add(file, paths[0], runs) == [("run-000", "added"), ("run-001", "added")]
    with open_history(file) as history:
        assert {(line.branch, line.commit) for line in history.runs()} == {("topic", "abc")}


@pytest.mark.parametrize("name", ["notes", "absent"])
def test_add_folders_refuses_a_folder_without_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    (tmp_path / "notes").mkdir()
    path = write_history_run(tmp_path, 0)
    assert str(tmp_path / name) in usage_error(add, file, path, tmp_path / name)
    assert not file.exists()


def test_add_folders_keeps_runs_before_a_damaged_one(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    for i in range(3):
        write_history_run(tmp_path / "runs", i)
    (tmp_path / "runs" / "run-001" / "records.jsonl").write_text("no record\n")
    assert "line 1" in usage_error(add, file, tmp_path / "runs")
    with open_history(file) as history:
        assert [line.id for line in history.runs()] == ["run-000"]
