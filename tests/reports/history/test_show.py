"""The check as table and Markdown, and the courses of series as text and CSV."""

import csv
from dataclasses import replace

import pytest

from parbench.reports.history.database import History
from parbench.reports.history.gate import Check, Finding
from parbench.reports.history.show import render, render_csv
from tests.support.compare_fixtures import CASE
from tests.support.history_fixtures import DailyRuns, make_daily_records
from tests.support.reports_fixtures import HOSTILE_TEXT


@pytest.fixture
def slower_runs(runs: DailyRuns) -> DailyRuns:
    """Twelve runs, then four that are 10 % slower."""
    runs.add(4, 1.1)
    return runs


@pytest.fixture
def slower(slower_runs: DailyRuns) -> Check:
    return slower_runs.check()


def test_table_shows_verdict_change_and_run(slower: Check) -> None:
    text = render(slower)
    answer, _, row, *_ = text.splitlines()
    assert "2 SLOWER of 2 series" in answer
    assert "all_reduce 1K +9.8 %" in answer
    assert row.split()[:5] == ["SLOWER", "+9.8", "%", "1.10", "ms"]
    assert "run-012" in row
    assert "parbench history annotate" in text


def test_markdown_is_an_intact_table(slower: Check) -> None:
    [finding, _] = slower.findings
    hostile = Finding(series=finding.series, word="WRONG", reason=HOSTILE_TEXT + "|")
    text = render(replace(slower, findings=(hostile, finding)), "markdown")
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2
    for row in (head, *rows):
        assert row.replace("\\|", "").count("|") == 7
    assert "<script>" not in text
    assert "\x1b" not in text


def read_csv(history: History, branch: str | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(render_csv(history, branch).splitlines()))


def test_csv_has_a_row_per_run(runs: DailyRuns) -> None:
    records = make_daily_records(0, cases=[CASE])
    runs.add_records(records, branch="topic", commit="abc")
    *_, row = read_csv(runs.history)
    assert row["time"] == "2026-01-13T00:00:00.000Z"
    assert row["commit"] == "abc"
    assert row["run"] == "run-012"
    assert float(row[CASE.label]) == pytest.approx(1e-3, rel=0.01)
    [other_series] = [name for name in row if "broadcast" in name]
    assert row[other_series] == ""
    assert len(read_csv(runs.history, "main")) == 12
