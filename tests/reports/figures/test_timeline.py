"""Traced steps over time: boxes where intervals were, what is exposed or idle marked, on one axis, however many."""

from parbench.bench.results.records import Interval, RankTimeline, Timeline
from parbench.reports.figures.svg import HATCHED
from parbench.reports.figures.timeline import (
    MOST_RANKS,
    TimeChart,
    boxes_of,
    draw_first,
    draw_timeline,
    extent_of,
    parts_of,
    view_of,
)
from tests.support.figure_parts import Box as Drawn
from tests.support.figure_parts import Parts
from tests.support.figure_parts import parts_of as drawn_parts
from tests.support.traced import make_rank_timeline, make_timeline

LEFT, WIDTH = 150.0, 834.0


def busy_rank(rank: int, count: int, seconds: float = 1.0) -> RankTimeline:
    length = seconds * 1e6 / count
    intervals = tuple(
        Interval("compute", "compute", i * length, (i + 0.5) * length) for i in range(count)
    )
    return RankTimeline(rank=rank, start_us=0.0, stop_us=seconds * 1e6, intervals=intervals)


def of(*ranks: RankTimeline) -> Timeline:
    return Timeline(clock="one clock", uncertainty_seconds=0.0, ranks=ranks)


def chart_of(one: Timeline, most_boxes: int = 4000) -> TimeChart:
    return draw_timeline(one, view_of(one, most_boxes), extent_of(one)[1])


def drawn(one: Timeline) -> Parts:
    return drawn_parts(chart_of(one))


def spans(boxes: list[Drawn], milliseconds: float = 10.0) -> list[tuple[float, float]]:
    scale = milliseconds / WIDTH
    return [
        (round((one.x - LEFT) * scale, 1), round((one.x + one.width - LEFT) * scale, 1))
        for one in boxes
    ]


def named(parts: Parts, told: str) -> list[Drawn]:
    return [box for box in parts.boxes if box.told.startswith(told)]


def test_spans_add_up_to_the_step() -> None:
    parts = parts_of(make_rank_timeline())
    length = {
        name: sum(stop - start for start, stop in found) / 1e6 for name, found in parts.items()
    }
    assert length == {"compute": 6, "copy": 0.25, "exposed": 3, "hidden": 1, "idle": 0.75}
    assert parts["exposed"] == [(5_000_000, 8_000_000)]
    assert parts["idle"] == [(8_000_000, 8_500_000), (9_750_000, 10_000_000)]


def test_boxes_are_at_their_intervals() -> None:
    parts = drawn(of(make_rank_timeline()))
    assert spans(named(parts, "compute")) == [(0, 5), (8.5, 9.5)]
    assert spans(named(parts, "hidden")) == [(4, 5)]
    assert spans(named(parts, "exposed")) == [(5, 8)]
    late = named(drawn(make_timeline()), "compute")
    assert spans([box for box in late if box.y > late[0].y], 10.1) == [(0.1, 5.1), (8.6, 9.6)]


def test_exposed_is_hatched_and_idle_pale() -> None:
    one = of(make_rank_timeline())
    for parts in (drawn(one), drawn_parts(draw_first(one, view_of(one)))):
        hatched = [path for path in parts.paths if HATCHED in path.style and path.told]
        assert [path.told.endswith("3.00 ms") for path in hatched] == [True]
        (idle,) = [path for path in parts.paths if path.told == "idle: 750 us"]
        assert (idle.hue, idle.opacity) == ("grey", 0.4)
        assert {"exposed communication", "hidden communication", "idle"} <= set(parts.words)


def test_short_intervals_take_the_majority_kind() -> None:
    def found(gap_us: float, **parts: list[tuple[int, int]]) -> list[tuple[str, float, float]]:
        micro = {
            part: [(1000 * start, 1000 * stop) for start, stop in spans]
            for part, spans in parts.items()
        }
        return [(box.kind, box.start, box.stop) for box in boxes_of(micro, gap_us)]

    computing = [(10 * i, 10 * i + 8) for i in range(10)]
    waiting = [(stop, stop + 2) for _, stop in computing]
    assert found(1, compute=computing, exposed=waiting[:1]) == [
        *(("compute", 0, 8), ("exposed", 8, 10)),
        *(("compute", start, stop) for start, stop in computing[1:]),
    ]
    assert found(20, compute=computing, exposed=waiting) == [("compute", 0, 100)]
    assert found(20, compute=computing[:2], exposed=[(18, 60)]) == [
        ("compute", 0, 18),
        ("exposed", 18, 60),
    ]


def test_view_limits_boxes_and_ranks() -> None:
    one = of(busy_rank(0, 6_000), busy_rank(1, 6_000))
    for most in (50, 4000):
        assert len(drawn_parts(chart_of(one, most)).boxes) < most + 20
        assert "drawn as its neighbours are" in view_of(one, most).note
    view = view_of(of(*(busy_rank(rank, 3, 2.0 if rank == 37 else 1.0) for rank in range(64))))
    shown = [one.rank for one in view.ranks]
    assert len(shown) == MOST_RANKS
    assert {0, 37, 63} <= set(shown)
    assert view.note.startswith("8 of 64 ranks are drawn, the slowest among them.")


def test_hostile_and_empty_timelines_are_drawn() -> None:
    told = (Interval("comm <script>", "</svg><b>", 0.0, 10.0),)
    chart = chart_of(of(RankTimeline(rank=0, start_us=0.0, stop_us=10.0, intervals=told)))
    assert "<script" not in chart.svg("t", "<ddp>", "")
    assert "comm <script>" in drawn_parts(chart).words
    for one in (of(), of(RankTimeline(rank=0, start_us=0.0, stop_us=0.0, intervals=()))):
        assert [path.told for path in drawn(one).paths if path.told] == []
        assert drawn_parts(draw_first(one, view_of(one))).words[-1].startswith("time since")
