"""Levels, steps, drifts and rises of the newest run are found where they are; noise and outliers are none."""

import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from parbench.reports.history.levels import (
    Judgement,
    Shift,
    StepRule,
    difference,
    estimate_noise,
    judge_series,
    newest_shift,
    segments,
)

RULE = StepRule()
Logs = NDArray[np.float64]
STILL = [1.0, 1.01, 0.99]


def noisy(
    seed: int, steps: dict[int, float], n: int = 30, sigma: float = 0.01, spikes: float = 0.0
) -> list[float]:
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
    found = [
        newest_shift(noisy(seed, steps, sigma=sigma, spikes=spikes), RULE) for seed in range(100)
    ]
    return sum(shift is not None and shift.change > 0 for shift in found) / 100


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
    assert shift_of(values).change < 0, (
        "it is faster than the level before, and as fast as the fastest"
    )
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


def test_difference_is_students_t_without_outliers() -> None:
    before, after = [0.01, -0.01, 0.012, -0.012, 0.011, -0.011], [0.019, 0.021, 0.03, 0.01]
    p_value = difference(np.array(before), np.array(after)).p_beyond(0.0)
    assert p_value == pytest.approx(stats.ttest_ind(before, after).pvalue, rel=1e-9)
    before, after = [*[0.0, 0.01, -0.01] * 5, 5.0], [0.1, 0.11, 0.09]
    assert difference(np.array(before), np.array(after)).p_beyond(0.0) < 1e-6
    assert difference(np.ones(4), np.ones(4)).p_beyond(0.0) == 1.0
    assert difference(np.ones(4), 2 * np.ones(4)).p_beyond(0.0) == 0.0


def simulate(
    seed: int, *, series: int = 20, runs: int = 30, cv: float = 0.03, rho: float = 0.0
) -> Logs:
    logs = np.random.default_rng(seed).normal(size=(series, runs))
    for i in range(1, runs):
        logs[:, i] = rho * logs[:, i - 1] + math.sqrt(1 - rho**2) * logs[:, i]
    return cv * logs


def judge(logs: Logs, rule: StepRule = RULE, *, candidate: bool = False) -> list[Judgement]:
    return judge_series(list(logs), [rule] * len(logs), newest_is_candidate=candidate)


def find_steps(logs: Logs) -> list[int]:
    return [
        i
        for i, one in enumerate(judge(logs))
        if one.is_significant and one.shift and one.shift.slope is None
    ]


def find_rises(logs: Logs, rule: StepRule = RULE, *, candidate: bool = True) -> list[int]:
    return [
        i for i, one in enumerate(judge(logs, rule, candidate=candidate)) if one.rise is not None
    ]


def test_noise_estimates_autocorrelation_and_variance_across_steps() -> None:
    for rho in (0.0, 0.3, 0.6):
        logs = simulate(5, series=100, rho=rho)
        logs[:50, 15:] += 0.3
        noise = estimate_noise(list(logs))
        assert noise.rho == pytest.approx(rho, abs=0.1)
        assert noise.variance == pytest.approx(0.03**2, rel=0.2)
    assert estimate_noise(list(simulate(5, series=3, rho=0.6))).rho == 0.0


def test_judge_seldom_reports_a_step_in_correlated_noise() -> None:
    assert sum(bool(find_steps(simulate(seed, rho=0.6, cv=0.1))) for seed in range(10)) <= 1


def test_trend_has_its_slope_and_a_step_is_no_trend() -> None:
    drift = math.log1p(0.003) * np.arange(30)
    for seed in range(5):
        shift = newest_shift(np.exp(simulate(seed, series=1, cv=0.01)[0] + drift).tolist(), RULE)
        assert shift is not None
        assert shift.slope == pytest.approx(0.003, abs=0.0007)
        assert shift.low < 0.09 < shift.high
    stepped = simulate(6, cv=0.01)
    stepped[:, 15:] += 0.09
    assert find_steps(stepped) == [*range(20)]


def test_judge_reports_a_rise_until_it_is_a_step() -> None:
    for cv in (0.02, 0.05):
        logs = simulate(9, cv=cv)
        assert (find_rises(logs, candidate=False), find_steps(logs)) == ([], [])
        for runs, is_step in ((1, False), (2, False), (3, True)):
            stepped = logs.copy()
            stepped[4, -runs:] += math.log(2)
            steps, rises = find_steps(stepped), find_rises(stepped, candidate=False)
            assert (steps, rises) == (([4], []) if is_step else ([], [4])), runs


def test_candidate_is_compared_with_the_last_level_and_the_last_run() -> None:
    for runs in (9, 11, 31):
        logs = simulate(13, runs=runs)
        assert find_rises(logs) == []
        one, every = logs.copy(), logs.copy()
        one[4, -1] += math.log(1.3)
        every[:, -1] += math.log(1.3)
        assert find_rises(one) == [4]
        assert find_rises(every) == [*range(20)]
        for since in (1, 2, 4):
            stepped = logs.copy()
            stepped[4, -1 - since :] += math.log(1.3)
            assert find_rises(stepped) == [], since
            stepped[4, -1] += math.log(1.5)
            assert find_rises(stepped) == [4], since
    faster = logs.copy()
    faster[4, -6:-1] -= math.log(1.3)
    assert find_rises(faster) == [4]
    assert find_rises(one, StepRule(floor=0.5)) == []


def test_candidate_like_the_runs_before_is_seldom_slower() -> None:
    rises = [find_rises(simulate(seed, runs=9, cv=0.1, rho=0.3)) for seed in range(40)]
    assert sum(map(bool, rises)) <= 3


def test_false_alarms_are_rare_and_five_percent_are_found() -> None:
    for sigma, spikes, most in ((0.01, 0.0, 0.0), (0.02, 0.0, 0.01), (0.01, 0.1, 0.03)):
        assert slower({}, sigma, spikes) <= most, (sigma, spikes)
    for after, sigma, spikes, least in (
        (3, 0.01, 0.0, 0.9),
        (5, 0.01, 0.1, 0.85),
        (5, 0.02, 0.0, 0.7),
    ):
        assert slower({30 - after: 1.05}, sigma, spikes) >= least, (after, sigma, spikes)
