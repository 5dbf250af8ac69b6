"""The rule of a comparison: each verdict at its boundary, and a small part of gate_study.py."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]

from parbench.reports.regression.rule import (
    Effect,
    Judgement,
    Pair,
    Rule,
    effects,
    floor_to_decide,
    judge,
    launches_to_decide,
)
from tests.studies import gate_study

RULE = Rule()
BASE = [1.000, 1.010, 0.990, 1.005, 0.995]
QUIET = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
TRIALS = 30


def scaled(factor: float, noise: float = 1.0) -> list[float]:
    return [factor * time**noise for time in reversed(BASE)]


def judged(effect: Effect, rule: Rule = RULE) -> Judgement:
    [[judgement]] = judge([[effect]], rule)
    return judgement


def effect_of(
    base: Sequence[float], new: Sequence[float], rule: Rule = RULE, measured: float = 0.0
) -> Effect:
    pair = Pair(base=dict(enumerate(base)), new=dict(enumerate(new)), measured=measured)
    run, [[effect]] = effects([[pair]], rule)
    assert run is None, "one series is no run"
    return effect


def verdict(base: Sequence[float], new: Sequence[float], measured: float = 0.0) -> str:
    return judged(effect_of(base, new, measured=measured)).word


def known(**fields: float) -> Effect:
    usual = {"change": 0.1, "floor": 0.03, "low": 0.05, "high": 0.15, "detectable": 0.05}
    return Effect(**{**usual, "p_value": 0.001, "rank_p_value": 0.008, **fields})


SAME = known(change=0.0, low=-0.01, high=0.01, p_value=1.0)


def test_effect_is_the_ratio_of_geometric_means() -> None:
    new = [1.1, 1.3, 1.2, 1.25, 1.15, 1.22]
    effect = effect_of(BASE, new)
    base_logs, new_logs = np.log(BASE), np.log(new)
    assert effect.change == pytest.approx(math.expm1(new_logs.mean() - base_logs.mean()))
    student = scipy.stats.ttest_ind(new_logs, base_logs).confidence_interval(0.95)
    assert effect.low is not None
    assert effect.high is not None
    assert effect.low < math.expm1(student.low), "repetitions may correlate"
    assert math.expm1(student.high) < effect.high
    assert effect.detectable is not None
    assert effect.detectable > effect.high - effect.change
    micro = effect_of([time * 1e-6 for time in BASE], [time * 1e-6 for time in new])
    assert (micro.change, micro.low) == pytest.approx((effect.change, effect.low))


def test_effect_of_two_repetitions_has_no_interval() -> None:
    effect = effect_of([2.0], [3.0])
    assert effect == Effect(change=effect.change, floor=0.03)
    assert effect.change == pytest.approx(0.5)
    assert effect_of([2.0, 2.1], BASE).low is None


def test_effect_stays_finite_for_extreme_times() -> None:
    effect = effect_of([1e-150, 1e150, 1.0], [1e-200, 1e200, 1.0])
    assert math.isfinite(effect.high or math.inf)
    assert math.isfinite(effect.detectable or math.inf)


def test_floor_is_the_larger_of_rule_and_measured() -> None:
    new = [time * 1.05 for time in QUIET]
    assert effect_of(QUIET, new, replace(RULE, floor=0.1)).floor == pytest.approx(0.1)
    for measured, floor, word in ((0.02, 0.03, "SLOWER"), (0.08, 0.08, "SAME")):
        assert effect_of(QUIET, new, measured=measured).floor == pytest.approx(floor)
        assert verdict(QUIET, new, measured) == word


def test_drift_within_both_runs_is_ambiguous() -> None:
    drift = [1.01**i for i in range(20)]
    assert verdict(drift[:10], drift[10:]) == "AMBIGUOUS"
    assert verdict(drift[:10], [time * 1.5 for time in drift[10:]]) == "SLOWER"


@pytest.mark.parametrize(
    ("base", "new", "word"),
    [
        (BASE, scaled(1.10), "SLOWER"),
        (BASE, scaled(0.90), "FASTER"),
        (BASE, scaled(1.01), "SAME"),
        (QUIET, [time * 1.02 for time in QUIET], "SAME"),
        (BASE, scaled(1.03), "AMBIGUOUS"),
        (BASE, scaled(1.05, noise=20), "AMBIGUOUS"),
        ([1.0, 1.5, 2.0, 2.5, 3.0], [1.0, 1.5, 2.0, 2.5, 3.0], "AMBIGUOUS"),
    ],
)
def test_verdict_compares_the_interval_with_the_floor(
    base: list[float], new: list[float], word: str
) -> None:
    assert verdict(base, new) == word


def test_floor_is_symmetric_in_ratios() -> None:
    quarter = replace(RULE, floor=0.25)
    effect = known(change=-0.19, low=-0.199, high=-0.18, p_value=1.0, floor=0.25)
    assert judged(effect, quarter).word == "SAME"
    assert judged(replace(effect, low=-0.201), quarter).word == "AMBIGUOUS"


def test_judge_controls_false_discoveries() -> None:
    suspect = known(p_value=0.04)
    assert judged(suspect).word == "SLOWER"
    [[first], *others] = judge([[suspect], *([SAME] for _ in range(9))], RULE)
    assert first.word == "AMBIGUOUS"
    assert {judgement.word for family in others for judgement in family} == {"SAME"}
    [family] = judge([[SAME, known(), known(), SAME]], RULE)
    assert [judgement.word for judgement in family] == ["SAME", "SLOWER", "SLOWER", "SAME"]


def test_slower_needs_interval_and_ranks() -> None:
    assert judged(known(rank_p_value=0.06)).word == "AMBIGUOUS"
    for step in range(0, 40, 4):
        effect = effect_of(BASE, scaled(1 + step / 400))
        assert effect.low is not None
        assert effect.rank_p_value is not None
        clear = effect.low > effect.floor and effect.rank_p_value <= 0.05
        assert (judged(effect).word == "SLOWER") == clear, step


def simulated(changes: Sequence[float], noise: float = 0.1, shared: float = 0.0) -> gate_study.Logs:
    random = np.random.default_rng(3)
    logs = noise * random.normal(size=(10, len(changes))) + shared * random.normal(size=(10, 1))
    logs[5:] += np.log1p(changes)
    return logs


@pytest.mark.parametrize(
    ("logs", "word"),
    [
        (simulated([0.15] * 40, noise=0.15), "SLOWER"),
        (simulated([-0.15] * 40), "FASTER"),
        (simulated([0.0] * 40, noise=0.01), "SAME"),
        (simulated([0.0] * 40, shared=0.1), "AMBIGUOUS"),
    ],
)
def test_run_verdict_finds_a_shared_change(logs: gate_study.Logs, word: str) -> None:
    run, words, _ = gate_study.called(logs, [1] * 40)
    assert run == word
    assert "SLOWER" not in words, "no single series is clear"


def test_run_verdict_ignores_a_few_large_changes() -> None:
    logs = simulated([*[4.0] * 15, *[0.0] * 25], noise=0.01)
    run, words, _ = gate_study.called(logs, [1] * 40)
    assert (run, words.count("SLOWER")) == ("AMBIGUOUS", 15)


def test_series_with_missing_repetitions_are_judged() -> None:
    times = np.exp(simulated([0.5] * 12, noise=0.02)).T.tolist()
    pairs = [Pair(base=dict(enumerate(t[:5])), new=dict(enumerate(t[5:]))) for t in times]
    pairs[3] = replace(pairs[3], new={i: pairs[3].new[i] for i in (1, 2, 4)})
    pairs[4] = replace(pairs[4], new={2: pairs[4].new[2]})
    run, [family] = effects([pairs], RULE)
    assert run is not None
    assert (run.word, run.series) == ("SLOWER", 11)
    assert family[4].low is None
    assert [effect.change for effect in family] == pytest.approx([0.5] * 12, abs=0.1)
    widths = [(effect.high or 0) - effect.low for effect in family if effect.low]
    assert widths[3] > sum(widths) / len(widths)


def test_launches_to_decide_grow_with_noise() -> None:
    assert [launches_to_decide(noise, 0.03) for noise in (0.005, 0.01, 0.02)] == [1, 3, 12]
    assert floor_to_decide(1e12, 12) > 1e12
    for noise in (0.02, 0.1):
        floor = floor_to_decide(noise, 12)
        assert launches_to_decide(noise, floor) <= 12 < launches_to_decide(noise, floor - 0.011)


@pytest.mark.parametrize(
    ("name", "doubled", "everything"),
    [
        ("10 %, half shared", 0.85, 0.85),
        pytest.param("20 %, half shared", 0.4, 0.45, marks=pytest.mark.full),
    ],
)
def test_power_and_false_alarms_in_noise(name: str, doubled: float, everything: float) -> None:
    noise = gate_study.NOISES[name]
    rates = gate_study.rates(noise, TRIALS, seed=7)
    assert rates["doubled"] >= doubled
    assert rates["all"] >= everything
    assert rates["alarms"] <= 0.05
    assert rates["correlated"] <= 0.10
    power = gate_study.power(noise, rates["detectable"], TRIALS, 8)
    assert power == pytest.approx(0.8, abs=0.25)


@pytest.mark.parametrize("name", ["1 %, drift of 10 %, 10 v 10", "3 %, spikes in 10 %"])
def test_drift_and_spikes_seldom_alarm(name: str) -> None:
    noise, random = gate_study.NOISES[name], np.random.default_rng(5)
    logs = (gate_study.simulate(noise, random) for _ in range(TRIALS))
    assert sum(gate_study.alarm(log, noise.families) for log in logs) <= 0.1 * TRIALS
