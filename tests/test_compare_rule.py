"""The gate's rule: each word at its boundary, and a small part of tests/gate_study.py."""

import math
from dataclasses import replace

import gate_study
import pytest
import scipy.stats  # type: ignore[import-untyped]

from reports.comparing.compare_rule import Effect, Rule, effect, judge
from reports.comparing.compare_stats import drift_between

RULE = Rule()
BASE = [1.000, 1.010, 0.990, 1.005, 0.995]


def scaled(factor: float, wobble: float = 1.0) -> list[float]:
    """Return the base's times, longer by a factor, their scatter about one multiplied by ``wobble``."""
    return [factor * value**wobble for value in reversed(BASE)]


def word(new: list[float], base: list[float] = BASE) -> str:
    return judge([[effect(base, new, RULE)]], RULE)[0][0].word


def known(**more: float) -> Effect:
    usual = {"change": 0.1, "floor": 0.03, "low": 0.05, "high": 0.15, "detectable": 0.05}
    return Effect(**{**usual, "p_value": 0.001, "rank_p_value": 0.008, **more})


# --- the effect ---


def test_the_effect_is_the_ratio_of_geometric_means_with_welchs_interval() -> None:
    new = [1.1, 1.3, 1.2, 1.25, 1.15, 1.22]
    found = effect(BASE, new, RULE)
    logs = [[math.log(value) for value in side] for side in (BASE, new)]
    expected = scipy.stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    assert found.change == pytest.approx(math.exp(sum(logs[1]) / 6 - sum(logs[0]) / 5) - 1)
    assert (found.low, found.high) == pytest.approx((math.expm1(expected.low), math.expm1(expected.high)))
    assert found.detectable is not None
    assert found.detectable > found.floor


def test_the_effect_does_not_depend_on_the_unit() -> None:
    one = effect(BASE, scaled(1.2), RULE)
    other = effect([value * 1e-6 for value in BASE], [value * 1e-6 for value in scaled(1.2)], RULE)
    assert one.change == pytest.approx(other.change)
    assert one.low == pytest.approx(other.low)


def test_one_launch_has_a_change_and_nothing_more() -> None:
    found = effect([2.0], [3.0], RULE)
    assert found == Effect(change=found.change, floor=0.03)
    assert found.change == pytest.approx(0.5)
    assert effect([2.0], BASE, RULE).low is None


def test_two_launches_that_disagree_beyond_a_float_are_no_error() -> None:
    found = effect([1e-150, 1e150], [1e-200, 1e200], RULE)
    assert found.high is not None
    assert math.isfinite(found.high)
    assert found.detectable is not None
    assert math.isfinite(found.detectable)


def test_the_floor_is_three_percent_where_nothing_drifts() -> None:
    assert effect(BASE, scaled(1.05), RULE).floor == pytest.approx(0.03)
    assert effect(BASE, scaled(1.05), replace(RULE, floor=0.1)).floor == pytest.approx(0.1)


def test_a_drift_inside_both_runs_raises_the_floor_to_what_it_explains() -> None:
    line = [1.01**i for i in range(20)]
    found = effect(line[:10], line[10:], RULE)
    assert found.floor == pytest.approx(1.01**10 - 1)
    assert found.change == pytest.approx(found.floor)
    [[judged]] = judge([[effect(line[:10], line[10:], RULE)]], RULE)
    assert (judged.word, "own drift" in judged.reason) == ("AMBIGUOUS", True)
    assert word([value * 1.2 for value in line[10:]], line[:10]) == "SLOWER"


def test_the_drifts_own_error_is_part_of_the_floor() -> None:
    noisy = [1.0, 1.3, 0.8, 1.2, 1.0]
    drift = drift_between([math.log(value) for value in noisy], [math.log(value) for value in noisy])
    assert abs(drift.value) < drift.error
    assert effect(noisy, noisy, RULE).floor == pytest.approx(math.expm1(abs(drift.value) + 1.5 * drift.error))


def test_a_measured_floor_stands_where_it_is_more() -> None:
    quiet = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
    new = [value * 1.05 for value in quiet]
    assert effect(quiet, new, RULE, 0.02).floor == pytest.approx(0.03)
    raised = effect(quiet, new, RULE, 0.08)
    assert raised.floor == pytest.approx(0.08)
    assert raised.measured == 0.08
    assert effect([1.0], [1.05], RULE, 0.08).floor == pytest.approx(0.08)
    assert [judge([[effect(quiet, new, RULE, least)]], RULE)[0][0].word for least in (0.02, 0.08)] == ["SLOWER", "SAME"]


def test_beyond_the_rules_floor_and_within_the_measured_one_is_no_drift() -> None:
    found = effect(BASE, scaled(1.06), RULE, 0.06)
    [[judged]] = judge([[found]], RULE)
    assert found.low is not None
    assert found.low > RULE.floor
    assert (judged.word, judged.reason) == ("AMBIGUOUS", "the interval reaches across the floor")


# --- the words ---


def test_a_clear_change_is_slower_or_faster() -> None:
    assert word(scaled(1.10)) == "SLOWER"
    assert word(scaled(0.90)) == "FASTER"
    assert word(BASE, scaled(1.10)) == "FASTER"


def test_what_lies_within_the_floor_is_the_same() -> None:
    assert word(scaled(1.0)) == "SAME"
    assert word(scaled(1.01)) == "SAME"


