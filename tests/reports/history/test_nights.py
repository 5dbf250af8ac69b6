"""A pool of two kinds of node, nights like the nights before, a drift and wild nights are no steps; steps are found."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from parbench.reports.history.levels import StepRule
from parbench.reports.history.nights import Night, Nights, judge_nights, kinds_of, noise_of, shared_course

RULE = StepRule()
Logs = NDArray[np.float64]


def noisy(seed: int, *, series: int = 20, nights: int = 30, scatter: float = 0.03, rho: float = 0.0) -> Logs:
    logs = np.random.default_rng(seed).normal(size=(series, nights))
    for i in range(1, nights):
        logs[:, i] = rho * logs[:, i - 1] + math.sqrt(1 - rho**2) * logs[:, i]
    return scatter * logs


def judged(logs: Logs, places: list[str] | None = None, rule: StepRule = RULE, *, alone: bool = False) -> Nights:
    count, nights = logs.shape
    return judge_nights(logs, places or ["a"] * nights, [*range(count)], [rule] * count, rule, alone=alone)


def steps(found: Nights) -> list[Night]:
    every = [*found.each, *([found.shared] if found.shared else [])]
    return [one for one in every if one.sure and one.shift and one.shift.slope is None]


def test_a_pool_of_two_kinds_is_two_levels_and_no_step_and_a_step_on_it_is_one() -> None:
    random = np.random.default_rng(1)
    for seed, nodes in ((1, 2), (2, 8), (3, 40)):
        ran = random.integers(nodes, size=30)
        logs, places = noisy(seed) + 0.2 * (ran % 2), [f"node-{i}" for i in ran]
        found = judged(logs, places)
        assert steps(found) == [], nodes
        assert {place: round(above, 1) for place, above in found.above.items()} == {
            place: 0.2 * (int(place[5:]) % 2) for place in found.above
        }
        assert set(found.above) == set(places)
        logs[:, -3:] += 0.1
        stepped = judged(logs, places).shared
        assert stepped is not None
        assert stepped.sure
        assert stepped.shift is not None
        assert stepped.shift.change == pytest.approx(0.105, abs=0.03)


def test_a_step_in_time_is_no_kind_of_node_and_one_with_its_nodes_may_be_theirs() -> None:
    logs = noisy(4)
    logs[:, 20:] += 0.2
    assert kinds_of(shared_course(logs), [f"node-{i % 4}" for i in range(30)], RULE) == {}
    found = judged(logs, ["a"] * 20 + ["b"] * 10).shared
    assert found is not None
    assert (found.sure, found.moved) == (False, True)
    new = judged(logs, [f"node-{i}" for i in range(30)]).shared
    assert new is not None
    assert new.sure, "ten of thirty nodes that are slower by chance would not all come last"


def test_the_correlation_of_nights_is_estimated_whatever_levels_do() -> None:
    for rho in (0.0, 0.3, 0.6):
        logs = noisy(5, series=100, rho=rho)
        logs[:50, 15:] += 0.3
        assert noise_of(logs)[0].rho == pytest.approx(rho, abs=0.1)
    assert noise_of(noisy(5, series=3, rho=0.6))[0].rho == 0.0, "three series do not tell"


def test_nights_like_the_nights_before_are_seldom_steps() -> None:
    found = [steps(judged(noisy(seed, rho=0.6, scatter=0.1))) for seed in range(20)]
    assert sum(map(bool, found)) <= 2
    alone = [steps(judged(noisy(seed, rho=0.6, scatter=0.1)[:4])) for seed in range(20)]
    assert sum(map(bool, alone)) >= 5, "few series do not tell that they are alike"


def test_a_drift_of_all_is_one_with_its_slope_and_a_step_is_none() -> None:
    found = judged(noisy(6) + math.log1p(0.003) * np.arange(30))
    assert steps(found) == []
    assert found.shared is not None
    assert found.shared.shift is not None
    assert found.shared.sure
    assert found.shared.shift.slope == pytest.approx(0.003, abs=0.0005)
    assert found.shared.shift.low < 0.09 < found.shared.shift.high
    stepped = noisy(6)
    stepped[:, 15:] += 0.09
    assert steps(judged(stepped)) != []


def test_wild_nights_that_many_series_have_are_no_level_of_one() -> None:
    random = np.random.default_rng(7)
    logs = noisy(7, series=40) + 0.26 * (random.random((40, 30)) < 0.1)
    logs[0] = noisy(8, series=1)
    logs[0, -3:] += 0.26
    assert not judged(logs).each[0].sure
    calm = noisy(7, series=40)
    calm[0] = logs[0]
    assert judged(calm).each[0].sure


def test_a_doubling_is_suspect_on_its_first_two_nights_and_slower_on_the_third() -> None:
    for scatter in (0.02, 0.05):
        logs = noisy(9, scatter=scatter)
        for nights, sure in ((1, False), (2, False), (3, True)):
            stepped = logs.copy()
            stepped[4, -nights:] += math.log(2)
            found = judged(stepped)
            assert (found.each[4].sure, found.each[4].first is None) == (sure, sure), nights
            assert not any(one.first or one.sure for i, one in enumerate(found.each) if i != 4)
    assert not any(one.first or one.sure for one in judged(logs).each)


def test_what_all_series_have_is_found_where_no_single_one_can_be_and_named_in_those_that_surely_have_it() -> None:
    logs = noisy(10, series=40, scatter=0.05)
    logs[:, -3:] += math.log(1.1)
    found = judged(logs)
    assert found.shared is not None
    assert found.shared.shift is not None
    assert (found.shared.sure, found.shared.shift.at) == (True, 27)
    assert found.shared.shift.low < 0.1 < found.shared.shift.high
    half = noisy(11, series=40)
    half[:20, -5:] += math.log(1.2)
    moved = [bool(one.sure and one.shift and one.shift.change > 0) for one in judged(half).each]
    assert moved == [True] * 20 + [False] * 20


def test_series_that_miss_nights_are_judged_by_theirs() -> None:
    logs = noisy(12)
    logs[::2, ::2] = np.nan
    logs[1::2, -4:] += 0.3
    logs[0, :] = np.nan
    found = judged(logs)
    assert all(one.sure for one in found.each[1::2])
    assert not any(one.sure for one in found.each[::2])
    assert judged(np.zeros((0, 30))).each == ()


def rises(logs: Logs, places: list[str] | None = None) -> list[int]:
    """Return the series in which the last night alone is slower, -1 for all together."""
    found = judged(logs, places, alone=True)
    together = [-1] if found.shared and found.shared.first else []
    return together + [i for i, one in enumerate(found.each) if one.first and not one.moved]


def test_one_run_is_slower_where_it_alone_is_and_not_where_those_before_have_become_so() -> None:
    for nights in (9, 11, 31):
        logs = noisy(13, nights=nights)
        assert rises(logs) == []
        one, every = logs.copy(), logs.copy()
        one[4, -1] += math.log(1.3)
        every[:, -1] += math.log(1.3)
        assert rises(one) == [4]
        assert rises(every) == [-1, *range(20)]
        assert rises(every, ["a"] * (nights - 1) + ["b"]) == [-1], "the only new host may be what is slower"
        for since in (1, 2, 4):
            stepped = logs.copy()
            stepped[4, -1 - since :] += math.log(1.3)
            assert rises(stepped) == [], since
            stepped[4, -1] += math.log(1.5)
            assert rises(stepped) == [4], since
    faster = logs.copy()
    faster[4, -6:-1] -= math.log(1.3)
    assert rises(faster) == [4], "it takes back what was won"
    wide = [f"node-{i}" for i in range(11)]
    assert rises(one[:, -11:], wide) == [4], "ten hosts tell what an eleventh may be"
    assert not any(night.first for night in judged(one, rule=StepRule(floor=0.5), alone=True).each)


def test_one_run_like_those_before_is_seldom_slower() -> None:
    found = [rises(noisy(seed, nights=9, scatter=0.1, rho=0.3)) for seed in range(40)]
    assert sum(map(bool, found)) <= 3
