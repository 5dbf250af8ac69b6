"""The rule of a comparison: each verdict at its boundary."""

import pytest

from parbench.reports.compare.rule import Rule, SeriesTimes, judge_series

BASE = [1.000, 1.010, 0.990, 1.005, 0.995]
QUIET = [1.0, 1.0001, 0.9999, 1.0002, 0.9998]
NOISY = [1.0, 1.5, 2.0, 2.5, 3.0]


def judge(times: SeriesTimes, *, is_paired: bool) -> str:
    [judgement] = judge_series([times], Rule(is_paired=is_paired))
    return judgement.verdict


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize(
    ("base", "factor", "min_effect", "expected"),
    [
        (BASE, 1.10, 0.03, "SLOWER"),
        (BASE, 0.90, 0.03, "FASTER"),
        (QUIET, 1.02, 0.03, "NO CHANGE"),
        (BASE, 1.03, 0.03, "UNDECIDED"),
        (NOISY, 1.0, 0.03, "UNDECIDED"),
        (QUIET, 1.05, 0.02, "SLOWER"),
        (QUIET, 1.05, 0.08, "NO CHANGE"),
        # Thresholds are symmetric for ratios.
        (QUIET, 1 / 1.05, 0.06, "NO CHANGE"),
        (QUIET, 1 / 1.05, 0.04, "FASTER"),
    ],
)
def test_verdict_follows_interval_and_threshold(
    base: list[float], factor: float, min_effect: float, expected: str, is_paired: bool
) -> None:
    new = [factor * seconds for seconds in base[::-1]]
    times = SeriesTimes(
        base=dict(enumerate(base)), new=dict(enumerate(new)), min_effect=min_effect
    )
    assert judge(times, is_paired=is_paired) == expected


def test_series_without_common_repetitions_is_not_judged() -> None:
    times = SeriesTimes(base={0: 1.0}, new={1: 1.0})
    assert judge(times, is_paired=True) == "NOT ENOUGH DATA"
