"""Spans are sets of nanoseconds: functions agree with sets of small integers, and a step's parts make its wall."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.intervals import Breakdown, Span, break_down, difference, gaps, intersection, length, union

NS = 1e-9
END = 30
Spans = list[Span]


def make_span(ends: tuple[int, int]) -> Span:
    return min(ends), max(ends)


ONE = st.tuples(st.integers(0, END), st.integers(0, END)).map(make_span)
SPANS = st.lists(ONE, max_size=8)


def points(spans: Iterable[Span]) -> set[int]:
    return {at for start, stop in spans for at in range(start, stop)}


def is_tidy(spans: Sequence[Span]) -> bool:
    """Sorted, disjoint, not touching, none empty."""
    return all(start < stop for start, stop in spans) and all(one[1] < other[0] for one, other in pairwise(spans))


@given(SPANS)
def test_a_union_covers_the_same_points_in_tidy_spans(spans: Spans) -> None:
    merged = union(spans)
    assert points(merged) == points(spans)
    assert is_tidy(merged)
    assert length(spans) == len(points(spans))


@given(SPANS, SPANS)
def test_an_intersection_has_the_points_of_both(a: Spans, b: Spans) -> None:
    common = intersection(a, b)
    assert points(common) == points(a) & points(b)
    assert is_tidy(common)


@given(SPANS, SPANS)
def test_a_difference_has_the_points_of_the_first_alone(a: Spans, b: Spans) -> None:
    left = difference(a, b)
    assert points(left) == points(a) - points(b)
    assert is_tidy(left)


@given(SPANS, ONE)
def test_gaps_are_the_points_of_a_span_that_nothing_covers(spans: Spans, within: Span) -> None:
    assert points(gaps(spans, within)) == points([within]) - points(spans)


def test_neighbours_are_joined_and_empty_spans_dropped() -> None:
    assert union([(5, 9), (0, 5), (20, 20)]) == [(0, 9)]


@pytest.mark.parametrize("function", [union, length])
def test_a_span_that_ends_before_it_starts_is_refused(function: Callable[[Spans], object]) -> None:
    with pytest.raises(ValueError, match=r"stop\(3\) < start\(5\)"):
        function([(5, 3)])


def test_one_long_span_against_many_is_one_pass() -> None:
    many = [(2 * i, 2 * i + 1) for i in range(100_000)]
    assert length(difference([(0, 200_000)], many)) == 100_000
    assert difference(many, [(0, 200_000)]) == []
    assert intersection(many, [(0, 200_000)]) == many


def brute_break_down(
    wall: Span, compute: Spans, comm: Mapping[str, Spans], copies: Spans
) -> tuple[int, dict[str, int], int, int]:
    """Decide every nanosecond by itself."""
    exposed = dict.fromkeys(comm, 0)
    computing = copying = idle = 0
    order = list(comm)
    for at in range(*wall):
        running = [(span[0], order.index(axis)) for axis, spans in comm.items() for span in spans if at in range(*span)]
        if at in points(compute):
            computing += 1
        elif at in points(copies):
            copying += 1
        elif running:
            exposed[order[min(running)[1]]] += 1
        else:
            idle += 1
    return computing, exposed, copying, idle


@given(ONE, SPANS, st.dictionaries(st.sampled_from(["dp", "tp", "pp"]), SPANS), SPANS)
def test_a_breakdown_agrees_with_deciding_every_nanosecond(
    wall: Span, compute: Spans, comm: dict[str, Spans], copies: Spans
) -> None:
    found = break_down(wall, compute, comm, copies)
    computing, exposed, copying, idle = brute_break_down(wall, compute, comm, copies)
    assert found.compute_seconds == pytest.approx(computing * NS)
    assert found.exposed_comm_seconds == pytest.approx({axis: count * NS for axis, count in exposed.items()})
    assert found.copy_seconds == pytest.approx(copying * NS)
    assert found.idle_seconds == pytest.approx(idle * NS)
    assert found.wall_seconds == pytest.approx((wall[1] - wall[0]) * NS)
    assert found.residual_seconds == 0
    everything = points([span for spans in comm.values() for span in spans]) & points([wall])
    assert sum(exposed.values()) == len(everything - points(compute) - points(copies))


def total(found: Breakdown) -> float:
    exposed = sum(found.exposed_comm_seconds.values())
    return found.compute_seconds + exposed + found.copy_seconds + found.idle_seconds + found.residual_seconds


def test_the_parts_of_a_step_are_as_drawn() -> None:
    # compute 0-10, a gather 5-15 half hidden, a copy 14-18 that hides its end, idle to 20
    found = break_down((0, 20), [(0, 10)], {"dp": [(5, 15)]}, [(14, 18)])
    assert found.exposed_comm_seconds == {"dp": pytest.approx(4 * NS)}
    assert found.copy_seconds == pytest.approx(4 * NS)
    assert found.idle_seconds == pytest.approx(2 * NS)


def test_time_that_two_axes_share_goes_to_the_operation_that_started_first() -> None:
    found = break_down((0, 30), [], {"dp": [(5, 30)], "tp": [(0, 10), (10, 20)]}, [])
    assert found.exposed_comm_seconds == pytest.approx({"dp": 20 * NS, "tp": 10 * NS})


def test_a_tie_between_axes_goes_to_the_one_named_first() -> None:
    found = break_down((0, 10), [], {"tp": [(0, 10)], "dp": [(0, 10)]}, [])
    assert found.exposed_comm_seconds == pytest.approx({"tp": 10 * NS, "dp": 0})


def test_the_residual_is_what_spans_do_not_explain_of_another_clocks_wall() -> None:
    found = break_down((0, 20), [(0, 10)], {"dp": []}, [], measured_wall_seconds=25 * NS)
    assert found.wall_seconds == 25 * NS
    assert found.residual_seconds == pytest.approx(5 * NS)
    assert total(found) == pytest.approx(found.wall_seconds)


def test_what_lies_outside_the_wall_does_not_count() -> None:
    found = break_down((10, 20), [(0, 12)], {"dp": [(18, 40)]}, [(0, 5)])
    assert found.compute_seconds == pytest.approx(2 * NS)
    assert found.exposed_comm_seconds == pytest.approx({"dp": 2 * NS})
    assert found.copy_seconds == 0
    assert total(found) == pytest.approx(10 * NS)


def test_a_step_of_absolute_nanoseconds_has_no_residual() -> None:
    start = 1_795_271_345_431_703_321
    found = break_down((start, start + 1_000), [(start + 1, start + 334)], {"dp": [(start + 300, start + 777)]}, [])
    assert found.residual_seconds == 0
    assert found.idle_seconds == pytest.approx(224 * NS)
