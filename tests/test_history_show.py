"""The history as text: what people read and what programs parse hold the same."""

import json
from pathlib import Path

import pytest
from history_fixtures import fill
from reports_fixtures import HOSTILE

from bench.errors import UserError
from reports.comparing.changepoints import StepRule
from reports.comparing.history import open_history
from reports.comparing.history_gate import Check, check, newest
from reports.comparing.history_show import (
    Course,
    bars,
    check_json,
    check_markdown,
    check_text,
    courses,
    courses_json,
    courses_text,
    runs_text,
)

RULE = StepRule()
STEP = [1.0] * 12 + [1.1] * 4


def stepped(tmp_path: Path, note: str = "") -> Check:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, STEP, commit="0123456789abcdef")
        if note:
            history.annotate("run-000", "*", note)
        return check(history, newest(history, "main"), RULE)


def shown(tmp_path: Path, pattern: str = "*") -> tuple[Course, ...]:
    with open_history(tmp_path / "h.sqlite") as history:
        return courses(history, pattern, None, RULE)


def test_runs_are_listed_the_newest_first_with_their_notes(tmp_path: Path) -> None:
    stepped(tmp_path, note="meant so")
    with open_history(tmp_path / "h.sqlite") as history:
        first, head, *rest = runs_text(history.runs(), history.annotations()).splitlines()
    assert first == "16 runs"
    assert head.split() == ["run", "started", "branch", "commit", "preset", "series", "bad"]
    assert rest[0].split() == ["run-015", "2026-01-16T00:00:00.000Z", "main", "0123456789ab", "node", "2", "0"]
    assert rest[-1] == "meant at run-000, *: meant so"


def test_no_run_is_no_table() -> None:
    assert runs_text([], []) == "0 runs\n"


def test_a_course_shows_its_levels(tmp_path: Path) -> None:
    stepped(tmp_path)
    text = courses_text(shown(tmp_path, "*all_reduce*"))
    assert "collective.all_reduce size_bytes=1024" in text
    assert "1.00 ms from run-000 on (12 runs)" in text
    assert "1.10 ms from run-012 on (4 runs)" in text
    assert "broadcast" not in text


def test_a_long_courses_levels_are_those_of_its_end(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0] * 34 + [1.2] * 4)
        [course] = courses(history, "*all_reduce*", None, RULE)
    text = courses_text([course])
    assert "38 runs" in text
    assert "from run-008 on (26 runs)" in text
    assert "from run-034 on (4 runs)" in text


def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    stepped(tmp_path)
    with pytest.raises(UserError, match="no series of the history fits 'nope'"):
        shown(tmp_path, "nope")


def test_a_course_as_json_holds_its_points(tmp_path: Path) -> None:
    stepped(tmp_path)
    [one] = json.loads(courses_json(shown(tmp_path, "collective.all_reduce")))["series"]
    assert one["runs"] == [f"run-{i:03}" for i in range(16)]
    assert one["seconds"][0] == pytest.approx(1e-3, rel=0.01)
    assert one["around"]["host.name"] == "node-a"


@pytest.mark.parametrize(
    ("values", "drawn"), [([1.0, 2.0], "▁█"), ([1.0, 1.0], "▁▁"), ([1.0, 8.0, 4.0], "▁█▄"), ([0.5], "▁")]
)
def test_bars_reach_from_the_fastest_to_the_slowest(values: list[float], drawn: str) -> None:
    assert bars(values) == drawn


def test_the_gate_tells_what_and_since_when(tmp_path: Path) -> None:
    text = check_text(stepped(tmp_path))
    lines = text.splitlines()
    assert lines[0] == "parbench history check of run-015 on main: 2 SLOWER"
    assert lines[2].split()[:5] == ["SLOWER", "+10.1", "%", "1.10", "ms"]
    assert "run-012" in lines[2]
    assert "parbench history annotate" in text


def test_what_is_the_same_needs_no_line(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, [1.0] * 9)
        text = check_text(check(history, newest(history, "main"), RULE))
    assert text.splitlines()[:2] == ["parbench history check of run-008 on main: 2 SAME", ""]
    assert "verdict" not in text


def test_markdown_is_a_table_that_nothing_breaks(tmp_path: Path) -> None:
    found = stepped(tmp_path)
    lines = check_markdown(found).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert {line.count("|") for line in rows} == {7}
    assert rows[2].startswith("| SLOWER | +10.1 % |")
    hostile = type(found.findings[0])(
        case=found.findings[0].case, world=found.findings[0].world, word="WRONG", reason=HOSTILE + "|"
    )
    text = check_markdown(Check(line=found.line, rule=RULE, findings=(hostile,)))
    assert "<script>" not in text
    assert "\x1b" not in text
    assert text.count("\n| WRONG") == 1


def test_json_holds_every_series_and_the_exit_code(tmp_path: Path) -> None:
    found = stepped(tmp_path)
    whole = json.loads(check_json(found, code=1))
    assert whole["exit_code"] == 1
    assert whole["verdicts"] == {"SLOWER": 2}
    assert whole["run"]["id"] == "run-015"
    assert [one["since"] for one in whole["series"]] == ["run-012"] * 2
    assert whole["series"][0]["change"] == pytest.approx(0.1, abs=0.01)
    assert len(whole["series"][0]["seconds"]) == 16
