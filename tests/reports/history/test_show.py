"""The check as table and Markdown, and the courses of series as text and CSV."""

import csv
from pathlib import Path

import pytest

from parbench.reports.history.database import History
from parbench.reports.history.gate import Check, Finding, check, newest
from parbench.reports.history.levels import StepRule
from parbench.reports.history.show import render, render_courses, render_csv
from tests.support.compare_fixtures import CASE
from tests.support.history_fixtures import fill_history, make_daily_records, make_entry
from tests.support.reports_fixtures import HOSTILE_TEXT

RULE = StepRule()


@pytest.fixture
def slower(history: History, tmp_path: Path) -> Check:
    """A check of the fourth run of a level that is 10 % slower."""
    fill_history(history, tmp_path, [1.1] * 4, first=12)
    return check(history, newest(history, "main"), RULE)


def test_table_shows_verdict_change_and_run(slower: Check) -> None:
    text = render(slower)
    answer, _, row, *_ = text.splitlines()
    assert "2 SLOWER of 2 series" in answer
    assert "all_reduce 1K +9.8 %" in answer
    assert row.split()[:5] == ["SLOWER", "+9.8", "%", "1.10", "ms"]
    assert "run-012" in row
    assert "parbench history annotate" in text


def test_markdown_is_an_intact_table(slower: Check) -> None:
    hostile = Finding(series=slower.findings[0].series, word="WRONG", reason=HOSTILE_TEXT + "|")
    findings = (hostile, *slower.findings)
    text = render(Check(line=slower.line, rule=RULE, findings=findings), "markdown")
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert {row.replace("\\|", "").count("|") for row in (head, *rows)} == {7}
    assert "<script>" not in text
    assert "\x1b" not in text


def test_courses_show_levels_within_the_window(slower: Check, history: History) -> None:
    text = render_courses(history, "*all_reduce*", None, RULE)
    assert CASE.label in text
    assert "1.00 ms from run-000 on (12 runs)" in text
    assert "1.10 ms from run-012 on (4 runs)" in text
    text = render_courses(history, "*all_reduce*", None, StepRule(window=10))
    assert "from run-006 on (6 runs)" in text


def read_csv(history: History, branch: str | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(render_csv(history, branch).splitlines()))


def test_csv_has_a_row_per_run(history: History, tmp_path: Path) -> None:
    records = make_daily_records(12, cases=[CASE])
    history.add(make_entry(tmp_path, 12, records=records, branch="topic", commit="abc"))
    *_, row = read_csv(history)
    assert row["time"] == "2026-01-13T00:00:00.000Z"
    assert row["commit"] == "abc"
    assert row["run"] == "run-012"
    assert float(row[CASE.label]) == pytest.approx(1e-3, rel=0.01)
    [other_series] = [name for name in row if "broadcast" in name]
    assert row[other_series] == ""
    assert len(read_csv(history, "main")) == 12
