"""Levels, drifts and rises in the times of series. Noise and outliers are none of them."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from parbench.reports.history.changes import (
    ChangeTester,
    Level,
    LevelChange,
    estimate_correlation,
    judge_histories,
)

MIN_EFFECT = 0.03
Logs = NDArray[np.float64]
STEADY = [1.0, 1.01, 0.99]


def find_levels(logs: Logs) -> list[Level]:
    return ChangeTester([logs]).find_levels(logs)


def judge(times: list[float], min_effect: float = MIN_EFFECT) -> LevelChange | None:
    [change] = judge_histories([np.log(times)], [min_effect])
    return change


def test_equal_times_are_one_level() -> None:
    [level] = find_levels(np.zeros(20))
    assert (level.start, level.stop) == (0, 20)
    assert level.log == 0.0


def test_levels_change_where_the_time_does() -> None:
    times = np.repeat([0.0, 0.1, 0.05], [10, 12, 8])
    logs = times + 0.005 * np.random.default_rng(3).normal(size=30)
    assert [level.start for level in find_levels(logs)] == [0, 10, 22]


@pytest.mark.parametrize("factor", [1.1, 0.8])
def test_step_is_found_where_it_is(factor: float) -> None:
    times = STEADY * 5 + [factor * seconds for seconds in STEADY]
    assert [level.stop for level in find_levels(np.log(times))] == [15, 18]
    change = judge(times)
    assert change is not None
    assert change.kind == "step"
    assert change.start == 15
    assert change.change == pytest.approx(factor - 1, abs=0.01)
    assert change.low < factor - 1 < change.high
    assert change.p_value < 1e-3


def test_step_is_compared_with_the_fastest_level() -> None:
    slow = [1.2, 1.21, 1.19]
    assert judge(STEADY * 3 + slow * 3 + STEADY * 3) is None
    fast = [0.8, 0.81, 0.79]
    lost = judge(STEADY * 3 + fast * 3 + STEADY * 3)
    assert lost is not None
    assert lost.start == 18
    assert lost.change == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("times", "kind"),
    [
        (STEADY * 8 + [1.5] * 2, "rise"),
        (STEADY * 8 + [1.5] * 3, "step"),
        ([1.0] * 4 + [2.0] * 3 + [1.0], None),
        ([1.0] * 5 + [2.0] * 3, "step"),
        (STEADY * 8 + [1.3, 1.0, 1.4], "rise"),
    ],
)
def test_step_needs_three_runs_of_eight(times: list[float], kind: str | None) -> None:
    change = judge(times)
    assert (change and change.kind) == kind


@pytest.mark.parametrize(
    ("factor", "threshold", "is_step"),
    [(1.025, 0.03, False), (1.04, 0.03, True), (1.04, 0.05, False)],
)
def test_step_exceeds_the_threshold(factor: float, threshold: float, is_step: bool) -> None:
    times = [1.0, 1.0001] * 10 + [factor, factor * 1.0001] * 3
    change = judge(times, threshold)
    assert (change is not None) == is_step


def simulate(
    seed: int, series: int = 20, runs: int = 30, cv: float = 0.03, rho: float = 0.0
) -> Logs:
    """Return logarithms of times with this variation and autocorrelation from run to run."""
    logs = np.random.default_rng(seed).normal(size=(series, runs))
    for i in range(1, runs):
        logs[:, i] = rho * logs[:, i - 1] + math.sqrt(1 - rho**2) * logs[:, i]
    return cv * logs


def list_significant(changes: list[LevelChange | None], kind: str) -> list[int]:
    return [i for i, change in enumerate(changes) if change and change.kind == kind]


def find_steps(logs: Logs) -> list[int]:
    changes = judge_histories(list(logs), [MIN_EFFECT] * len(logs))
    return list_significant(changes, "step")


def find_rises(logs: Logs, min_effect: float = MIN_EFFECT) -> list[int]:
    """Return the series whose newest time, that of a candidate, is above the others."""
    changes = judge_histories(list(logs), [min_effect] * len(logs), newest_is_candidate=True)
    return list_significant(changes, "rise")


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_noise_is_estimated_across_steps(rho: float) -> None:
    logs = simulate(5, series=100, rho=rho)
    logs[:50, 15:] += 0.3
    assert estimate_correlation(list(logs)) == pytest.approx(rho, abs=0.12)


def test_strongly_correlated_short_series_are_judged() -> None:
    logs = simulate(3, series=8, runs=8, rho=0.999)
    assert len(judge_histories(list(logs), [MIN_EFFECT] * 8)) == 8


@pytest.mark.parametrize("num_runs", [9, 30])
def test_outliers_are_not_changes(num_runs: int) -> None:
    logs = simulate(11, series=40, runs=num_runs)
    is_outlier = np.random.default_rng(1).random(logs.shape) < 0.1
    changes = judge_histories(list(logs + 0.26 * is_outlier), [MIN_EFFECT] * 40)
    assert changes == [None] * 40


def test_correlated_noise_seldom_has_steps() -> None:
    steps = [find_steps(simulate(seed, rho=0.6, cv=0.1)) for seed in range(6)]
    assert sum(map(bool, steps)) <= 1


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_drift_has_its_size(seed: int) -> None:
    [logs] = simulate(seed, series=1, cv=0.01)
    logs += math.log1p(0.003) * np.arange(30)
    change = judge(np.exp(logs).tolist())
    assert change is not None
    assert change.kind == "drift"
    assert change.low < 1.003**29 - 1 < change.high


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
    assert find_rises(logs, min_effect=0.5) == []
    logs[:, -1] += math.log(1.5)
    assert find_rises(logs) == [*range(20)]


def test_candidate_is_compared_with_the_last_run() -> None:
    logs = simulate(13, runs=31)
    logs[4, -2:] += math.log(1.3)
    assert find_rises(logs) == []  # the branch is as slow already
    logs[4, -1] += math.log(1.5)
    assert find_rises(logs) == [4]
