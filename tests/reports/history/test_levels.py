"""Levels, steps, drifts and rises in the times of series; noise and outliers are none of them."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from parbench.reports.history.levels import (
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
STEADY = [1.0, 1.01, 0.99]


def find_shift(times: list[float], rule: StepRule = RULE) -> Shift:
    shift = newest_shift(times, rule)
    assert shift is not None
    return shift


def test_equal_times_are_one_segment() -> None:
    [segment] = segments([1.0] * 20, RULE)
    assert segment.stop == 20
    assert segment.seconds == 1.0
    assert newest_shift([], RULE) is None


@pytest.mark.parametrize("factor", [1.1, 0.8])
def test_step_is_found_where_it_is(factor: float) -> None:
    times = STEADY * 5 + [factor * seconds for seconds in STEADY]
    assert [segment.stop for segment in segments(times, RULE)] == [15, 18]
    shift = find_shift(times)
    assert shift.at == 15
    assert shift.change == pytest.approx(factor - 1)
    assert shift.p_value < 1e-6


def test_step_is_compared_with_the_fastest_level() -> None:
    slow = [1.2, 1.21, 1.19]
    recovered = find_shift(STEADY * 3 + slow * 3 + STEADY * 3)
    assert recovered.change < 0
    fast = [0.8, 0.81, 0.79]
    lost = find_shift(STEADY * 3 + fast * 3 + STEADY * 3)
    assert lost.at == 18
    assert lost.change == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("times", "is_step"),
    [
        (STEADY * 8 + [1.5] * 2, False),
        (STEADY * 8 + [1.5] * 3, True),
        ([1.0] * 4 + [2.0] * 3, False),
        ([1.0] * 5 + [2.0] * 3, True),
        (STEADY * 8 + [1.3, 1.0, 1.4], False),
    ],
)
def test_step_needs_three_runs_of_eight(times: list[float], is_step: bool) -> None:
    shift = newest_shift(times, RULE)
    assert (shift is not None) == is_step


@pytest.mark.parametrize(
    ("factor", "floor", "is_step"),
    [(1.025, 0.03, False), (1.04, 0.03, True), (1.04, 0.05, False)],
)
def test_step_exceeds_the_floor(factor: float, floor: float, is_step: bool) -> None:
    times = [1.0, 1.0001] * 10 + [factor, factor * 1.0001] * 3
    rule = StepRule(floor=floor)
    assert len(segments(times, rule)) == (2 if is_step else 1)
    shift = newest_shift(times, rule)
    assert (shift is not None) == is_step


def test_difference_is_students_t_without_outliers() -> None:
    base = np.array([0.01, -0.01, 0.012, -0.012, 0.011, -0.011])
    new = np.array([0.019, 0.021, 0.03, 0.01])
    p_value = stats.ttest_ind(base, new).pvalue
    assert difference(base, new).p_beyond(0.0) == pytest.approx(p_value, rel=1e-9)
    outlier = np.array([0.0, 0.01, -0.01] * 5 + [5.0])
    slower = np.array([0.1, 0.11, 0.09])
    assert difference(outlier, slower).p_beyond(0.0) < 1e-6


def simulate(
    seed: int, series: int = 20, runs: int = 30, cv: float = 0.03, rho: float = 0.0
) -> Logs:
    """Return logarithms of times with this variation and autocorrelation from run to run."""
    logs = np.random.default_rng(seed).normal(size=(series, runs))
    for i in range(1, runs):
        logs[:, i] = rho * logs[:, i - 1] + math.sqrt(1 - rho**2) * logs[:, i]
    return cv * logs


def find_steps(logs: Logs) -> list[int]:
    steps = []
    for i, judgement in enumerate(judge_series(list(logs), [RULE] * len(logs))):
        shift = judgement.shift
        if judgement.is_significant and shift is not None and shift.slope is None:
            steps.append(i)
    return steps


def find_rises(logs: Logs, rule: StepRule = RULE) -> list[int]:
    """Return the series whose newest time, of a run to compare, is above the others."""
    judgements = judge_series(list(logs), [rule] * len(logs), newest_is_candidate=True)
    return [i for i, judgement in enumerate(judgements) if judgement.rise is not None]


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_noise_is_estimated_across_steps(rho: float) -> None:
    logs = simulate(5, series=100, rho=rho)
    logs[:50, 15:] += 0.3
    noise = estimate_noise(list(logs))
    assert noise.rho == pytest.approx(rho, abs=0.1)
    assert noise.variance == pytest.approx(0.03**2, rel=0.2)


def test_correlated_noise_seldom_has_steps() -> None:
    steps = [find_steps(simulate(seed, rho=0.6, cv=0.1)) for seed in range(6)]
    assert sum(map(bool, steps)) <= 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drift_has_its_slope(seed: int) -> None:
    [logs] = simulate(seed, series=1, cv=0.01)
    logs += math.log1p(0.003) * np.arange(30)
    shift = find_shift(np.exp(logs).tolist())
    assert shift.slope == pytest.approx(0.003, abs=0.0007)
    assert shift.low < 1.003**29 - 1 < shift.high


def test_step_is_not_a_drift() -> None:
    logs = simulate(6, cv=0.01)
    logs[:, 15:] += 0.09
    assert find_steps(logs) == [*range(20)]


@pytest.mark.parametrize("runs", [9, 31])
def test_candidate_is_compared_with_the_last_level(runs: int) -> None:
    logs = simulate(13, runs=runs)
    assert find_rises(logs) == []
    logs[4, -1] += math.log(1.3)
    assert find_rises(logs) == [4]
    assert find_rises(logs, StepRule(floor=0.5)) == []
    logs[:, -1] += math.log(1.3)
    assert find_rises(logs) == [*range(20)]


@pytest.mark.parametrize("num_runs", [1, 4])
def test_candidate_is_compared_with_the_last_run(num_runs: int) -> None:
    logs = simulate(13, runs=31)
    logs[4, -1 - num_runs :] += math.log(1.3)
    assert find_rises(logs) == []  # the branch is as slow already
    logs[4, -1] += math.log(1.5)
    assert find_rises(logs) == [4]
