"""Spans are sets of nanoseconds: functions agree with sets of small integers, and a step's parts make its wall."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.results.spans import (
    Span,
    break_down,
    difference,
    gaps,
    intersection,
    length,
    union,
)

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
    return all(start < stop for start, stop in spans) and all(
        one[1] < other[0] for one, other in pairwise(spans)
    )


@given(SPANS, SPANS, ONE)
@settings(deadline=None)
def test_functions_of_spans_are_those_of_sets_of_points(a: Spans, b: Spans, within: Span) -> None:
    for found, expected in (
        (union(a), points(a)),
        (intersection(a, b), points(a) & points(b)),
        (difference(a, b), points(a) - points(b)),
        (gaps(a, within), points([within]) - points(a)),
    ):
        assert points(found) == expected
        assert is_tidy(found)
    assert length(a) == len(points(a))


def test_neighbours_are_joined_empty_spans_dropped_and_those_that_end_before_they_start_refused() -> (
    None
):
    assert union([(5, 9), (0, 5), (20, 20)]) == [(0, 9)]
    for function in (union, length):
        with pytest.raises(ValueError, match=r"stop\(3\) < start\(5\)"):
            function([(5, 3)])


def brute_break_down(
    wall: Span, compute: Spans, comm: Mapping[str, Spans], copies: Spans
) -> tuple[int, dict[str, int], int, int, int]:
    exposed = dict.fromkeys(comm, 0)
    computing = copying = idle = hidden = 0
    order = list(comm)
    for at in range(*wall):
        running = [
            (span[0], order.index(axis))
            for axis, spans in comm.items()
            for span in spans
            if at in range(*span)
        ]
        hidden += bool(running) and (at in points(compute) or at in points(copies))
        if at in points(compute):
            computing += 1
        elif at in points(copies):
            copying += 1
        elif running:
            exposed[order[min(running)[1]]] += 1
        else:
            idle += 1
    return computing, exposed, copying, idle, hidden


@given(ONE, SPANS, st.dictionaries(st.sampled_from(["dp", "tp", "pp"]), SPANS), SPANS)
@settings(deadline=None)
def test_a_breakdown_agrees_with_deciding_every_nanosecond(
    wall: Span, compute: Spans, comm: dict[str, Spans], copies: Spans
) -> None:
    found = break_down(wall, compute, comm, copies)
    computing, exposed, copying, idle, hidden = brute_break_down(wall, compute, comm, copies)
    assert found.compute_seconds == pytest.approx(computing * NS)
    assert found.exposed_comm_seconds == pytest.approx(
        {axis: count * NS for axis, count in exposed.items()}
    )
    assert found.copy_seconds == pytest.approx(copying * NS)
    assert found.idle_seconds == pytest.approx(idle * NS)
    assert found.hidden_comm_seconds == pytest.approx(hidden * NS)
    total = hidden + sum(exposed.values())
    assert found.overlap == (pytest.approx(hidden / total) if total else None)
    assert found.wall_seconds == pytest.approx((wall[1] - wall[0]) * NS)
    assert found.residual_seconds == 0


def test_the_residual_is_what_spans_do_not_explain_of_another_clocks_wall() -> None:
    found = break_down((0, 20), [(0, 10)], {"dp": []}, [], measured_wall_seconds=25 * NS)
    assert found.wall_seconds == 25 * NS
    assert found.residual_seconds == pytest.approx(5 * NS)
    start = 1_795_271_345_431_703_321
    found = break_down(
        (start, start + 1_000), [(start + 1, start + 334)], {"dp": [(start + 300, start + 777)]}, []
    )
    assert found.residual_seconds == 0
    assert found.idle_seconds == pytest.approx(224 * NS)
