"""A measured floor of a series: its height, its file and the option `--floor`."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run
from parbench.reports.compare.rule import Rule
from parbench.reports.compare.thresholds import (
    fingerprints,
    floors_of,
    measure_floors,
    parse_floor,
    read_thresholds,
    save_thresholds,
)
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_floor, run_from_records
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import ENVIRONMENT, failed_record, ok_record

RULE = Rule()
FLOOR = make_floor(0.031)


def draw_times(seed: int, sigma: float, count: int = 20) -> list[float]:
    generator = random.Random(seed)
    return [1e-3 * math.exp(generator.gauss(0, sigma)) for _ in range(count)]


def compute_floor(times: Sequence[float]) -> float:
    [floor], _ = floors_of([dict(enumerate(times))], RULE)
    return floor


def make_runs(times: Sequence[float], *cases: Case) -> list[Run]:
    runs = []
    for seconds in times:
        records = [ok_record(case, 0, seconds) for case in cases]
        runs.append(run_from_records(records, ENVIRONMENT))
    return runs


@pytest.mark.parametrize(
    "times", [draw_times(1, 0.003), [1e-3] * 10, [1.03**i for i in range(10)]]
)
def test_floor_of_quiet_times_and_drift_is_that_of_the_rule(times: list[float]) -> None:
    assert compute_floor(times) == RULE.floor


def test_floor_covers_a_moved_level() -> None:
    slower = [1.1 * seconds for seconds in draw_times(2, 0.002, 10)]
    times = draw_times(1, 0.002, 10) + slower
    floor = compute_floor(times)
    assert floor == pytest.approx(0.1, abs=0.004)
    assert compute_floor(times[::-1]) == pytest.approx(floor)
    assert compute_floor([1 / seconds for seconds in times]) == pytest.approx(floor)


def test_measure_floors_uses_series_fingerprints() -> None:
    times = draw_times(3, 0.01)
    runs = make_runs(times, CASE, OTHER_CASE)
    floors, autocorrelation = measure_floors(runs, RULE)
    assert 0 <= autocorrelation < 1
    by_case = fingerprints(runs[0])
    assert set(floors) == set(by_case.values())
    floor = floors[by_case[CASE.id]]
    assert floor.series == CASE.label
    assert floor.repetitions == 20
    assert floor.noise == pytest.approx(0.01, rel=0.35)
    assert floor.floor == compute_floor(times)


def test_measure_floors_needs_ten_valid_runs() -> None:
    runs = make_runs(draw_times(1, 0.01, 10), CASE)
    wrong = run_from_records([failed_record(CASE, 0, "wrong")], ENVIRONMENT)
    floors, _ = measure_floors([*runs, wrong], RULE)
    [floor] = floors.values()
    assert floor.repetitions == 10
    assert measure_floors([*runs[:9], wrong], RULE) == ({}, 0.0)


def test_keep_floors_updates_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "floor.json"
    newer = make_floor(0.05)
    save_thresholds(file, {"a": FLOOR, "b": FLOOR})
    save_thresholds(file, {"b": newer})
    assert read_thresholds(file) == {"a": FLOOR, "b": newer}
    assert json.loads(file.read_text())["schema_version"] == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no floors"),
        ('{"schema_version": 1, "floors": {"a": 3}}', "no floors"),
        ('{"schema_version": 2, "floors": {}}', "schema 2"),
    ],
)
def test_foreign_floor_file_is_refused_and_kept(
    content: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "floor.json"
    file.write_text(content)
    assert problem in usage_error(read_thresholds, file)
    assert problem in usage_error(save_thresholds, file, {"a": FLOOR})
    assert file.read_text() == content


@pytest.mark.parametrize(("text", "floor"), [("0.5%", 0.005), ("0%", 0.0), ("100%", 1.0)])
def test_floor_is_a_percentage(text: str, floor: float) -> None:
    assert parse_floor(text) == pytest.approx(floor)


@pytest.mark.parametrize("text", ["3", "-1%", "101%", "nan%"])
def test_other_floors_are_refused(text: str) -> None:
    assert repr(text) in usage_error(parse_floor, text)
