"""Traced steps over time: a box for each interval, few boxes for many intervals."""

import pytest

from parbench.bench.results.records import Interval, RankTimeline, Timeline
from parbench.reports.figures.svg import HATCHED
from parbench.reports.figures.timeline import (
    MOST_RANKS,
    boxes_of,
    draw_timeline,
    extent_of,
    parts_of,
    view_of,
)
from tests.support.figure_parts import Parts, parse_drawing
from tests.support.traced import make_rank_timeline

AXIS_START = 150.0
WIDTH = 834.0


def make_busy_rank(rank: int, count: int, seconds: float = 1.0) -> RankTimeline:
    """Return a rank that computes in the first half of each of `count` intervals."""
    length = seconds * 1e6 / count
    intervals = [
        Interval("compute", "compute", i * length, (i + 0.5) * length) for i in range(count)
    ]
    return RankTimeline(rank=rank, start_us=0.0, stop_us=seconds * 1e6, intervals=tuple(intervals))


def join(*ranks: RankTimeline) -> Timeline:
    return Timeline(clock="one clock", uncertainty_seconds=0.0, ranks=ranks)


def draw(timeline: Timeline, max_boxes: int = 4000) -> Parts:
    view = view_of(timeline, max_boxes)
    return parse_drawing(draw_timeline(timeline, view, extent_of(timeline)[1]))


def find_spans(parts: Parts, kind: str, milliseconds: float) -> list[tuple[float, float]]:
    """Return the first and the last millisecond of each box of a kind."""
    spans = []
    for box in parts.boxes:
        if box.title.startswith(kind):
            start = (box.x - AXIS_START) * milliseconds / WIDTH
            spans.append((round(start, 1), round(start + box.width * milliseconds / WIDTH, 1)))
    return spans


def test_spans_add_up_to_the_step() -> None:
    parts = parts_of(make_rank_timeline())
    milliseconds = {
        name: sum(stop - start for start, stop in spans) / 1e6 for name, spans in parts.items()
    }
    assert milliseconds == {"compute": 6, "copy": 0.25, "exposed": 3, "hidden": 1, "idle": 0.75}
    assert parts["exposed"] == [(5_000_000, 8_000_000)]


def test_boxes_are_at_their_intervals() -> None:
    parts = draw(join(make_rank_timeline()))
    assert find_spans(parts, "compute", 10.0) == [(0, 5), (8.5, 9.5)]
    assert find_spans(parts, "hidden", 10.0) == [(4, 5)]
    assert find_spans(parts, "exposed", 10.0) == [(5, 8)]


def test_exposed_is_hatched_and_idle_pale() -> None:
    parts = draw(join(make_rank_timeline()))
    [exposed] = [path for path in parts.paths if HATCHED in path.style and path.title]
    assert exposed.title.endswith("3.00 ms")
    [idle] = [path for path in parts.paths if path.title == "idle: 750 us"]
    assert idle.opacity == 0.4
    assert {"exposed communication", "hidden communication", "idle"} <= set(parts.texts)


COMPUTING = [(10_000 * i, 10_000 * i + 8000) for i in range(10)]
WAITING = [(stop, stop + 2000) for _, stop in COMPUTING]


def test_short_intervals_take_the_majority_kind() -> None:
    [box] = boxes_of({"compute": COMPUTING, "exposed": WAITING}, gap_us=20)
    assert (box.kind, box.start, box.stop) == ("compute", 0, 100)


@pytest.mark.parametrize("max_boxes", [50, 400])
def test_view_limits_boxes(max_boxes: int) -> None:
    timeline = join(make_busy_rank(0, 600), make_busy_rank(1, 600))
    assert len(draw(timeline, max_boxes).boxes) < max_boxes + 20


def test_view_has_the_slowest_of_many_ranks() -> None:
    ranks = [make_busy_rank(rank, 3) for rank in range(64)]
    ranks[37] = make_busy_rank(37, 3, seconds=2.0)
    view = view_of(join(*ranks))
    assert len(view.ranks) == MOST_RANKS
    assert {0, 37, 63} <= {timeline.rank for timeline in view.ranks}
    assert "8 of 64 ranks" in view.note


def test_hostile_timeline_is_escaped() -> None:
    intervals = (Interval("comm <script>", "</svg><b>", 0.0, 10.0),)
    timeline = join(RankTimeline(rank=0, start_us=0.0, stop_us=10.0, intervals=intervals))
    chart = draw_timeline(timeline, view_of(timeline), extent_of(timeline)[1])
    assert "<script" not in chart.svg("id", "<ddp>", "")
    assert "comm <script>" in parse_drawing(chart).texts


def test_empty_timeline_has_no_boxes() -> None:
    empty = RankTimeline(rank=0, start_us=0.0, stop_us=0.0, intervals=())
    assert draw(join()).titled_boxes == []
    assert draw(join(empty)).titled_boxes == []
