"""A step is found where it is; noise, spikes and single wild nights are none."""

import math
import random
from collections.abc import Iterator

import pytest
from scipy import stats  # type: ignore[import-untyped]

from reports.comparing.changepoints import StepRule, best_split, clipped_p, newest_shift, segments

RULE = StepRule()


def noisy(seed: int, steps: dict[int, float], n: int = 30, sigma: float = 0.01, spikes: float = 0.0) -> list[float]:
    """Return times around 1 ms whose level is multiplied at the given places."""
    rng = random.Random(seed)

    def values() -> Iterator[float]:
        level = 1e-3
        for i in range(n):
            level *= steps.get(i, 1.0)
            spike = 0.3 * rng.random() if rng.random() < spikes else 0.0
            yield level * math.exp(rng.gauss(0, sigma) + spike)

    return list(values())


def share(found: int, of: int) -> float:
    return found / of


def test_one_level_is_one_segment_and_nothing_is_none() -> None:
    [only] = segments([1.0] * 20, RULE)
    assert (only.start, only.stop, only.seconds) == (0, 20, 1.0)
    assert segments([], RULE) == ()
    assert newest_shift([], RULE) is None


def test_a_step_is_found_where_it_is() -> None:
    values = [1.0, 1.01, 0.99] * 5 + [1.1, 1.11, 1.09, 1.1]
    assert [(one.start, one.stop) for one in segments(values, RULE)] == [(0, 15), (15, 19)]
    shift = newest_shift(values, RULE)
    assert shift is not None
    assert shift.at == 15
    assert shift.change == pytest.approx(0.1)
    assert shift.p_value < 1e-6


def test_a_faster_level_is_a_negative_change() -> None:
    shift = newest_shift([1.0, 1.01, 0.99] * 4 + [0.8] * 4, RULE)
    assert shift is not None
    assert shift.change == pytest.approx(-0.2)


def test_what_went_up_and_came_back_is_no_shift() -> None:
    values = noisy(1, {10: 1.2, 20: 1 / 1.2})
    assert len(segments(values, RULE)) == 3
    shift = newest_shift(values, RULE)
    assert shift is not None
    assert shift.change < 0, "it is faster than the level before, and as fast as the fastest"


def test_an_improvement_that_was_lost_is_slower() -> None:
    shift = newest_shift(noisy(2, {10: 0.8, 20: 1.25}), RULE)
    assert shift is not None
    assert shift.change == pytest.approx(0.25, abs=0.02)
    assert shift.at == 20


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_slow_nights_are_no_step(count: int) -> None:
    assert newest_shift([1.0, 1.01, 0.99] * 8 + [1.5] * count, RULE) is None
    assert newest_shift([1.0, 1.01, 0.99] * 8 + [1.5] * 3, RULE) is not None


def test_fewer_than_eight_values_have_no_step() -> None:
    assert newest_shift([1.0, 1.01, 0.99, 1.0, 2.0, 2.01, 1.99], RULE) is None
    assert newest_shift([1.0, 1.01, 0.99, 1.0, 1.0, 2.0, 2.01, 1.99], RULE) is not None


@pytest.mark.parametrize(("step", "found"), [(1.025, False), (1.04, True)])
def test_a_change_within_the_floor_is_none(step: float, found: bool) -> None:
    values = [1.0, 1.0001] * 10 + [step, step * 1.0001] * 5
    assert (newest_shift(values, RULE) is not None) == found


def test_the_floor_is_the_rules() -> None:
    values = [1.0, 1.0001] * 10 + [1.04, 1.0401] * 5
    assert newest_shift(values, StepRule(floor=0.05)) is None


def test_two_wild_nights_of_three_are_no_step() -> None:
    assert newest_shift([1.0, 1.01, 0.99] * 8 + [1.3, 1.0, 1.4], RULE) is None


def test_the_split_is_the_best_one() -> None:
    assert best_split([1.0] * 7 + [2.0] * 5, 3) == 7
    assert best_split([1.0] * 2 + [2.0] * 8, 3) == 3, "as near as the sides allow"


def test_without_outliers_the_p_value_is_students() -> None:
    before, after = [0.01, -0.01, 0.012, -0.012, 0.011, -0.011], [0.019, 0.021, 0.03, 0.01]
    assert clipped_p(before, after) == pytest.approx(stats.ttest_ind(before, after).pvalue, rel=1e-9)


def test_one_outlier_hides_no_step() -> None:
    before, after = [0.0, 0.01, -0.01] * 5, [0.1, 0.11, 0.09]
    assert clipped_p([*before, 5.0], after) < 1e-6 < stats.ttest_ind([*before, 5.0], after).pvalue


def test_values_without_scatter_are_told_apart_or_alike() -> None:
    assert clipped_p([1.0] * 4, [1.0] * 4) == 1.0
    assert clipped_p([1.0] * 4, [2.0] * 4) == 0.0


@pytest.mark.parametrize(("sigma", "spikes", "most"), [(0.01, 0.0, 0.0), (0.02, 0.0, 0.01), (0.01, 0.1, 0.015)])
def test_false_alarms_are_rare(sigma: float, spikes: float, most: float) -> None:
    shifts = [newest_shift(noisy(seed, {}, sigma=sigma, spikes=spikes), RULE) for seed in range(300)]
    assert share(sum(shift is not None and shift.change > 0 for shift in shifts), 300) <= most


@pytest.mark.parametrize(
    ("after", "sigma", "spikes", "least"), [(3, 0.01, 0.0, 0.9), (5, 0.01, 0.1, 0.85), (5, 0.02, 0.0, 0.7)]
)
def test_five_percent_are_found(after: int, sigma: float, spikes: float, least: float) -> None:
    shifts = [newest_shift(noisy(seed, {30 - after: 1.05}, sigma=sigma, spikes=spikes), RULE) for seed in range(300)]
    assert share(sum(shift is not None and shift.change > 0 for shift in shifts), 300) >= least
