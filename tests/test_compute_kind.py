"""A step computes or waits, and one says so in a word."""

import pytest

from bench.errors import UserError
from workloads.compute_kind import COMPUTE, parse_compute


@pytest.mark.parametrize(
    ("text", "seconds"), [("real", None), ("timed:20ms", 0.02), ("timed:1s", 1.0), ("timed:0.5ms", 0.0005)]
)
def test_a_kind_is_real_or_a_duration(text: str, seconds: float | None) -> None:
    assert parse_compute(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fake", "timed", "20ms", "Real", "real:20ms"])
def test_another_word_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UserError, match=r"compute = .* is not allowed: compute is real or timed:DURATION"):
        parse_compute(text)


@pytest.mark.parametrize("text", ["timed:", "timed:0ms", "timed:-1s", "timed:soon"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="duration"):
        parse_compute(text)


def test_the_default_is_real_and_leaves_a_case_as_it_was() -> None:
    assert parse_compute(str(COMPUTE.default)) is None
    assert COMPUTE.optional
