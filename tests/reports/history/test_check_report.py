"""The check as terminal text and Markdown."""

from dataclasses import replace

import pytest

from parbench.reports.compare.rendering import render_markdown, render_text
from parbench.reports.compare.verdicts import Verdict
from parbench.reports.history.check import HistoryCheck, SeriesCheck
from parbench.reports.history.check_report import build_report, summarize_check
from tests.support.reports.history_fixtures import DailyRuns
from tests.support.reports.reports_fixtures import HOSTILE_TEXT


@pytest.fixture
def slower(runs: DailyRuns) -> HistoryCheck:
    """The check of twelve runs and four more that are 10 % slower."""
    runs.add(4, 1.1)
    return runs.check()


def test_text_has_verdict_change_and_run(slower: HistoryCheck) -> None:
    text = render_text(build_report(slower))
    assert "FAIL: 2 SLOWER, compared with the last 15 runs on main\n" in text
    assert "+9.8 %" in text
    [row, *_] = [line for line in text.splitlines() if line.startswith("SLOWER ")]
    assert "run-012" in row
    assert "95 % CI" in row
    assert "parbench history annotate" in text


def test_slower_is_defined_by_its_test(runs: DailyRuns) -> None:
    candidate = render_markdown(build_report(runs.check_candidate(1.3)))
    assert "SLOWER: the run is above the earlier runs since the last step" in candidate
    assert "false discovery rate over series of 1" in candidate
    runs.add(4, 1.1)
    branch = render_markdown(build_report(runs.check()))
    assert "SLOWER: the newest 3 or more runs are above the fastest earlier level" in branch
    assert "false discovery rate over series of 2" in branch
    for text in (candidate, branch):
        assert "Student's t-test" in text
        assert "or that of parbench aa" in text


def test_short_history_says_that_nothing_was_checked(no_runs: DailyRuns) -> None:
    no_runs.add(1)
    check = no_runs.check()
    text = "each series has at most 1 of 8 runs on main. Times were not checked."
    assert summarize_check(check) == f"Not enough history: {text}"
    assert "SLOWER" not in render_text(build_report(check))
    missing = [replace(series, verdict=Verdict.MISSING) for series in check.series]
    summary = summarize_check(replace(check, series=missing))
    assert summary == f"FAIL: 2 MISSING. Not enough history: {text}"


def test_markdown_is_an_intact_table(slower: HistoryCheck) -> None:
    [result, _] = slower.series
    hostile = SeriesCheck(
        series=result.series, verdict=Verdict.WRONG, reason=HOSTILE_TEXT + "|"
    )
    text = render_markdown(build_report(replace(slower, series=(hostile, result))))
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2
    for row in (head, *rows):
        assert row.replace("\\|", "").count("|") == 6
    assert "<script>" not in text
    assert "\x1b" not in text
