"""The gate: slower since when, what was meant, what is new, missing or broken, how sure, and how it is shown."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.results.records import Record
from parbench.reports.history.database import History, open_history
from parbench.reports.history.gate import MISSED_RUNS, Check, Finding, check, check_folder, newest
from parbench.reports.history.levels import StepRule
from parbench.reports.history.show import answer, render, render_courses, render_json
from parbench.reports.regression.compare import Word
from parbench.reports.regression.noise_floor import Floor
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions
from tests.support.history_fixtures import (
    fill_history,
    make_daily_records,
    make_entry,
    write_history_run,
)
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    HOSTILE_TEXT,
    WORLD,
    collective_case,
    failed_record,
)

RULE = StepRule()
PAIR = msgspec.structs.replace(WORLD, size=2)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twelve")
    with open_history(folder / "h.sqlite", create=True) as history:
        fill_history(history, folder, [1.0] * 12)
    return folder / "h.sqlite"


@pytest.fixture
def nights(twelve: Path, tmp_path: Path) -> Iterator[History]:
    with open_history(Path(shutil.copy(twelve, tmp_path))) as history:
        yield history


def check_newest(history: History, rule: StepRule = RULE) -> Check:
    return check(history, newest(history, "main"), rule)


def of(found: Check, case: object = CASE) -> Finding:
    [one] = [one for one in found.findings if one.series.case == case]
    return one


def test_check_needs_eight_runs(nights: History) -> None:
    found = check_newest(nights)
    assert (found.counts, found.code(), found.code(fail_on_unknown=True)) == ({"SAME": 2}, 0, 0)
    few = check(nights, nights.line("run-006"), RULE)
    assert (few.counts, few.code(), few.code(fail_on_unknown=True)) == ({"INSUFFICIENT": 2}, 0, 3)
    assert of(few).reason == "7 of the 8 runs that are needed"
    assert check(nights, nights.line("run-007"), RULE).counts == {"SAME": 2}


def test_check_reports_a_step_since_its_first_run(nights: History, tmp_path: Path) -> None:
    fill_history(nights, tmp_path, [1.1] * 2, first=12)
    assert check_newest(nights).counts == {"SUSPECT": 2}, (
        "two runs are no level, and may become one"
    )
    fill_history(nights, tmp_path, [1.1] * 2, first=14)
    found = check_newest(nights)
    one = of(found)
    assert one.shift is not None
    assert (one.word, one.since, found.code()) == ("SLOWER", "run-012", 1)
    assert one.shift.change == pytest.approx(0.1, abs=0.01)
    assert len(one.times) == 16
    assert check_newest(nights, StepRule(floor=0.15)).counts == {"SAME": 2}
    assert of(check_newest(nights, StepRule(window=9))).times == one.times[-9:]


def test_check_passes_a_faster_step(nights: History, tmp_path: Path) -> None:
    fill_history(nights, tmp_path, [0.8] * 4, first=12)
    found = check_newest(nights)
    assert (found.counts, found.code()) == ({"FASTER": 2}, 0)


def test_check_uses_earlier_runs_of_the_branch(nights: History, tmp_path: Path) -> None:
    found = check_newest(nights)
    fill_history(nights, tmp_path, [2.0] * 6, first=12, branch="topic")
    fill_history(nights, tmp_path, [1.5] * 6, first=18)
    assert check(nights, nights.line("run-011"), RULE) == found
    assert len(of(check_newest(nights)).times) == 18


def test_check_starts_a_series_for_version_or_world(nights: History, tmp_path: Path) -> None:
    newer = {**ENVIRONMENT, "torch": {**ENVIRONMENT["torch"], "version": "2.14.0"}}  # type: ignore[dict-item]
    nights.add(make_entry(tmp_path, 12, factor=1.5, environment=newer))
    one = of(check_newest(nights))
    assert one.word == "INSUFFICIENT"
    assert one.reason.endswith("; a new series: torch.version: 2.13.0 -> 2.14.0")
    nights.add(
        make_entry(tmp_path, 13, records=make_repetitions(CASE, world=PAIR), environment=newer)
    )
    found = check_newest(nights)
    assert found.counts == {"INSUFFICIENT": 1}, (
        "on its world nothing was there before, so nothing is missing"
    )
    assert of(found).reason.endswith("; a new series: another world")


def test_check_names_changes_at_a_step(nights: History, tmp_path: Path) -> None:
    host = {**ENVIRONMENT, "host": {**ENVIRONMENT["host"], "kernel": "6.99"}}  # type: ignore[dict-item]
    fill_history(nights, tmp_path, [1.1] * 4, first=12, environment=host, commit="abc")
    one = of(check_newest(nights))
    assert (one.word, one.differs) == ("SLOWER", ("commit: - -> abc", "host.kernel: - -> 6.99"))


def test_annotation_restarts_matching_series(nights: History, tmp_path: Path) -> None:
    fill_history(nights, tmp_path, [1.1] * 9, first=12)
    nights.annotate("run-012", "*all_reduce*", "meant")
    found = check_newest(nights)
    assert (of(found).word, len(of(found).times)) == ("SAME", 9)
    assert of(found, OTHER_CASE).word == "SLOWER", "it fits the other glob alone"


def test_annotation_needs_branch_and_earlier_run(nights: History, tmp_path: Path) -> None:
    nights.add(make_entry(tmp_path, 12, branch="topic"))
    fill_history(nights, tmp_path, [1.1] * 4, first=13)
    nights.annotate("run-012", "*", "elsewhere")
    assert of(check_newest(nights)).word == "SLOWER"
    nights.annotate("run-016", "*", "too late for run-015")
    assert of(check(nights, nights.line("run-015"), RULE)).word == "SLOWER"


def test_check_reports_bad_and_empty_runs(nights: History, tmp_path: Path) -> None:
    table: list[tuple[Any, str, int]] = [
        ("wrong", "WRONG", 1),
        ("failed", "FAILED", 4),
        ("hang", "FAILED", 4),
    ]
    for i, (status, word, code) in enumerate(table, start=12):
        nights.add(
            make_entry(
                tmp_path,
                i,
                records=[
                    *make_repetitions(OTHER_CASE),
                    failed_record(CASE, 0, status, "rank 1 said so"),
                ],
            )
        )
        found = check_newest(nights)
        assert (of(found).word, of(found).reason, found.code()) == (word, "rank 1 said so", code), (
            status
        )
        assert of(found, OTHER_CASE).word == "SAME"
    nights.add(make_entry(tmp_path, 15, records=[]))
    assert (check_newest(nights).counts, check_newest(nights).code()) == ({"MISSING": 2}, 4)


def test_check_reports_a_missing_case_three_times(nights: History, tmp_path: Path) -> None:
    nights.add(
        make_entry(tmp_path, 12, records=make_daily_records(12, cases=[OTHER_CASE]), preset="smoke")
    )
    assert check_newest(nights).counts == {"SAME": 1}, "another preset asks for other cases"
    for i in range(13, 13 + MISSED_RUNS):
        nights.add(make_entry(tmp_path, i, records=make_daily_records(i, cases=[OTHER_CASE])))
        found = check_newest(nights)
        assert (of(found).word, found.code()) == ("MISSING", 4)
    assert (
        of(found).reason
        == "one of the 3 runs before that share a case with this one has it, and this one has not"
    )
    nights.add(make_entry(tmp_path, 20, records=make_daily_records(20, cases=[OTHER_CASE])))
    assert check_newest(nights).counts == {"SAME": 1}


def assert_alternating_runs_miss_nothing(folder: Path, kinds: Sequence[Sequence[Record]]) -> None:
    with open_history(folder / "h.sqlite", create=True) as history:
        for i in range(5):
            history.add(make_entry(folder, i, records=kinds[i % 2]))
            few: dict[Word, int] = {
                "INSUFFICIENT": len({record.case.id for record in kinds[i % 2]})
            }
            assert check_newest(history).counts == few, i


def test_alternating_runs_miss_nothing(tmp_path: Path) -> None:
    pair = [*make_repetitions(CASE, world=PAIR), *make_repetitions(OTHER_CASE, world=PAIR)]
    assert_alternating_runs_miss_nothing(tmp_path / "worlds", [make_daily_records(0), pair])
    with open_history(tmp_path / "worlds" / "h.sqlite") as history:
        history.add(make_entry(tmp_path, 8, records=make_daily_records(8, cases=[OTHER_CASE])))
        found = check_newest(history)
    missing = of(found)
    assert (missing.word, missing.series.world.size, len(found.findings)) == ("MISSING", 4, 2), (
        "on its own world it is"
    )
    selections = [make_daily_records(0, cases=[CASE]), make_daily_records(1, cases=[OTHER_CASE])]
    assert_alternating_runs_miss_nothing(tmp_path / "selections", selections)


def test_check_controls_false_discoveries(tmp_path: Path) -> None:
    def jitter(i: int, k: int) -> float:
        return random.Random(1000 * i + k).uniform(-0.02, 0.02)

    def words(folder: Path, count: int) -> Sequence[str]:
        cases = [collective_case(f"op{k}", 1024) for k in range(count)]
        with open_history(folder / "h.sqlite", create=True) as history:
            for i in range(9):
                factors = [
                    (1.045 if i >= 6 and k == 0 else 1.0) * (1 + jitter(i, k)) for k in range(count)
                ]
                records = [
                    r
                    for case, factor in zip(cases, factors, strict=True)
                    for r in make_repetitions(case, factor, count=2)
                ]
                history.add(make_entry(folder, i, records=records))
            return [one.word for one in check_newest(history).findings]

    assert words(tmp_path / "one", 1) == ["SLOWER"]
    crowd = words(tmp_path / "crowd", 60)
    assert (crowd[0], set(crowd[1:])) == ("AMBIGUOUS", {"SAME"})


def test_newest_refuses_a_branch_without_runs(nights: History, tmp_path: Path) -> None:
    assert (
        usage_error(newest, nights, "topic")
        == "the history has no run of branch 'topic': it has main"
    )
    with open_history(tmp_path / "none.sqlite", create=True) as history:
        assert usage_error(newest, history, "topic").endswith("'topic': it has no run at all")


def test_check_applies_a_measured_floor_to_its_series(nights: History, tmp_path: Path) -> None:
    fill_history(nights, tmp_path, [1.1] * 4, first=12)
    floor = Floor(
        series="", host="", measured="2026-01-02T00:00:00Z", launches=20, noise=0.1, floor=0.15
    )
    names = {one.case.id: one.fingerprint for one in nights.series().values()}
    found = check(nights, newest(nights, "main"), RULE, {names[CASE.id]: floor})
    assert (of(found).word, of(found).measured) == ("SAME", floor)
    assert (of(found, OTHER_CASE).word, of(found, OTHER_CASE).measured) == ("SLOWER", None)
    low = msgspec.structs.replace(floor, floor=0.01)
    high = check(nights, newest(nights, "main"), StepRule(floor=0.2), {names[CASE.id]: low})
    assert of(high).word == "SAME", "the rule's floor stays where it is more"


def environment_of(name: str) -> dict[str, Any]:
    return {**ENVIRONMENT, "host": {**ENVIRONMENT["host"], "name": name}}  # type: ignore[dict-item]


@pytest.fixture
def stepped(nights: History, tmp_path: Path) -> History:
    fill_history(nights, tmp_path, [1.1] * 4, first=12, commit="0123456789abcdef")
    return nights


def test_courses_show_levels_within_the_window(stepped: History) -> None:
    text = render_courses(stepped, "*all_reduce*", None, RULE)
    assert "collective.all_reduce size_bytes=1024" in text
    assert "1.00 ms from run-000 on (12 runs)" in text
    assert "1.10 ms from run-012 on (4 runs)" in text
    assert "from run-006 on (6 runs)" in render_courses(
        stepped, "*all_reduce*", None, StepRule(window=10)
    )


def test_render_shows_verdict_change_and_run(stepped: History) -> None:
    text = render(check_newest(stepped))
    lines = text.splitlines()
    assert "2 SLOWER of 2 series" in lines[0]
    assert "all_reduce 1K +9.8 %" in lines[0]
    assert lines[2].split()[:5] == ["SLOWER", "+9.8", "%", "1.10", "ms"]
    assert "run-012" in lines[2]
    assert "parbench history annotate" in text
    assert "PASS" in render(check(stepped, stepped.line("run-011"), RULE))


def test_render_markdown_is_an_intact_table(stepped: History) -> None:
    found = check_newest(stepped)
    rows = [line for line in render(found, "markdown").splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert {line.count("|") for line in rows} == {7}
    assert rows[2].startswith("| SLOWER | +9.8 % |")
    hostile = Finding(series=found.findings[0].series, word="WRONG", reason=HOSTILE_TEXT + "|")
    text = render(Check(line=found.line, rule=RULE, findings=(hostile,)), "markdown")
    assert "<script>" not in text
    assert "\x1b" not in text
    assert text.count("\n| WRONG") == 1


def test_check_reports_a_drift_and_a_rise_of_one_run(tmp_path: Path) -> None:
    cases = [collective_case(f"op{k}", 1024) for k in range(6)]

    def checked(folder: Path, factor: Callable[[int, int], float], nights: int = 24) -> Check:
        rng = random.Random(0)
        with open_history(folder / "h.sqlite", create=True) as history:
            for i in range(nights):
                factors = [factor(i, k) * rng.lognormvariate(0, 0.01) for k in range(len(cases))]
                records = [
                    r
                    for case, one in zip(cases, factors, strict=True)
                    for r in make_repetitions(case, one, count=2)
                ]
                history.add(make_entry(folder, i, records=records))
            return check_newest(history)

    drift = checked(tmp_path / "drift", lambda i, k: 1.004**i)
    assert (drift.counts, drift.code(), drift.code(fail_on_unknown=True)) == ({"DRIFT": 6}, 0, 3)
    assert of(drift, cases[0]).reason.startswith("it drifts by +0.")
    assert json.loads(render_json(drift, 0))["series"][0]["slope"] == pytest.approx(
        0.004, abs=0.001
    )
    first = checked(tmp_path / "first", lambda i, k: 2.0 if (i, k) == (23, 2) else 1.0)
    assert (of(first, cases[2]).word, first.code(), first.code(fail_on_unknown=True)) == (
        "SUSPECT",
        0,
        3,
    )
    assert first.counts == {"SUSPECT": 1, "SAME": 5}
    assert "beyond the variation of runs" in render(first)


def test_check_folder_compares_with_the_newest_level(
    nights: History, twelve: Path, tmp_path: Path
) -> None:
    def against(factor: float, file: Path = twelve, **more: Any) -> Check:
        return check_folder(
            file,
            write_history_run(tmp_path / str(random.random()), 99, factor, **more),
            "main",
            RULE,
        )

    before = twelve.read_bytes()
    for factor, words, code, said in (
        (1.0, {"SAME": 2}, 0, "PASS: none of 2 series is slower, against the last 12 runs of main"),
        (1.1, {"SLOWER": 2}, 1, "FAIL: 2 SLOWER of 2 series, against the last 12 runs of main: "),
        (0.8, {"SAME": 2}, 0, "PASS: "),
    ):
        found = against(factor)
        assert (found.counts, found.code()) == (words, code), factor
        assert answer(found).startswith(said)
    elsewhere = against(1.1, environment=environment_of("b"))
    assert (elsewhere.counts, elsewhere.code()) == ({"INSUFFICIENT": 2}, 0)
    assert of(elsewhere).reason.endswith("a new series: host.name: node-a -> b")
    few = against(2.0, tmp_path / "absent.sqlite")
    assert (few.code(), few.code(fail_on_unknown=True)) == (0, 3)
    assert twelve.read_bytes() == before
    stepped = tmp_path / "h.sqlite"  # that of nights
    for i in range(12, 16):
        fill_history(nights, tmp_path, [1.1], first=i)
        assert against(1.1, stepped).counts == {"SAME": 2}, (
            f"main has been slower for {i - 11} runs"
        )
        assert against(1.3, stepped).counts == {"SLOWER": 2}
