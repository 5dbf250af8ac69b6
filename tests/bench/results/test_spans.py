"""Spans of time agree with sets of nanoseconds, and the parts of a step add up to its wall time."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.results.spans import (
    Span,
    compute_breakdown,
    difference,
    intersection,
    length,
    union,
)

NS = 1e-9
END = 30


def make_span(ends: tuple[int, int]) -> Span:
    return min(ends), max(ends)


SPAN = st.tuples(st.integers(0, END), st.integers(0, END)).map(make_span)
SPANS = st.lists(SPAN, max_size=6)
CASES = settings(deadline=None, max_examples=60, derandomize=True)


def to_points(spans: Iterable[Span]) -> set[int]:
    points: set[int] = set()
    for start, stop in spans:
        points |= set(range(start, stop))
    return points


def check_spans(spans: Sequence[Span], points: set[int]) -> None:
    """Check that disjoint spans in order cover these points."""
    assert to_points(spans) == points
    assert all(start < stop for start, stop in spans)
    assert all(span[1] < following[0] for span, following in pairwise(spans))


@given(SPANS, SPANS, SPAN)
@CASES
def test_spans_agree_with_sets_of_points(a: list[Span], b: list[Span], window: Span) -> None:
    check_spans(union(a), to_points(a))
    check_spans(intersection(a, b), to_points(a) & to_points(b))
    check_spans(difference(a, b), to_points(a) - to_points(b))
    assert length(a) == len(to_points(a))


def test_span_that_ends_before_its_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop\(3\) < start\(5\)"):
        union([(5, 3)])


@given(SPAN, SPANS, SPANS, SPANS, SPANS)
@CASES
def test_breakdown_agrees_with_sets_of_points(
    wall: Span, compute: list[Span], dp: list[Span], tp: list[Span], copies: list[Span]
) -> None:
    parts = compute_breakdown(wall, compute, {"dp": dp, "tp": tp}, copies)
    window = to_points([wall])
    computing = to_points(compute) & window
    copying = (to_points(copies) & window) - computing
    communicating = (to_points(dp) | to_points(tp)) & window
    exposed = communicating - computing - copying
    expected = {
        "compute": computing,
        "copy": copying,
        "exposed": exposed,
        "hidden_comm": communicating - exposed,
        "idle": window - computing - copying - communicating,
        "wall": window,
    }
    seconds = {name: getattr(parts, f"{name}_seconds") for name in expected}
    assert seconds == pytest.approx(
        {name: len(points) * NS for name, points in expected.items()}
    )


def test_exposed_time_belongs_to_the_first_axis() -> None:
    comm = {"dp": [(2, 8), (20, 25)], "tp": [(4, 10), (20, 22)]}
    parts = compute_breakdown((0, 30), [(0, 3)], comm, [])
    assert parts.exposed_comm_seconds["dp"] == pytest.approx((5 + 5) * NS)
    assert parts.exposed_comm_seconds["tp"] == pytest.approx(2 * NS)
    assert parts.overlap == pytest.approx(1 / 13)
