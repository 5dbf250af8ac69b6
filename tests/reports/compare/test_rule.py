"""The rule of a comparison: each verdict at its boundary."""

from collections.abc import Sequence

import pytest

from parbench.reports.compare.rule import Rule, SeriesTimes, TimeJudgement, judge_series

RULE = Rule()
BASE = [1.000, 1.010, 0.990, 1.005, 0.995]
QUIET = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
NOISY = [1.0, 1.5, 2.0, 2.5, 3.0]


def scale(times: Sequence[float], factor: float) -> list[float]:
    return [factor * seconds for seconds in times]


def judge(
    base: Sequence[float],
    new: Sequence[float],
    *,
    min_effect: float = 0.03,
    paired: bool = False,
) -> TimeJudgement:
    times = SeriesTimes(
        base=dict(enumerate(base)), new=dict(enumerate(new)), min_effect=min_effect
    )
    [judgement] = judge_series([times], RULE, is_paired=paired)
    assert judgement is not None
    return judgement


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("base", "new", "expected"),
    [
        (BASE, scale(BASE[::-1], 1.10), "SLOWER"),
        (BASE, scale(BASE[::-1], 0.90), "FASTER"),
        (QUIET, scale(QUIET[::-1], 1.02), "NO CHANGE"),
        (BASE, scale(BASE[::-1], 1.03), "UNCONFIRMED"),
        (NOISY, NOISY[::-1], "UNCONFIRMED"),
    ],
)
def test_verdict_follows_interval_and_threshold(
    base: list[float], new: list[float], expected: str, paired: bool
) -> None:
    assert judge(base, new, paired=paired).verdict == expected


@pytest.mark.parametrize(("min_effect", "expected"), [(0.02, "SLOWER"), (0.08, "NO CHANGE")])
def test_threshold_of_a_series_decides(min_effect: float, expected: str) -> None:
    assert judge(QUIET, scale(QUIET, 1.05), min_effect=min_effect).verdict == expected


def test_threshold_is_symmetric_for_ratios() -> None:
    assert judge(QUIET, scale(QUIET, 1 / 1.05), min_effect=0.06).verdict == "NO CHANGE"
    assert judge(QUIET, scale(QUIET, 1 / 1.05), min_effect=0.04).verdict == "FASTER"


def test_series_without_common_repetitions_is_not_judged() -> None:
    times = SeriesTimes(base={0: 1.0}, new={1: 1.0}, min_effect=0.03)
    assert judge_series([times], RULE, is_paired=True) == [None]
