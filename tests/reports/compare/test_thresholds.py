"""Measured thresholds of series: their height, their file and the option `--min-effect`."""

import math
import random
from pathlib import Path

import pytest

from parbench.reports.compare.rule import Rule
from parbench.reports.compare.thresholds import (
    compute_threshold,
    find_thresholds,
    measure_thresholds,
    parse_percentage,
    read_thresholds,
    save_thresholds,
)
from tests.support.refusals import usage_error
from tests.support.reports.compare_fixtures import (
    CASE,
    make_threshold,
    run_from_records,
)
from tests.support.reports.reports_fixtures import ENVIRONMENT, failed_record, ok_record

THRESHOLD = make_threshold(0.031)


def draw_times(seed: int, sigma: float, count: int = 20) -> list[float]:
    generator = random.Random(seed)
    return [1e-3 * math.exp(generator.gauss(0, sigma)) for _ in range(count)]


@pytest.mark.parametrize("times", [draw_times(1, 0.003), [1e-3] * 10])
def test_threshold_of_quiet_times_is_that_of_the_rule(times: list[float]) -> None:
    assert compute_threshold(times) == Rule().min_effect


def test_threshold_covers_a_change_of_level() -> None:
    slower = [1.1 * seconds for seconds in draw_times(2, 0.002, 10)]
    times = draw_times(1, 0.002, 10) + slower
    for series in (times, times[::-1]):
        assert compute_threshold(series) == pytest.approx(0.1, abs=0.004)


def test_thresholds_need_ten_valid_runs() -> None:
    times = draw_times(1, 0.01, 10)
    runs = [run_from_records([ok_record(CASE, 0, seconds)], ENVIRONMENT) for seconds in times]
    wrong = run_from_records([failed_record(CASE, 0, "wrong")], ENVIRONMENT)
    [threshold] = measure_thresholds([*runs, wrong]).values()
    assert threshold.series == CASE.label
    assert measure_thresholds([*runs[:9], wrong]) == {}


def test_saved_thresholds_update_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "thresholds.json"
    newer = make_threshold(0.05)
    save_thresholds(file, {"a": THRESHOLD, "b": THRESHOLD})
    save_thresholds(file, {"b": newer})
    assert read_thresholds(file) == {"a": THRESHOLD, "b": newer}


@pytest.mark.parametrize("content", ["", '{"a": 3}'])
def test_foreign_file_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    file = tmp_path / "thresholds.json"
    file.write_text(content)
    assert "does not contain thresholds" in usage_error(save_thresholds, file, {"a": THRESHOLD})
    assert file.read_text() == content


@pytest.mark.parametrize(("text", "fraction"), [("0.5%", 0.005), ("0%", 0.0), ("100%", 1.0)])
def test_min_effect_is_a_percentage(text: str, fraction: float) -> None:
    assert parse_percentage(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["3", "-1%", "101%", "nan%"])
def test_other_min_effects_are_refused(text: str) -> None:
    assert repr(text) in usage_error(parse_percentage, text)
    assert "is not a percentage" in usage_error(parse_percentage, text)
    assert "nor an existing file" in usage_error(find_thresholds, text)
