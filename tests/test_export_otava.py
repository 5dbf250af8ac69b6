"""Otava's CSV: a row a run in the order of time, a column a series, empty where it was not measured."""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner
from compare_fixtures import CASE
from history_fixtures import entry, fill, nightly
from reports_fixtures import ENVIRONMENT

import parbench
from reports.comparing.export_otava import render_otava
from reports.comparing.history import open_history


def rows(tmp_path: Path, branch: str | None = None) -> list[dict[str, str]]:
    with open_history(tmp_path / "h.sqlite") as history:
        return list(csv.DictReader(render_otava(history, branch).splitlines()))


def test_runs_are_rows_and_series_are_columns(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0, 1.1], commit="abc")
        history.add(entry(tmp_path, 2, records=nightly(2, cases=[CASE]), branch="topic"))
    first, second, third = rows(tmp_path)
    assert list(first)[:3] == ["time", "commit", "run"]
    assert (first["time"], first["commit"], first["run"]) == ("2026-01-01T00:00:00.000Z", "abc", "run-000")
    assert float(second[CASE.label]) == pytest.approx(1.1e-3, rel=0.01)
    assert [name for name, value in third.items() if not value] == [
        "commit",
        next(n for n in third if "broadcast" in n),
    ]
    assert [row["run"] for row in rows(tmp_path, "main")] == ["run-000", "run-001"]


def test_two_series_of_one_case_are_two_columns(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0], records=nightly(0, cases=[CASE]))
        other = {**ENVIRONMENT, "host": {"name": "node-b"}}
        fill(history, tmp_path, [1.0], first=1, records=nightly(0, cases=[CASE]), environment=other)
    first, second = rows(tmp_path)
    columns = [name for name in first if "all_reduce" in name]
    assert len(columns) == 2
    assert all(" #" in name for name in columns)
    assert [bool(first[name]) for name in columns] != [bool(second[name]) for name in columns]


def test_the_command_writes_the_file_or_says_why_not(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with open_history(file, create=True) as history:
        fill(history, tmp_path, [1.0])
    words = ["history", "export", str(tmp_path / "out.csv"), "--history", str(file)]
    assert CliRunner().invoke(parbench.main, [*words, "--format", "otava", "--branch", "main"]).exit_code == 0
    assert (tmp_path / "out.csv").read_text().startswith("time,commit,run,")
    refused = CliRunner().invoke(parbench.main, [*words, "--branch", "main"])
    assert refused.exit_code == 2
    assert "--branch main goes with --format otava alone" in refused.stderr
    words[2] = str(tmp_path / "absent" / "out.csv")
    refused = CliRunner().invoke(parbench.main, [*words, "--format", "otava"])
    assert refused.exit_code == 2
    assert "cannot be written" in refused.stderr
