"""A step is found where it is; noise, spikes and single wild nights are none."""

import math
import random

import pytest
from scipy import stats  # type: ignore[import-untyped]

from parbench.reports.history.levels import Shift, StepRule, best_split, difference, newest_shift, segments

RULE = StepRule()
STILL = [1.0, 1.01, 0.99]


def noisy(seed: int, steps: dict[int, float], n: int = 30, sigma: float = 0.01, spikes: float = 0.0) -> list[float]:
    rng, level, values = random.Random(seed), 1e-3, []
    for i in range(n):
        level *= steps.get(i, 1.0)
        spike = 0.3 * rng.random() if rng.random() < spikes else 0.0
        values.append(level * math.exp(rng.gauss(0, sigma) + spike))
    return values


def shift_of(values: list[float], rule: StepRule = RULE) -> Shift:
    found = newest_shift(values, rule)
    assert found is not None
    return found


def slower(steps: dict[int, float], sigma: float, spikes: float) -> float:
    found = [newest_shift(noisy(seed, steps, sigma=sigma, spikes=spikes), RULE) for seed in range(300)]
    return sum(shift is not None and shift.change > 0 for shift in found) / 300


def test_one_level_is_one_segment_and_nothing_is_none() -> None:
    [only] = segments([1.0] * 20, RULE)
    assert (only.start, only.stop, only.seconds) == (0, 20, 1.0)
    assert segments([], RULE) == ()
    assert newest_shift([], RULE) is None


def test_a_step_is_found_where_it_is_and_which_way() -> None:
    values = STILL * 5 + [1.1, 1.11, 1.09, 1.1]
    assert [(one.start, one.stop) for one in segments(values, RULE)] == [(0, 15), (15, 19)]
    shift = shift_of(values)
    assert (shift.at, shift.change) == pytest.approx((15, 0.1))
    assert shift.p_value < 1e-6
    assert shift_of(STILL * 4 + [0.8] * 4).change == pytest.approx(-0.2)


def test_what_went_up_and_came_back_is_no_slow_down_and_a_lost_improvement_is_one() -> None:
    values = noisy(1, {10: 1.2, 20: 1 / 1.2})
    assert len(segments(values, RULE)) == 3
    assert shift_of(values).change < 0, "it is faster than the level before, and as fast as the fastest"
    lost = shift_of(noisy(2, {10: 0.8, 20: 1.25}))
    assert (lost.at, lost.change) == pytest.approx((20, 0.25), abs=0.02)


def test_too_few_nights_and_changes_within_the_floor_are_no_step() -> None:
    for count, found in ((1, False), (2, False), (3, True)):
        assert (newest_shift(STILL * 8 + [1.5] * count, RULE) is not None) == found, count
    assert newest_shift([*STILL, 1.0, 2.0, 2.01, 1.99], RULE) is None, "seven values"
    assert newest_shift([*STILL, 1.0, 1.0, 2.0, 2.01, 1.99], RULE) is not None
    for step, floor, found in ((1.025, 0.03, False), (1.04, 0.03, True), (1.04, 0.05, False)):
        values = [1.0, 1.0001] * 10 + [step, step * 1.0001] * 5
        assert (newest_shift(values, StepRule(floor=floor)) is not None) == found, (step, floor)
    assert newest_shift(STILL * 8 + [1.3, 1.0, 1.4], RULE) is None, "two wild nights of three"


def test_the_split_is_the_best_one() -> None:
    assert best_split([1.0] * 7 + [2.0] * 5, 3) == 7
    assert best_split([1.0] * 2 + [2.0] * 8, 3) == 3, "as near as the sides allow"


def test_the_p_value_is_students_but_for_outliers() -> None:
    before, after = [0.01, -0.01, 0.012, -0.012, 0.011, -0.011], [0.019, 0.021, 0.03, 0.01]
    assert difference(before, after).p_beyond(0.0) == pytest.approx(stats.ttest_ind(before, after).pvalue, rel=1e-9)
    before, after = [*[0.0, 0.01, -0.01] * 5, 5.0], [0.1, 0.11, 0.09]
    assert difference(before, after).p_beyond(0.0) < 1e-6 < stats.ttest_ind(before, after).pvalue
    assert difference([1.0] * 4, [1.0] * 4).p_beyond(0.0) == 1.0, "without scatter"
    assert difference([1.0] * 4, [2.0] * 4).p_beyond(0.0) == 0.0


def test_false_alarms_are_rare_and_five_percent_are_found() -> None:
    for sigma, spikes, most in ((0.01, 0.0, 0.0), (0.02, 0.0, 0.01), (0.01, 0.1, 0.015)):
        assert slower({}, sigma, spikes) <= most, (sigma, spikes)
    for after, sigma, spikes, least in ((3, 0.01, 0.0, 0.9), (5, 0.01, 0.1, 0.85), (5, 0.02, 0.0, 0.7)):
        assert slower({30 - after: 1.05}, sigma, spikes) >= least, (after, sigma, spikes)
