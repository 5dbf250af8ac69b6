"""Profiled steps over time: a box for each span, few boxes for many spans."""

from parbench.bench.results.records import Interval, RankTimeline, Timeline
from parbench.reports.figures.timeline import chart_timeline
from tests.support.reports.figure_parts import find_boxes, find_texts
from tests.support.reports.traced import make_rank_timeline


def make_rank(intervals: list[Interval], rank: int = 0, seconds: float = 1.0) -> RankTimeline:
    stop_us = seconds * 1e6
    return RankTimeline(rank=rank, start_us=0.0, stop_us=stop_us, intervals=tuple(intervals))


def join(*ranks: RankTimeline) -> Timeline:
    return Timeline(clock="one clock", uncertainty_seconds=0.0, ranks=ranks)


def test_timeline_has_boxes_at_its_spans() -> None:
    figure = chart_timeline("step", "ddp", "", join(make_rank_timeline())).draw()
    boxes = find_boxes(figure.axes[0])
    milliseconds = {
        name: [(round(1e3 * start, 1), round(1e3 * stop, 1)) for start, stop in spans]
        for name, spans in boxes.items()
    }
    assert milliseconds["compute: 6.00 ms"] == [(0, 5), (8.5, 9.5)]
    assert milliseconds["hidden communication: 1.00 ms"] == [(4, 5)]
    assert milliseconds["exposed communication: 3.00 ms"] == [(5, 8)]
    assert {"rank 0  phases", "forward", "exposed communication"} <= set(find_texts(figure))


def test_slowest_of_many_ranks_are_drawn() -> None:
    ranks = [make_rank([Interval("compute", "", 0.0, 1.0)], rank) for rank in range(64)]
    ranks[37] = make_rank([Interval("compute", "", 0.0, 1.0)], 37, seconds=2.0)
    chart = chart_timeline("step", "ddp", "", join(*ranks))
    assert "The 8 slowest of 64 ranks." in chart.caption
    texts = set(find_texts(chart.draw()))
    assert {"rank 0  compute", "rank 37  compute"} <= texts
    assert sum(text.startswith("rank ") for text in texts) == 8
