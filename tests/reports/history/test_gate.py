"""The check of a run against the history: verdicts, annotations, missing cases, counts."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.results.metrics import values
from parbench.bench.results.records import Record, Status
from parbench.reports.history.database import History, open_history
from parbench.reports.history.gate import Check, Finding, check, check_folder, newest
from parbench.reports.history.levels import StepRule
from parbench.reports.history.show import answer, render_json
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_floor, make_repetitions
from tests.support.history_fixtures import (
    fill_history,
    make_daily_records,
    make_entry,
    write_history_run,
)
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    WORLD,
    collective_case,
    failed_record,
    ok_record,
    step_case,
    step_metrics,
)

RULE = StepRule()
TWO_RANKS = msgspec.structs.replace(WORLD, size=2)


def check_newest(history: History, rule: StepRule = RULE) -> Check:
    return check(history, newest(history, "main"), rule)


def find_finding(result: Check, case: object = CASE) -> Finding:
    [finding] = [finding for finding in result.findings if finding.series.case == case]
    return finding


def with_value(group: str, name: str, value: str) -> dict[str, Any]:
    environment: dict[str, Any] = {**ENVIRONMENT}
    environment[group] = {**environment[group], name: value}
    return environment


def test_check_needs_eight_runs(history: History) -> None:
    assert check(history, history.line("run-007"), RULE).counts == {"SAME": 2}
    result = check(history, history.line("run-006"), RULE)
    assert result.counts == {"INSUFFICIENT": 2}
    assert result.code() == 0
    assert result.code(fail_on_unknown=True) == 3
    assert "7 of the 8 runs" in find_finding(result).reason


def test_check_reports_a_step_since_its_first_run(history: History, tmp_path: Path) -> None:
    fill_history(history, tmp_path, [1.1] * 2, first=12)
    assert check_newest(history).counts == {"SUSPECT": 2}  # two runs are not a level yet
    fill_history(history, tmp_path, [1.1] * 2, first=14)
    result = check_newest(history)
    finding = find_finding(result)
    assert finding.word == "SLOWER"
    assert finding.since == "run-012"
    assert finding.shift is not None
    assert finding.shift.change == pytest.approx(0.1, abs=0.01)
    assert len(finding.times) == 16
    assert result.code() == 1
    assert check_newest(history, StepRule(floor=0.15)).counts == {"SAME": 2}
    assert len(find_finding(check_newest(history, StepRule(window=9))).times) == 9


def test_check_uses_earlier_runs_of_the_branch(history: History, tmp_path: Path) -> None:
    result = check_newest(history)
    fill_history(history, tmp_path, [2.0] * 3, first=12, branch="topic")
    fill_history(history, tmp_path, [1.5] * 3, first=15)
    assert check(history, history.line("run-011"), RULE) == result
    assert len(find_finding(check_newest(history)).times) == 15


def test_check_starts_a_series_for_a_new_version(history: History, tmp_path: Path) -> None:
    newer = with_value("torch", "version", "2.14.0")
    history.add(make_entry(tmp_path, 12, factor=1.5, environment=newer))
    finding = find_finding(check_newest(history))
    assert finding.word == "INSUFFICIENT"
    assert finding.reason.endswith("torch.version: 2.13.0 -> 2.14.0")


def test_check_names_changes_at_a_step(history: History, tmp_path: Path) -> None:
    environment = with_value("host", "kernel", "6.99")
    fill_history(history, tmp_path, [1.1] * 4, first=12, environment=environment, commit="abc")
    finding = find_finding(check_newest(history))
    assert finding.differs == ("commit: - -> abc", "host.kernel: - -> 6.99")


def test_annotation_restarts_matching_series(history: History, tmp_path: Path) -> None:
    fill_history(history, tmp_path, [1.1] * 9, first=12)
    history.annotate("run-012", "*all_reduce*", "intended")
    result = check_newest(history)
    assert find_finding(result).word == "SAME"
    assert len(find_finding(result).times) == 9
    assert find_finding(result, OTHER_CASE).word == "SLOWER"


def test_annotation_needs_its_branch_and_an_earlier_run(history: History, tmp_path: Path) -> None:
    history.add(make_entry(tmp_path, 12, branch="topic"))
    fill_history(history, tmp_path, [1.1] * 4, first=13)
    history.annotate("run-012", "*", "on another branch")
    history.annotate("run-016", "*", "after run-015")
    assert find_finding(check(history, history.line("run-015"), RULE)).word == "SLOWER"


@pytest.mark.parametrize(
    ("status", "verdict", "code"),
    [("wrong", "WRONG", 1), ("failed", "FAILED", 4), ("hang", "FAILED", 4)],
)
def test_check_reports_a_bad_run(
    status: Status, verdict: str, code: int, history: History, tmp_path: Path
) -> None:
    bad = failed_record(CASE, 0, status, "rank 1 reported it")
    history.add(make_entry(tmp_path, 12, records=[*make_repetitions(OTHER_CASE), bad]))
    result = check_newest(history)
    assert find_finding(result).word == verdict
    assert find_finding(result).reason == "rank 1 reported it"
    assert find_finding(result, OTHER_CASE).word == "SAME"
    assert result.code() == code


def test_check_reports_a_missing_case_three_times(history: History, tmp_path: Path) -> None:
    for i in (12, 13, 14):
        records = make_daily_records(i, cases=[OTHER_CASE])
        history.add(make_entry(tmp_path, i, records=records))
        result = check_newest(history)
        assert find_finding(result).word == "MISSING"
        assert result.code() == 4
    history.add(make_entry(tmp_path, 15, records=make_daily_records(15, cases=[OTHER_CASE])))
    assert check_newest(history).counts == {"SAME": 1}


def test_another_preset_misses_nothing(history: History, tmp_path: Path) -> None:
    records = make_daily_records(12, cases=[OTHER_CASE])
    history.add(make_entry(tmp_path, 12, records=records, preset="smoke"))
    assert check_newest(history).counts == {"SAME": 1}


FOUR_RANKS_RUN = make_daily_records(0)
TWO_RANKS_RUN = [
    *make_repetitions(CASE, world=TWO_RANKS),
    *make_repetitions(OTHER_CASE, world=TWO_RANKS),
]


@pytest.mark.parametrize(
    ("even", "odd", "num_series"),
    [
        (FOUR_RANKS_RUN, TWO_RANKS_RUN, 2),
        (make_repetitions(CASE), make_repetitions(OTHER_CASE), 1),
    ],
)
def test_alternating_runs_miss_nothing(
    even: list[Record], odd: list[Record], num_series: int, tmp_path: Path
) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for i in range(4):
            history.add(make_entry(tmp_path, i, records=odd if i % 2 else even))
            assert check_newest(history).counts == {"INSUFFICIENT": num_series}


def check_noisy_runs(file: Path, factors: Sequence[Sequence[float]], noise: float) -> Check:
    """Check the last of some runs, whose operations are slower by one factor each."""
    generator = random.Random(0)
    with open_history(file, create=True) as history:
        for i, run_factors in enumerate(factors):
            records = []
            for k, factor in enumerate(run_factors):
                factor *= 1 + generator.uniform(-noise, noise)
                records += make_repetitions(collective_case(f"op{k}"), factor, count=1, n=1)
            history.add(make_entry(file.parent, i, records=records))
        return check_newest(history)


@pytest.mark.parametrize(("num_series", "verdict"), [(1, "SLOWER"), (60, "AMBIGUOUS")])
def test_check_controls_false_discoveries(num_series: int, verdict: str, tmp_path: Path) -> None:
    steady = [1.0] * (num_series - 1)
    factors = [[1.0, *steady]] * 6 + [[1.055, *steady]] * 3
    result = check_noisy_runs(tmp_path / "h.sqlite", factors, noise=0.02)
    assert find_finding(result, collective_case("op0")).word == verdict


def test_check_reports_a_drift(tmp_path: Path) -> None:
    factors = [[1.004**i] * 3 for i in range(24)]
    result = check_noisy_runs(tmp_path / "h.sqlite", factors, noise=0.01)
    assert result.counts == {"DRIFT": 3}
    assert result.code() == 0
    assert result.code(fail_on_unknown=True) == 3
    [series, *_] = json.loads(render_json(result, 0))["series"]
    assert series["slope"] == pytest.approx(0.004, abs=0.001)


def test_check_suspects_one_slow_run(tmp_path: Path) -> None:
    factors = [[1.0] * 3] * 23 + [[1.0, 1.0, 2.0]]
    result = check_noisy_runs(tmp_path / "h.sqlite", factors, noise=0.01)
    assert find_finding(result, collective_case("op2")).word == "SUSPECT"
    assert result.counts == {"SUSPECT": 1, "SAME": 2}
    assert result.code() == 0
    assert result.code(fail_on_unknown=True) == 3


def test_check_applies_a_measured_floor_to_its_series(history: History, tmp_path: Path) -> None:
    fill_history(history, tmp_path, [1.1] * 4, first=12)
    floor = make_floor(0.15)
    [fingerprint] = [s.fingerprint for s in history.series().values() if s.case == CASE]
    result = check(history, newest(history, "main"), RULE, {fingerprint: floor})
    assert find_finding(result).word == "SAME"
    assert find_finding(result).measured == floor
    assert find_finding(result, OTHER_CASE).word == "SLOWER"


@pytest.mark.parametrize(
    ("factor", "verdict", "code", "outcome"),
    [(1.0, "SAME", 0, "PASS"), (1.1, "SLOWER", 1, "FAIL"), (0.8, "SAME", 0, "PASS")],
)
def test_folder_is_compared_with_the_newest_level(
    factor: float, verdict: str, code: int, outcome: str, twelve_runs: Path, tmp_path: Path
) -> None:
    content = twelve_runs.read_bytes()
    result = check_folder(twelve_runs, write_history_run(tmp_path, 99, factor), "main", RULE)
    assert result.counts == {verdict: 2}
    assert result.code() == code
    assert answer(result).startswith(outcome)
    assert twelve_runs.read_bytes() == content


def test_folder_is_not_blamed_for_a_step_of_its_branch(history: History, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    similar = write_history_run(tmp_path / "similar", 99, 1.1)
    slower = write_history_run(tmp_path / "slower", 99, 1.3)
    for i in range(12, 16):
        fill_history(history, tmp_path, [1.1], first=i)
        assert check_folder(file, similar, "main", RULE).counts == {"SAME": 2}
        assert check_folder(file, slower, "main", RULE).counts == {"SLOWER": 2}


def make_counted(*calls: float) -> list[Record]:
    """Return one repetition for each number of all_reduce calls; without any, it has no counts."""
    counts: list[dict[str, float]] = [
        {"calls.dp": number, "calls.dp.all_reduce": number, "sent.dp.all_reduce": 8.0}
        for number in calls
    ]
    return [
        ok_record(step_case("ddp"), i, metrics={**step_metrics(0.02), **values(metrics)})
        for i, metrics in enumerate(counts or [{}])
    ]


def add_counted(history: History, folder: Path, *calls: float) -> Check:
    entry = make_entry(folder, len(history.runs()), records=make_counted(*calls))
    history.add(entry)
    return check_newest(history)


def list_failures(result: Check) -> list[tuple[str, str]]:
    return [(change.told, run_id) for _, change, run_id in result.changes if change.fails]


def describe(base: int, new: int) -> str:
    return f"all_reduce on dp: {base} -> {new} calls a step, as many bytes"


@pytest.fixture
def empty(tmp_path: Path) -> Any:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        yield history


def test_changed_count_fails_until_it_is_intended(empty: History, tmp_path: Path) -> None:
    assert add_counted(empty, tmp_path, 2.0).counted == ()
    assert list_failures(add_counted(empty, tmp_path, 2.0)) == []
    for _ in range(2):
        result = add_counted(empty, tmp_path, 5.0)
        assert list_failures(result) == [(describe(2, 5), "run-002")]
        assert result.code() == 1
    empty.annotate("run-002", "*ddp*", "smaller buckets")
    assert list_failures(add_counted(empty, tmp_path, 5.0)) == []
    assert list_failures(add_counted(empty, tmp_path, 2.0)) == [(describe(5, 2), "run-005")]


def test_run_without_counts_is_passed_over(empty: History, tmp_path: Path) -> None:
    add_counted(empty, tmp_path, 2.0)
    result = add_counted(empty, tmp_path)
    assert result.counted == ()
    assert result.code() == 0
    assert list_failures(add_counted(empty, tmp_path, 5.0)) == [(describe(2, 5), "run-002")]


def test_folder_is_compared_with_the_newest_counts(empty: History, tmp_path: Path) -> None:
    add_counted(empty, tmp_path, 9.0)
    add_counted(empty, tmp_path, 2.0)
    path = write_history_run(tmp_path / "new", 99, records=make_counted(5.0))
    result = check_folder(tmp_path / "h.sqlite", path, "main", RULE)
    assert list_failures(result) == [(describe(2, 5), "run-099")]
    assert answer(result).startswith("FAIL: 1 CHANGED of 1 series")
