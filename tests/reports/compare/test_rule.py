"""The rule of a comparison: each verdict at its boundary, and in simulated noise."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]

from parbench.reports.compare.rule import Effect, Judgement, Pair, Rule, effects, judge
from tests.studies import gate_study

RULE = Rule()
BASE = [1.000, 1.010, 0.990, 1.005, 0.995]
QUIET = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
NOISY = [1.0, 1.5, 2.0, 2.5, 3.0]


def scale(times: Sequence[float], factor: float) -> list[float]:
    return [factor * seconds for seconds in times]


def make_pair(base: Sequence[float], new: Sequence[float], measured: float = 0.0) -> Pair:
    return Pair(base=dict(enumerate(base)), new=dict(enumerate(new)), measured=measured)


def compute_effect(pair: Pair) -> Effect:
    _, [[effect]] = effects([[pair]], RULE)
    return effect


def judge_effect(effect: Effect, rule: Rule = RULE) -> Judgement:
    [[judgement]] = judge([[effect]], rule)
    return judgement


def verdict(base: Sequence[float], new: Sequence[float], measured: float = 0.0) -> str:
    effect = compute_effect(make_pair(base, new, measured))
    return judge_effect(effect).word


SLOWER = Effect(
    change=0.1,
    floor=0.03,
    low=0.05,
    high=0.15,
    detectable=0.05,
    p_value=0.001,
    rank_p_value=0.008,
)
UNCHANGED = replace(SLOWER, change=0.0, low=-0.01, high=0.01, p_value=1.0)


def test_effect_is_the_ratio_of_geometric_means() -> None:
    new = [1.1, 1.3, 1.2, 1.25, 1.15, 1.22]
    effect = compute_effect(make_pair(BASE, new))
    base_logs = np.log(BASE)
    new_logs = np.log(new)
    assert effect.change == pytest.approx(math.expm1(new_logs.mean() - base_logs.mean()))
    student = scipy.stats.ttest_ind(new_logs, base_logs).confidence_interval(0.95)
    assert effect.low is not None
    assert effect.high is not None
    assert effect.low < math.expm1(student.low)  # repetitions may correlate
    assert math.expm1(student.high) < effect.high


@pytest.mark.parametrize(("measured", "expected"), [(0.02, "SLOWER"), (0.08, "SAME")])
def test_floor_is_the_larger_of_rule_and_measured(measured: float, expected: str) -> None:
    assert verdict(QUIET, scale(QUIET, 1.05), measured) == expected


@pytest.mark.parametrize(
    ("base", "new", "expected"),
    [
        (BASE, scale(BASE, 1.10), "SLOWER"),
        (BASE, scale(BASE, 0.90), "FASTER"),
        (QUIET, scale(QUIET, 1.02), "SAME"),
        (BASE, scale(BASE, 1.03), "AMBIGUOUS"),
        (NOISY, NOISY, "AMBIGUOUS"),
    ],
)
def test_verdict_compares_the_interval_with_the_floor(
    base: list[float], new: list[float], expected: str
) -> None:
    assert verdict(base, new) == expected


def test_drift_within_both_runs_is_ambiguous() -> None:
    drift = [1.01**i for i in range(20)]
    assert verdict(drift[:10], drift[10:]) == "AMBIGUOUS"
    assert verdict(drift[:10], scale(drift[10:], 1.5)) == "SLOWER"


@pytest.mark.parametrize(("low", "expected"), [(-0.199, "SAME"), (-0.201, "AMBIGUOUS")])
def test_floor_is_symmetric_in_ratios(low: float, expected: str) -> None:
    effect = replace(UNCHANGED, change=-0.19, low=low, high=-0.18, floor=0.25)
    assert judge_effect(effect, replace(RULE, floor=0.25)).word == expected


def test_judge_controls_false_discoveries() -> None:
    suspect = replace(SLOWER, p_value=0.04)
    assert judge_effect(suspect).word == "SLOWER"
    [[judgement], *_] = judge([[suspect]] + [[UNCHANGED]] * 9, RULE)
    assert judgement.word == "AMBIGUOUS"


def test_slower_needs_separated_ranks() -> None:
    assert judge_effect(SLOWER).word == "SLOWER"
    assert judge_effect(replace(SLOWER, rank_p_value=0.06)).word == "AMBIGUOUS"


def simulate(
    changes: Sequence[float], sigma: float = 0.1, shared: float = 0.0
) -> gate_study.Logs:
    """Return logarithms of times: five repetitions of the base, then five of the new run."""
    random = np.random.default_rng(3)
    logs = sigma * random.normal(size=(10, len(changes)))
    logs += shared * random.normal(size=(10, 1))
    logs[5:] += np.log1p(changes)
    return logs


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        (simulate([0.15] * 40, sigma=0.15), "SLOWER"),
        (simulate([-0.15] * 40), "FASTER"),
        (simulate([0.0] * 40, sigma=0.01), "SAME"),
        (simulate([0.0] * 40, shared=0.1), "AMBIGUOUS"),
    ],
)
def test_run_verdict_finds_a_shared_change(logs: gate_study.Logs, expected: str) -> None:
    verdicts = gate_study.compare_logs(logs, [1] * 40)
    assert verdicts.run == expected
    assert "SLOWER" not in verdicts.series


def test_detectable_change_grows_with_the_family() -> None:
    logs = simulate([0.0] * 8)
    eight_series = gate_study.compare_logs(logs, [8]).effects[0].detectable
    one_series = gate_study.compare_logs(logs, [1, 7]).effects[0].detectable
    assert one_series is not None
    assert eight_series is not None
    assert one_series < eight_series


def test_run_verdict_ignores_a_few_large_changes() -> None:
    logs = simulate([4.0] * 15 + [0.0] * 25, sigma=0.01)
    verdicts = gate_study.compare_logs(logs, [1] * 40)
    assert verdicts.run == "AMBIGUOUS"
    assert verdicts.series.count("SLOWER") == 15


@pytest.mark.full
def test_power_and_false_alarms_in_noise() -> None:
    noise = gate_study.NOISES["10 %, half shared"]
    rates = gate_study.compute_rates(noise, 30, seed=7)
    assert rates.doubled >= 0.85
    assert rates.all_slower >= 0.85
    assert rates.alarms <= 0.05
    assert rates.correlated_alarms <= 0.10
    power = gate_study.compute_power(noise, rates.detectable, 30, seed=8)
    assert power == pytest.approx(0.8, abs=0.25)
