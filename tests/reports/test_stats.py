"""The statistics of effects, compared with scipy and with simulated values."""

import math

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]

from parbench.reports.stats import (
    Effect,
    estimate_paired_effect,
    estimate_unpaired_effect,
    select_discoveries,
)

BASE = dict(enumerate([1.00, 1.01, 0.99, 1.005, 0.995]))
NEW = dict(enumerate([1.10, 1.13, 1.08, 1.115, 1.11, 1.09]))


def estimate_required(base: dict[int, float], new: dict[int, float], *, paired: bool) -> Effect:
    estimate = estimate_paired_effect if paired else estimate_unpaired_effect
    effect = estimate(base, new)
    assert effect is not None
    return effect


def test_effects_are_t_tests_on_logs() -> None:
    ratios = [math.log(NEW[k] / BASE[k]) for k in BASE]
    base_logs, new_logs = (np.log(list(times.values())) for times in (BASE, NEW))
    tests = {
        True: scipy.stats.ttest_1samp(ratios, 0),
        False: scipy.stats.ttest_ind(new_logs, base_logs, equal_var=False),
    }
    for paired, test in tests.items():
        effect = estimate_required(BASE, NEW, paired=paired)
        interval = test.confidence_interval(0.95)
        assert effect.num_repetitions == 5
        assert effect.p_value == pytest.approx(test.pvalue, rel=1e-4)
        assert effect.low == pytest.approx(math.expm1(interval.low), rel=1e-4)
        assert effect.high == pytest.approx(math.expm1(interval.high), rel=1e-4)


def test_paired_effect_is_insensitive_to_drift() -> None:
    drift = {k: 1 + 0.1 * k for k in range(6)}
    new = {k: 1.05 * seconds * (1 + 1e-4 * (-1) ** k) for k, seconds in drift.items()}
    assert estimate_required(drift, new, paired=True).is_within(0.06)
    assert not estimate_required(drift, new, paired=False).is_within(0.06)


@pytest.mark.parametrize("paired", [True, False])
def test_effect_of_two_repetitions_has_no_interval(paired: bool) -> None:
    effect = estimate_required({0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0}, paired=paired)
    assert effect.change == pytest.approx(1.0)
    assert (effect.low, effect.p_value, effect.detectable) == (None, None, None)
    assert not effect.is_within(1.0)


def test_effect_needs_a_common_repetition() -> None:
    assert estimate_paired_effect({0: 1.0}, {1: 1.0}) is None
    assert estimate_unpaired_effect({0: 1.0}, {}) is None


def test_effect_of_equal_times_is_within_any_threshold() -> None:
    effect = estimate_required(BASE, BASE, paired=True)
    assert effect.is_within(0.001)


def test_p_value_is_at_most_nominal_at_the_threshold() -> None:
    random = np.random.default_rng(1)
    rejections = 0
    for _ in range(1000):
        base, new = np.exp(0.02 * random.normal(size=(2, 6)))
        effect = estimate_paired_effect(
            dict(enumerate(base)), dict(enumerate(1.03 * new)), min_effect=0.03
        )
        assert effect is not None
        assert effect.p_value is not None
        rejections += effect.p_value <= 0.05
    assert rejections <= 65


def test_detectable_effect_has_the_stated_power() -> None:
    random = np.random.default_rng(2)
    logs = 0.05 * random.normal(size=(500, 2, 12))
    effects = [
        estimate_required(dict(enumerate(base)), dict(enumerate(new)), paired=True)
        for base, new in np.exp(logs)
    ]
    detectable = np.mean([effect.detectable or 0.0 for effect in effects])
    detections = 0
    for base, new in np.exp(logs):
        slower = dict(enumerate((1 + detectable) * new))
        effect = estimate_required(dict(enumerate(base)), slower, paired=True)
        detections += effect.p_value is not None and effect.p_value < 0.05
    assert 0.72 < detections / 500 < 0.88


def test_discoveries_skip_hypotheses_that_were_not_tested() -> None:
    assert select_discoveries([0.001, None, 0.02, 0.9], 0.05) == [True, False, True, False]
    assert select_discoveries([None]) == [False]
    assert select_discoveries([]) == []
