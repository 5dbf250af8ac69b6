"""Traced steps: which launch tells, what is refused, lanes without overlap, sums that are the row's, the picture."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reports_fixtures import bad, collective, make_plan, make_run, ok, step
from traced import rank_timeline, run_with, timeline, traced_record

from bench.results.records import Interval, RankTimeline, Timeline
from reports.analysis import timelines
from reports.analysis.summary import summarize
from reports.figures.gantt import MOST_RANKS, Box, joined, timeline_svg, timeline_words, view_of


def traced_in(run_folder: Path, *traces: tuple[object, object]) -> tuple[timelines.Traced, ...]:
    run = run_with(run_folder, traces)  # type: ignore[arg-type]
    return timelines.traced_steps(run, summarize(run).rows)


def test_a_step_with_a_trace_is_told_by_the_first_launch_that_left_one(tmp_path: Path) -> None:
    (one,) = traced_in(tmp_path, (traced_record(), timeline()), (ok(collective()), None))
    assert one.timeline == timeline()
    assert (one.row.case, one.launch, one.why_not) == (step("ddp"), 0, "")
    records = [traced_record(launch=i) for i in range(3)]
    (one,) = traced_in(tmp_path, (records[0], None), (records[1], timeline(2)), (records[2], timeline(4)))
    assert one.timeline is not None
    assert (one.launch, len(one.timeline.ranks)) == (1, 2)
    assert traced_in(tmp_path, (bad(step("ddp")), timeline())) == ()
    run = make_run(make_plan([step("ddp")]), [traced_record()])  # without a folder
    assert timelines.traced_steps(run, summarize(run).rows) == ()


def test_unknown_clocks_and_damaged_traces_are_refused_with_the_reason(tmp_path: Path) -> None:
    (one,) = traced_in(tmp_path, (traced_record(), timeline(clock="")))
    assert (one.timeline, one.why_not) == (None, timelines.NO_CLOCK)
    assert timelines.busy_ranks([one]) == ()
    for content in (b"", b"no gzip", timeline().clock.encode()):
        (one,) = traced_in(tmp_path, (traced_record(), content))
        assert one.timeline is None
        assert "is not what parbench wrote" in one.why_not


def test_a_rank_is_busy_as_long_as_its_row_says(tmp_path: Path) -> None:
    record = traced_record()
    first, second = timelines.busy_ranks(traced_in(tmp_path, (record, timeline())))
    assert first.by_stream["compute"] == pytest.approx(record.metrics["compute"].value)
    assert first.by_stream["copy"] == pytest.approx(record.metrics["exposed_copy"].value)
    assert first.wall_seconds == pytest.approx(10e-3)
    assert first.by_phase == pytest.approx({"forward": 3e-3, "backward": 5.5e-3, "update": 1.5e-3})
    assert list(first.by_stream) == ["compute", "copy", "comm dp"]
    assert (first.rank, second.rank) == (0, 1)
    assert second.by_stream == pytest.approx(first.by_stream)


def interval(start: float, stop: float, stream: str = "comm dp") -> Interval:
    return Interval(stream, "all_reduce", start, stop)


def test_overlaps_count_once_and_lie_in_no_more_lanes_than_need_be() -> None:
    comm = timelines.by_stream(rank_timeline())["comm dp"]
    assert sum(one.stop_us - one.start_us for one in comm) == pytest.approx(6000.25)
    assert [timelines.covered_us(comm), timelines.covered_us([])] == pytest.approx([4000.0, 0.0])
    a, b, c, d = interval(0, 10), interval(5, 15), interval(10, 20), interval(15, 30)
    assert timelines.lanes([d, c, b, a]) == ((a, c), (b, d))
    assert timelines.lanes([a, c]) == ((a, c),)
    assert timelines.lanes([]) == ()


def test_streams_have_an_order_and_words() -> None:
    names = ("comm tp", "copy", "compute", "comm dp", "phase", "compute")
    intervals = tuple(Interval(name, "x", 0.0, 1.0) for name in names)
    rank = RankTimeline(rank=0, start_us=0.0, stop_us=1.0, intervals=intervals)
    assert list(timelines.by_stream(rank)) == ["phase", "compute", "copy", "comm tp", "comm dp"]
    assert [timelines.stream_words(one) for one in ("phase", "copy", "comm tp")] == ["phases", "copies", "comm tp"]
    assert [timelines.axis_of(one) for one in ("compute", "comm tp", "comm ring 2")] == [None, "tp", "ring 2"]


LEFT, WIDTH = 130.0, 854.0


def svg_text(one: Timeline, most_boxes: int = 4000) -> str:
    return timeline_svg(one, view_of(one, most_boxes), name="t-1", title="Timeline: <ddp>")


def drawn(one: Timeline) -> ElementTree.Element:
    return ElementTree.fromstring(svg_text(one))


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
    length = seconds * 1e6 / count
    intervals = tuple(Interval("compute", "compute", i * length, (i + 0.5) * length) for i in range(count))
    return RankTimeline(rank=rank, start_us=0.0, stop_us=seconds * 1e6, intervals=intervals)


def of(*ranks: RankTimeline) -> Timeline:
    return Timeline(clock="one clock", uncertainty_seconds=0.0, ranks=ranks)


def test_every_rank_and_stream_has_a_line_with_its_name_and_its_sum() -> None:
    svg = drawn(timeline())
    words = texts(svg)
    assert [word for word in words if word.startswith("rank")] == ["rank 0", "rank 1"]
    for stream in ("phases", "compute", "copies", "comm dp", "forward", "backward", "update"):
        assert words.count(stream) == 2, stream
    told = [title.text for title in svg.iter("title")]
    assert told[0] == "Timeline: <ddp>"
    assert {"compute: 6.00 ms", "comm dp: 4.00 ms", "backward: 5.50 ms"} <= set(told)
    assert svg_text(timeline()) == svg_text(timeline())
    assert timeline_words(timeline(), view_of(timeline())).startswith(
        "One traced step on one clock (one host, one monotonic clock, right within 2.00 us), 10.1 ms long."
    )


def test_boxes_stand_where_the_intervals_were_on_an_axis_that_begins_with_the_first_rank() -> None:
    svg = drawn(of(rank_timeline(), rank_timeline(1)))
    first, second = boxes(svg, "compute")
    assert first == pytest.approx(second)
    assert first == pytest.approx([0.0, 0.5, 0.85, 0.95], abs=2e-3)
    assert boxes(svg, "comm dp")[0] == pytest.approx([0.4, 0.8], abs=2e-3)
    first, second = boxes(drawn(timeline()), "compute")
    assert first[0] == pytest.approx(0.0, abs=2e-3)
    assert second[0] == pytest.approx(100 / 10_100, abs=2e-3)


def test_neighbours_closer_than_the_gap_are_one_and_a_long_interval_keeps_its_end() -> None:
    def spans(gap_us: float, *times: tuple[float, float]) -> list[tuple[float, float]]:
        drawn = joined((Box(kind="compute", start=start, stop=stop) for start, stop in times), gap_us)
        return [(box.start, box.stop) for box in drawn]

    parts = [(0.0, 4.0), (5.0, 6.0), (10.0, 12.0)]
    assert spans(0.5, *parts) == parts
    assert spans(2.0, *parts) == [(0.0, 6.0), (10.0, 12.0)]
    assert spans(1.0, (0.0, 100.0), (5.0, 6.0)) == [(0.0, 100.0)]


def test_boxes_and_ranks_are_as_few_as_asked_and_the_note_says_so() -> None:
    one = of(busy_rank(0, 20_000), busy_rank(1, 20_000))
    for most in (50, 4000):
        assert svg_text(one, most).count("h") < most + 200
        assert "apart is drawn as one" in view_of(one, most).note
    view = view_of(of(*(busy_rank(rank, 3, 2.0 if rank == 37 else 1.0) for rank in range(64))))
    shown = [one.rank for one in view.ranks]
    assert len(shown) == MOST_RANKS
    assert {0, 37, 63} <= set(shown)
    assert view.note.startswith("8 of 64 ranks are drawn, the slowest among them.")


def test_the_axis_is_in_one_unit_with_few_ticks() -> None:
    for seconds, unit in ((5.0, "(s)"), (0.02, "(ms)"), (50e-6, "(us)")):
        words = texts(drawn(of(busy_rank(0, 3, seconds))))
        assert words[-1].endswith(unit)
        ticks = [float(word) for word in words if re.fullmatch(r"[\d.]+", word)]
        assert 3 <= len(ticks) <= 9
        assert ticks == sorted(ticks)


def test_hostile_names_are_text_and_a_step_without_intervals_is_drawn_empty() -> None:
    told = (Interval("comm <script>", "</svg><b>", 0.0, 10.0),)
    svg = drawn(of(RankTimeline(rank=0, start_us=0.0, stop_us=10.0, intervals=told)))
    assert not list(svg.iter("script"))
    assert "comm <script>" in texts(svg)
    for one in (of(), of(RankTimeline(rank=0, start_us=0.0, stop_us=0.0, intervals=()))):
        assert len(list(drawn(one).iter("title"))) == 1
