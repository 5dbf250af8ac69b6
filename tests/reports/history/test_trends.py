"""Trends of series as text, figure and CSV."""

import csv
from pathlib import Path

import pytest

from parbench.bench.text import UserError
from parbench.reports.history.database import History
from parbench.reports.history.trends import (
    build_time_table,
    draw_trends,
    find_trends,
    render_trends,
)
from tests.support.reports.compare_fixtures import CASE, make_repetitions
from tests.support.reports.history_fixtures import DailyRuns, make_daily_records
from tests.support.reports.reports_fixtures import ENVIRONMENT


def show(history: History, pattern: str = "all_reduce") -> str:
    times = build_time_table(history, None)
    return render_trends(find_trends(times, pattern), times)


def test_trends_distinguish_series_of_one_case(runs: DailyRuns) -> None:
    newer = {**ENVIRONMENT, "torch": {"version": "2.14.0", "cuda": None, "threads": 1}}
    runs.add(1, environment=newer)
    runs.add_records(make_repetitions(CASE, injected="delay 1 ms"))
    assert "(torch.version 2.14.0)" in show(runs.history)
    assert "(injected delay 1 ms, torch.version 2.13.0)" in show(runs.history)
    assert "    1 run, " in show(runs.history)


def test_trend_figure_has_levels(runs: DailyRuns, tmp_path: Path) -> None:
    runs.add(4, 1.1)
    times = build_time_table(runs.history, "main")
    trends = find_trends(times, "*")
    assert [len(trend.levels) for trend in trends] == [2, 2]
    draw_trends(trends, times, tmp_path / "trend.svg")
    figure = (tmp_path / "trend.svg").read_text()
    assert "all_reduce" in figure
    assert "00:00:00" in figure  # Runs of the same day differ in their time.


def export_csv(history: History, branch: str | None = None) -> list[dict[str, str]]:
    return list(
        csv.DictReader(build_time_table(history, branch).to_csv(index=False).splitlines())
    )


def test_history_without_a_run_is_refused(runs: DailyRuns) -> None:
    with pytest.raises(UserError, match="no run of branch 'topic'") as error:
        build_time_table(runs.history, "topic")
    assert error.value.hint == "its branches are main"


def test_csv_has_a_row_per_run(runs: DailyRuns) -> None:
    records = make_daily_records(0, cases=[CASE])
    runs.add_records(records, branch="topic", commit="abc")
    *_, row = export_csv(runs.history)
    assert row["time"] == "2026-01-13T00:00:00.000Z"
    assert row["commit"] == "abc"
    assert row["id"] == "run-012"
    [time] = [value for name, value in row.items() if name.startswith(CASE.label)]
    assert float(time) == pytest.approx(1e-3, rel=0.01)
    [other_series] = [name for name in row if "broadcast" in name]
    assert row[other_series] == ""
    assert len(export_csv(runs.history, "main")) == 12
