"""The inline timeline: every stream a line with its name, boxes where the intervals were, bounded however many."""

import re
from xml.etree import ElementTree

import pytest
from traced import rank_timeline, timeline

from bench.timeline import Interval, RankTimeline, Timeline
from reports.timeline_svg import MOST_RANKS, merged, timeline_svg, timeline_words, view_of

LEFT, WIDTH = 130.0, 860.0


def drawn(one: Timeline, most_boxes: int = 4000) -> ElementTree.Element:
    view = view_of(one, most_boxes)
    return ElementTree.fromstring(timeline_svg(one, view, name="t-1", title="Timeline: <ddp>"))


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


def boxes(svg: ElementTree.Element, start: str) -> list[list[float]]:
    """Return left and right by turns of the boxes of each path whose title begins so, in shares of the axis."""
    found = []
    for path in svg.iter("path"):
        title = path.find("title")
        if title is not None and (title.text or "").startswith(start):
            told = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.attrib["d"])
            ends = [(float(x) - LEFT, float(x) + float(width) - LEFT) for x, width in told]
            found.append([x / WIDTH for both in ends for x in both])
    return found


def busy_rank(rank: int, count: int, seconds: float = 1.0) -> RankTimeline:
    step = seconds * 1e6 / count
    intervals = tuple(Interval("compute", "compute", i * step, (i + 0.5) * step) for i in range(count))
    return RankTimeline(rank=rank, start_us=0.0, stop_us=seconds * 1e6, intervals=intervals)


def of(*ranks: RankTimeline) -> Timeline:
    return Timeline(clock="one clock", uncertainty_seconds=0.0, ranks=ranks)


def test_every_rank_and_stream_has_a_line_with_its_name() -> None:
    words = texts(drawn(timeline()))
    assert [word for word in words if word.startswith("rank")] == ["rank 0", "rank 1"]
    for stream in ("phases", "compute", "copies", "comm dp", "forward", "backward", "update"):
        assert words.count(stream) == 2, stream


def test_boxes_stand_where_the_intervals_were() -> None:
    first, second = boxes(drawn(of(rank_timeline(), rank_timeline(1))), "compute")
    assert first == pytest.approx(second)
    assert first == pytest.approx([0.0, 0.5, 0.85, 0.95], abs=2e-3)
    (comm, _) = boxes(drawn(of(rank_timeline(), rank_timeline(1))), "comm dp")
    assert comm == pytest.approx([0.4, 0.8], abs=2e-3)


def test_ranks_share_one_axis_that_begins_with_the_first() -> None:
    first, second = boxes(drawn(timeline()), "compute")
    assert first[0] == pytest.approx(0.0, abs=2e-3)
    assert second[0] == pytest.approx(100 / 10_100, abs=2e-3)


def test_titles_tell_each_streams_sum() -> None:
    told = [title.text for title in drawn(timeline()).iter("title")]
    assert told[0] == "Timeline: <ddp>"
    assert {"compute: 6.00 ms", "comm dp: 4.00 ms", "backward: 5.50 ms"} <= set(told)


def test_neighbours_closer_than_the_gap_are_one() -> None:
    parts = [Interval("compute", "compute", a, b) for a, b in ((10.0, 12.0), (0.0, 4.0), (5.0, 6.0))]
    assert merged(parts, 0.5) == [(0.0, 4.0), (5.0, 6.0), (10.0, 12.0)]
    assert merged(parts, 2.0) == [(0.0, 6.0), (10.0, 12.0)]


def test_a_long_interval_keeps_its_end_though_a_short_one_begins_within_it() -> None:
    parts = [Interval("comm dp", "x", 0.0, 100.0), Interval("comm dp", "x", 5.0, 6.0)]
    assert merged(parts, 1.0) == [(0.0, 100.0)]


@pytest.mark.parametrize("most", [50, 500, 4000])
def test_boxes_are_as_few_as_asked_and_the_note_says_so(most: int) -> None:
    one = of(busy_rank(0, 20_000), busy_rank(1, 20_000))
    view = view_of(one, most)
    svg = timeline_svg(one, view, name="t", title="t")
    assert svg.count("h") < most + 200
    assert "apart is drawn as one" in view.note


def test_of_many_ranks_some_are_drawn_and_the_slowest_is_among_them() -> None:
    ranks = [busy_rank(rank, 3, 2.0 if rank == 37 else 1.0) for rank in range(64)]
    view = view_of(of(*ranks))
    shown = [one.rank for one in view.ranks]
    assert len(shown) == MOST_RANKS
    assert {0, 37, 63} <= set(shown)
    assert view.note.startswith("8 of 64 ranks are drawn, the slowest among them.")


@pytest.mark.parametrize(("seconds", "unit"), [(5.0, "(s)"), (0.02, "(ms)"), (50e-6, "(us)")])
def test_the_axis_is_in_one_unit_with_few_ticks(seconds: float, unit: str) -> None:
    words = texts(drawn(of(busy_rank(0, 3, seconds))))
    assert words[-1].endswith(unit)
    ticks = [float(word) for word in words if re.fullmatch(r"[\d.]+", word)]
    assert 3 <= len(ticks) <= 9
    assert ticks == sorted(ticks)


def test_words_name_the_clock_and_its_uncertainty() -> None:
    one = timeline()
    assert timeline_words(one, view_of(one)).startswith(
        "One traced step on one clock (one host, one monotonic clock, right within 2.00 us), 10.1 ms long."
    )


def test_hostile_names_are_text() -> None:
    evil = RankTimeline(
        rank=0, start_us=0.0, stop_us=10.0, intervals=(Interval("comm <script>", "</svg><b>", 0.0, 10.0),)
    )
    svg = drawn(of(evil))
    assert not list(svg.iter("script"))
    assert "comm <script>" in texts(svg)


@pytest.mark.parametrize("one", [of(), of(RankTimeline(rank=0, start_us=0.0, stop_us=0.0, intervals=()))])
def test_a_step_without_intervals_is_drawn_empty(one: Timeline) -> None:
    assert len(list(drawn(one).iter("title"))) == 1


def test_the_same_timeline_is_the_same_bytes() -> None:
    one = timeline()
    first, second = (timeline_svg(one, view_of(one), name="t", title="t") for _ in range(2))
    assert first == second