def test_a_sure_change_below_the_floor_is_no_alarm() -> None:
    quiet = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
    found = effect(quiet, [value * 1.02 for value in quiet], RULE)
    assert found.low is not None
    assert found.low > 0
    assert judge([[found]], RULE)[0][0].word == "SAME"


def test_noise_is_no_proof_of_sameness() -> None:
    drifting = [1.0, 1.5, 2.0, 2.5, 3.0]
    found = effect(drifting, drifting, RULE)
    assert found.high is not None
    assert found.high < found.floor
    assert judge([[found]], RULE)[0][0].word == "AMBIGUOUS"


def test_the_floor_is_as_far_below_as_above_in_ratios() -> None:
    quarter = replace(RULE, floor=0.25)
    nearly = known(change=-0.19, low=-0.199, high=-0.18, p_value=1.0, floor=0.25)
    assert judge([[nearly]], quarter)[0][0].word == "SAME"
    assert judge([[replace(nearly, low=-0.201)]], quarter)[0][0].word == "AMBIGUOUS"


def test_an_interval_across_the_floor_is_ambiguous() -> None:
    [[found]] = judge([[effect(BASE, scaled(1.03), RULE)]], RULE)
    assert (found.word, found.reason) == ("AMBIGUOUS", "the interval reaches across the floor")
    assert word(scaled(1.05, wobble=20), BASE) == "AMBIGUOUS"


def test_what_is_clear_alone_may_be_chance_among_many() -> None:
    suspect, nothing = known(p_value=0.04), known(change=0.0, low=-0.01, high=0.01, p_value=1.0)
    assert judge([[suspect]], RULE)[0][0].word == "SLOWER"
    found = judge([[suspect], *([nothing] for _ in range(9))], RULE)
    assert found[0][0].word == "AMBIGUOUS"
    assert "not among all" in found[0][0].reason
    assert {one.word for family in found[1:] for one in family} == {"SAME"}


def test_the_ranks_have_to_agree() -> None:
    [[found]] = judge([[known(rank_p_value=0.06)]], RULE)
    assert found.word == "AMBIGUOUS"
    assert "ranks" in found.reason


def test_the_sizes_that_moved_are_told_from_those_that_did_not() -> None:
    moved, still = known(), known(change=0.0, low=-0.01, high=0.01, p_value=1.0)
    [found] = judge([[still, moved, moved, still]], RULE)
    assert [one.word for one in found] == ["SAME", "SLOWER", "SLOWER", "SAME"]


def test_slower_means_that_the_printed_interval_clears_the_floor() -> None:
    for step in range(40):
        found = effect(BASE, scaled(1 + step / 400), RULE)
        assert found.low is not None
        slower = judge([[found]], RULE)[0][0].word == "SLOWER"
        assert slower == (found.low > found.floor and found.rank_p_value is not None and found.rank_p_value <= 0.05)


def test_nothing_to_judge_is_nothing() -> None:
    assert judge([], RULE) == ()


# --- the study, small and seeded ---

TRIALS = 120


def share(noise: gate_study.Noise, step: float) -> float:
    return gate_study.rates(noise, step, [gate_study.parbench], TRIALS, seed=7)[0]


def test_it_finds_five_percent_at_one_percent_noise() -> None:
    assert share(gate_study.NOISES["1 % a launch"], gate_study.STEP) >= 0.95


@pytest.mark.parametrize("name", ["1 % a launch", "10 % a launch", "spikes in 10 % of launches", "drift of 1 %"])
def test_it_imagines_nothing(name: str) -> None:
    assert share(gate_study.NOISES[name], 0.0) <= 0.01


@pytest.mark.parametrize("name", ["autocorrelation 0.6", "autocorrelation 0.6, 10 %", "drift of 10 %"])
def test_launches_that_resemble_their_neighbours_seldom_deceive_it(name: str) -> None:
    assert share(gate_study.NOISES[name], 0.0) <= 0.02


def test_the_usual_rules_are_deceived() -> None:
    noise, gates = gate_study.NOISES["3 % a launch"], list(gate_study.GATES.values())
    parbench, five, _, pooled = gate_study.rates(noise, 0.0, gates, 60, seed=7)
    assert parbench <= 0.02
    assert five > 0.2
    assert pooled > 0.3


def test_the_simulated_times_have_the_noise_they_claim() -> None:
    import numpy as np

    noise = gate_study.Noise(launch=0.03, launches=400, iterations=10, sizes=2)
    base, new = gate_study.simulate(noise, gate_study.STEP, np.random.default_rng(0))
    medians = [np.log(np.median(side, axis=2)) for side in (base, new)]
    assert base.shape == (400, 2, 10)
    assert float(np.std(medians[0])) == pytest.approx(0.032, abs=0.004)
    assert float(medians[1].mean() - medians[0].mean()) == pytest.approx(gate_study.STEP, abs=0.01)
    assert np.corrcoef(medians[0].T)[0, 1] == pytest.approx(0.45, abs=0.12)


def test_the_upper_end_of_a_rate_is_wilsons() -> None:
    expected = scipy.stats.binomtest(3, 100).proportion_ci(method="wilson").high
    assert gate_study.upper(0.03, 100) == pytest.approx(expected, abs=1e-4)
