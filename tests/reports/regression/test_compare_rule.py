"""The gate's rule: each word at its boundary, and a small part of tests/studies/gate_study.py."""

import math
from collections.abc import Sequence
from dataclasses import replace

import gate_study
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

RULE = Rule()
BASE = [1.000, 1.010, 0.990, 1.005, 0.995]
QUIET = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
ACROSS = "the interval reaches across the floor"
TRIALS = 30


def scaled(factor: float, wobble: float = 1.0, base: list[float] = BASE) -> list[float]:
    return [factor * value**wobble for value in reversed(base)]


def judged(found: Effect, rule: Rule = RULE) -> Judgement:
    [[judgement]] = judge([[found]], rule)
    return judgement


def effect(base: Sequence[float], new: Sequence[float], rule: Rule = RULE, measured: float = 0.0) -> Effect:
    pair = Pair(base=dict(enumerate(base)), new=dict(enumerate(new)), measured=measured)
    whole, [[found]] = effects([[pair]], rule)
    assert whole is None, "one series is no whole"
    return found


def word(new: list[float], base: list[float] = BASE, measured: float = 0.0) -> str:
    return judged(effect(base, new, RULE, measured)).word


def known(**more: float) -> Effect:
    usual = {"change": 0.1, "floor": 0.03, "low": 0.05, "high": 0.15, "detectable": 0.05}
    return Effect(**{**usual, "p_value": 0.001, "rank_p_value": 0.008, **more})


STILL = known(change=0.0, low=-0.01, high=0.01, p_value=1.0)


def test_the_effect_is_the_ratio_of_geometric_means_in_any_unit() -> None:
    new = [1.1, 1.3, 1.2, 1.25, 1.15, 1.22]
    found = effect(BASE, new)
    logs = [[math.log(value) for value in side] for side in (BASE, new)]
    assert found.change == pytest.approx(math.exp(sum(logs[1]) / 6 - sum(logs[0]) / 5) - 1)
    assert found.low is not None
    assert found.high is not None
    student = scipy.stats.ttest_ind(logs[1], logs[0]).confidence_interval(0.95)
    assert found.low < math.expm1(student.low) < math.expm1(student.high) < found.high, "launches may correlate"
    assert found.detectable is not None
    assert found.detectable > found.high - found.change
    other = effect([value * 1e-6 for value in BASE], [value * 1e-6 for value in new])
    assert (other.change, other.low) == pytest.approx((found.change, found.low))


def test_fewer_than_three_launches_have_a_change_and_nothing_more() -> None:
    found = effect([2.0], [3.0], RULE)
    assert found == Effect(change=found.change, floor=0.03)
    assert found.change == pytest.approx(0.5)
    assert effect([2.0], BASE, RULE).low is None
    assert effect([2.0, 2.1], BASE, RULE).low is None, "nor have two"
    apart = effect([1e-150, 1e150, 1.0], [1e-200, 1e200, 1.0], RULE)
    assert None not in (apart.high, apart.detectable), "two that disagree beyond a float are no error"
    assert math.isfinite(apart.high or math.inf)
    assert math.isfinite(apart.detectable or math.inf)


def test_the_floor_is_the_rules_or_what_was_measured_where_nothing_drifts() -> None:
    assert effect(BASE, scaled(1.05), RULE).floor == pytest.approx(0.03)
    assert effect(BASE, scaled(1.05), replace(RULE, floor=0.1)).floor == pytest.approx(0.1)
    new = [value * 1.05 for value in QUIET]
    assert effect(QUIET, new, RULE, 0.02).floor == pytest.approx(0.03)
    raised = effect(QUIET, new, RULE, 0.08)
    assert raised.floor == pytest.approx(0.08)
    assert effect([1.0], [1.05], RULE, 0.08).floor == pytest.approx(0.08)
    assert [word(new, QUIET, least) for least in (0.02, 0.08)] == ["SLOWER", "SAME"]


def test_a_drift_inside_both_runs_is_no_change_between_them() -> None:
    line = [1.01**i for i in range(20)]
    assert effect(line[:10], line[10:]).change == pytest.approx(1.01**10 - 1)
    assert word(line[10:], line[:10]) == "AMBIGUOUS"
    assert word([value * 1.5 for value in line[10:]], line[:10]) == "SLOWER"


def test_a_clear_change_is_slower_or_faster_and_what_lies_within_the_floor_is_the_same() -> None:
    assert [word(scaled(factor)) for factor in (1.10, 0.90, 1.0, 1.01)] == ["SLOWER", "FASTER", "SAME", "SAME"]
    assert word(BASE, scaled(1.10)) == "FASTER"
    sure = effect(QUIET, [value * 1.02 for value in QUIET], RULE)
    assert sure.low is not None
    assert sure.low > 0
    assert judged(sure).word == "SAME", "a sure change below the floor is no alarm"


def test_noise_is_no_proof_of_sameness_nor_of_change() -> None:
    drifting = [1.0, 1.5, 2.0, 2.5, 3.0]
    assert judged(effect(drifting, drifting)).word == "AMBIGUOUS"
    assert judged(effect(BASE, scaled(1.03), RULE)) == Judgement(word="AMBIGUOUS", reason=ACROSS)
    assert word(scaled(1.05, wobble=20)) == "AMBIGUOUS"
    assert judged(effect(BASE, scaled(1.06), RULE, 0.06)) == Judgement(word="AMBIGUOUS", reason=ACROSS)


