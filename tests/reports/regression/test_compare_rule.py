"""The gate's rule: each word at its boundary, and a small part of tests/studies/gate_study.py."""

import math
from dataclasses import replace

import gate_study
import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]

from reports.regression.rule import Effect, Judgement, Rule, effect, judge
from reports.regression.statistics import drift_between

RULE = Rule()
BASE = [1.000, 1.010, 0.990, 1.005, 0.995]
QUIET = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
ACROSS = "the interval reaches across the floor"
TRIALS = 60


def scaled(factor: float, wobble: float = 1.0, base: list[float] = BASE) -> list[float]:
    return [factor * value**wobble for value in reversed(base)]


def judged(found: Effect, rule: Rule = RULE) -> Judgement:
    [[judgement]] = judge([[found]], rule)
    return judgement


def word(new: list[float], base: list[float] = BASE, measured: float = 0.0) -> str:
    return judged(effect(base, new, RULE, measured)).word


def known(**more: float) -> Effect:
    usual = {"change": 0.1, "floor": 0.03, "low": 0.05, "high": 0.15, "detectable": 0.05}
    return Effect(**{**usual, "p_value": 0.001, "rank_p_value": 0.008, **more})


STILL = known(change=0.0, low=-0.01, high=0.01, p_value=1.0)


def test_the_effect_is_the_ratio_of_geometric_means_with_welchs_interval_in_any_unit() -> None:
    new = [1.1, 1.3, 1.2, 1.25, 1.15, 1.22]
    found = effect(BASE, new, RULE)
    logs = [[math.log(value) for value in side] for side in (BASE, new)]
    expected = scipy.stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    assert found.change == pytest.approx(math.exp(sum(logs[1]) / 6 - sum(logs[0]) / 5) - 1)
    assert (found.low, found.high) == pytest.approx((math.expm1(expected.low), math.expm1(expected.high)))
    assert found.detectable is not None
    assert found.detectable > found.floor
    other = effect([value * 1e-6 for value in BASE], [value * 1e-6 for value in new], RULE)
    assert (other.change, other.low) == pytest.approx((found.change, found.low))


def test_one_launch_has_a_change_and_nothing_more() -> None:
    found = effect([2.0], [3.0], RULE)
    assert found == Effect(change=found.change, floor=0.03)
    assert found.change == pytest.approx(0.5)
    assert effect([2.0], BASE, RULE).low is None
    apart = effect([1e-150, 1e150], [1e-200, 1e200], RULE)
    assert None not in (apart.high, apart.detectable), "two that disagree beyond a float are no error"
    assert math.isfinite(apart.high or math.inf)
    assert math.isfinite(apart.detectable or math.inf)


def test_the_floor_is_the_rules_or_what_was_measured_where_nothing_drifts() -> None:
    assert effect(BASE, scaled(1.05), RULE).floor == pytest.approx(0.03)
    assert effect(BASE, scaled(1.05), replace(RULE, floor=0.1)).floor == pytest.approx(0.1)
    new = [value * 1.05 for value in QUIET]
    assert effect(QUIET, new, RULE, 0.02).floor == pytest.approx(0.03)
    raised = effect(QUIET, new, RULE, 0.08)
    assert (raised.floor, raised.measured) == pytest.approx((0.08, 0.08))
    assert effect([1.0], [1.05], RULE, 0.08).floor == pytest.approx(0.08)
    assert [word(new, QUIET, least) for least in (0.02, 0.08)] == ["SLOWER", "SAME"]


def test_a_drift_inside_both_runs_raises_the_floor_to_what_it_explains() -> None:
    line = [1.01**i for i in range(20)]
    found = effect(line[:10], line[10:], RULE)
    assert found.floor == pytest.approx(1.01**10 - 1)
    assert found.change == pytest.approx(found.floor)
    said = judged(found)
    assert (said.word, "own drift" in said.reason) == ("AMBIGUOUS", True)
    assert word([value * 1.2 for value in line[10:]], line[:10]) == "SLOWER"
    noisy = [1.0, 1.3, 0.8, 1.2, 1.0]
    drift = drift_between([math.log(value) for value in noisy], [math.log(value) for value in noisy])
    assert abs(drift.value) < drift.error
    assert effect(noisy, noisy, RULE).floor == pytest.approx(math.expm1(abs(drift.value) + 1.5 * drift.error))


def test_a_clear_change_is_slower_or_faster_and_what_lies_within_the_floor_is_the_same() -> None:
    assert [word(scaled(factor)) for factor in (1.10, 0.90, 1.0, 1.01)] == ["SLOWER", "FASTER", "SAME", "SAME"]
    assert word(BASE, scaled(1.10)) == "FASTER"
    sure = effect(QUIET, [value * 1.02 for value in QUIET], RULE)
    assert sure.low is not None
    assert sure.low > 0
    assert judged(sure).word == "SAME", "a sure change below the floor is no alarm"


def test_noise_is_no_proof_of_sameness_nor_of_change() -> None:
    drifting = [1.0, 1.5, 2.0, 2.5, 3.0]
    found = effect(drifting, drifting, RULE)
    assert found.high is not None
    assert found.high < found.floor
    assert judged(found).word == "AMBIGUOUS"
    assert judged(effect(BASE, scaled(1.03), RULE)) == Judgement(word="AMBIGUOUS", reason=ACROSS)
    assert word(scaled(1.05, wobble=20)) == "AMBIGUOUS"
    beyond = effect(BASE, scaled(1.06), RULE, 0.06)
    assert beyond.low is not None
    assert beyond.low > RULE.floor
    assert judged(beyond) == Judgement(word="AMBIGUOUS", reason=ACROSS), "it is within the measured floor, no drift"


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


# --- the study, small and seeded ---


def share(name: str, step: float) -> float:
    return gate_study.rates(gate_study.NOISES[name], step, [gate_study.parbench], TRIALS, seed=7)[0]


def test_it_finds_five_percent_and_imagines_nothing() -> None:
    assert share("1 % a launch", gate_study.STEP) >= 0.95
    for name in ("1 % a launch", "10 % a launch", "spikes in 10 % of launches", "drift of 1 %"):
        assert share(name, 0.0) <= 0.01, name
    for name in ("autocorrelation 0.6", "autocorrelation 0.6, 10 %", "drift of 10 %"):
        assert share(name, 0.0) <= 0.02, name


def test_the_usual_rules_are_deceived() -> None:
    noise, gates = gate_study.NOISES["3 % a launch"], list(gate_study.GATES.values())
    parbench, five, _, pooled = gate_study.rates(noise, 0.0, gates, 60, seed=7)
    assert parbench <= 0.02
    assert five > 0.2
    assert pooled > 0.3


def test_the_study_simulates_the_noise_it_claims() -> None:
    noise = gate_study.Noise(launch=0.03, launches=400, iterations=10, sizes=2)
    base, new = gate_study.simulate(noise, gate_study.STEP, np.random.default_rng(0))
    medians = [np.log(np.median(side, axis=2)) for side in (base, new)]
    assert base.shape == (400, 2, 10)
    assert float(np.std(medians[0])) == pytest.approx(0.032, abs=0.004)
    assert float(medians[1].mean() - medians[0].mean()) == pytest.approx(gate_study.STEP, abs=0.01)
    assert np.corrcoef(medians[0].T)[0, 1] == pytest.approx(0.45, abs=0.12)
