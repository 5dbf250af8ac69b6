"""Traced steps over time: a box for each interval, few boxes for many intervals."""

import pytest

from parbench.bench.results.records import Interval, RankTimeline, Timeline
from parbench.reports.figures.timeline import (
    MOST_RANKS,
    draw_timeline,
    extent_of,
    view_of,
)
from tests.support.figure_parts import Parts, parse_drawing
from tests.support.traced import make_rank_timeline

AXIS_START = 150.0
WIDTH = 834.0


def make_rank(intervals: list[Interval], rank: int = 0, seconds: float = 1.0) -> RankTimeline:
    stop_us = seconds * 1e6
    return RankTimeline(rank=rank, start_us=0.0, stop_us=stop_us, intervals=tuple(intervals))


def join(*ranks: RankTimeline) -> Timeline:
    return Timeline(clock="one clock", uncertainty_seconds=0.0, ranks=ranks)


def draw(timeline: Timeline, max_boxes: int = 4000) -> Parts:
    view = view_of(timeline, max_boxes)
    return parse_drawing(draw_timeline(timeline, view, extent_of(timeline)[1]))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("compute", [(0, 5), (8.5, 9.5)]), ("hidden", [(4, 5)]), ("exposed", [(5, 8)])],
)
def test_boxes_are_at_their_intervals(kind: str, expected: list[tuple[float, float]]) -> None:
    parts = draw(join(make_rank_timeline()))
    spans = []
    for box in parts.boxes:
        if box.title.startswith(kind):
            start = 10.0 * (box.x - AXIS_START) / WIDTH
            stop = start + 10.0 * box.width / WIDTH
            spans.append((round(start, 1), round(stop, 1)))
    assert spans == expected


def test_view_has_the_slowest_of_many_ranks() -> None:
    ranks = [make_rank([], rank) for rank in range(64)]
    ranks[37] = make_rank([], 37, seconds=2.0)
    view = view_of(join(*ranks))
    assert len(view.ranks) == MOST_RANKS
    assert {0, 37, 63} <= {timeline.rank for timeline in view.ranks}
    assert "8 of 64 ranks" in view.note