def test_the_floor_is_as_far_below_as_above_in_ratios() -> None:
    quarter = replace(RULE, floor=0.25)
    nearly = known(change=-0.19, low=-0.199, high=-0.18, p_value=1.0, floor=0.25)
    assert judged(nearly, quarter).word == "SAME"
    assert judged(replace(nearly, low=-0.201), quarter).word == "AMBIGUOUS"


def test_what_is_clear_alone_may_be_chance_among_many() -> None:
    suspect = known(p_value=0.04)
    assert judged(suspect).word == "SLOWER"
    [[first], *others] = judge([[suspect], *([STILL] for _ in range(9))], RULE)
    assert (first.word, "not among all" in first.reason) == ("AMBIGUOUS", True)
    assert {one.word for family in others for one in family} == {"SAME"}
    [found] = judge([[STILL, known(), known(), STILL]], RULE)
    assert [one.word for one in found] == ["SAME", "SLOWER", "SLOWER", "SAME"], "the sizes that moved"
    assert judge([], RULE) == ()


def test_slower_means_that_the_interval_clears_the_floor_and_that_the_ranks_agree() -> None:
    said = judged(known(rank_p_value=0.06))
    assert (said.word, "ranks" in said.reason) == ("AMBIGUOUS", True)
    for step in range(40):
        found = effect(BASE, scaled(1 + step / 400), RULE)
        assert found.low is not None
        clears = found.low > found.floor and found.rank_p_value is not None and found.rank_p_value <= 0.05
        assert (judged(found).word == "SLOWER") == clears, step


# --- the whole run ---


def run_of(changes: Sequence[float], noise: float = 0.1, shared: float = 0.0, seed: int = 3) -> gate_study.Logs:
    random = np.random.default_rng(seed)
    logs = noise * random.normal(size=(10, len(changes))) + shared * random.normal(size=(10, 1))
    logs[5:] += np.log1p(changes)
    return logs


def test_what_all_share_is_found_where_no_single_one_can_be() -> None:
    whole, words, _ = gate_study.called(run_of([0.15] * 40, noise=0.15), [1] * 40)
    assert (whole, {*words}) == ("SLOWER", {"AMBIGUOUS"})
    assert gate_study.called(run_of([-0.15] * 40), [1] * 40)[0] == "FASTER"
    assert gate_study.called(run_of([0.0] * 40, noise=0.01), [1] * 40)[0] == "SAME"
    assert gate_study.called(run_of([0.0] * 40, shared=0.1), [1] * 40)[0] == "AMBIGUOUS"


def test_a_few_that_moved_far_are_no_shift_of_the_whole() -> None:
    logs = run_of([*[4.0] * 15, *[0.0] * 25], noise=0.01)
    whole, words, _ = gate_study.called(logs, [1] * 40)
    assert (whole, words.count("SLOWER")) == ("AMBIGUOUS", 15)


def test_series_of_which_launches_are_missing_are_judged_by_those_they_have() -> None:
    times = np.exp(run_of([0.5] * 12, noise=0.02)).T.tolist()
    pairs = [Pair(base=dict(enumerate(one[:5])), new=dict(enumerate(one[5:]))) for one in times]
    pairs[3] = Pair(base=pairs[3].base, new={launch: pairs[3].new[launch] for launch in (1, 2, 4)})
    pairs[4] = Pair(base=pairs[4].base, new={2: pairs[4].new[2]})
    whole, [found] = effects([pairs], RULE)
    assert whole is not None
    assert (whole.word, whole.series) == ("SLOWER", 11)
    assert found[4].low is None
    assert all(one.change == pytest.approx(0.5, abs=0.1) for one in found)
    spans = [(one.high or 0) - (one.low or 0) for one in found if one.low]
    assert spans[3] > sum(spans) / len(spans)


def test_the_noisier_the_more_launches_it_takes_to_decide() -> None:
    assert [launches_to_decide(noise, 0.03) for noise in (0.005, 0.01, 0.02)] == [1, 3, 12]
    assert launches_to_decide(0.1, 0.15) == launches_to_decide(0.1, 0.15001)
    assert floor_to_decide(1e12, 12) > 1e12
    for noise in (0.02, 0.1):
        floor = floor_to_decide(noise, 12)
        assert launches_to_decide(noise, floor) <= 12 < launches_to_decide(noise, floor - 0.011)


# --- the study, small and seeded ---


def test_at_ten_and_twenty_percent_it_finds_what_it_must_and_imagines_little() -> None:
    for name, doubled, everything in (("10 %, half shared", 0.85, 0.85), ("20 %, half shared", 0.4, 0.45)):
        found = gate_study.rates(gate_study.NOISES[name], TRIALS, seed=7)
        assert found["doubled"] >= doubled, name
        assert found["all"] >= everything, name
        assert found["alarms"] <= 0.05, name
        assert found["correlated"] <= 0.10, name
        assert gate_study.power(gate_study.NOISES[name], found["detectable"], TRIALS, 8) == pytest.approx(0.8, abs=0.25)


def test_a_drift_of_the_machine_is_no_alarm_and_spikes_are_none() -> None:
    for name in ("1 %, drift of 5 %", "1 %, drift of 10 %", "1 %, drift of 10 %, 10 v 10", "3 %, spikes in 10 %"):
        noise, random = gate_study.NOISES[name], np.random.default_rng(5)
        alarms = sum(gate_study.alarm(gate_study.simulate(noise, random), noise.families) for _ in range(TRIALS))
        assert alarms <= 0.1 * TRIALS, name
