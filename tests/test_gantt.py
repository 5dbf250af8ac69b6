"""The Gantt chart: boxes where the actions were, on one axis, told apart by more than colour, small however many."""

import re
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import PathPatch, Rectangle
from reports_fixtures import make_plan, make_run, pipeline_idle, pipeline_record, pipeline_timeline

from reports.parallel.gantt import Box, Detail, boxes_of, detail_of, draw_gantt, gantt_svg, gantt_words, idle_boxes
from reports.parallel.pipeline import Pipeline, pipelines
from reports.summary import summarize

Corners = tuple[float, float, float, float]


def pipeline(schedule: str = "1f1b", **details: Any) -> Pipeline:
    record = pipeline_record(schedule, **details)
    (found,) = pipelines(summarize(make_run(make_plan([record.case]), [record])).rows)
    return found


def drawn(one: Pipeline, detail: Detail | None = None) -> Figure:
    figure = draw_gantt(one, detail or detail_of(one))
    assert figure is not None
    return figure


def patches(axes: Axes) -> list[tuple[Any, list[Corners]]]:
    """Return each path's colour with the left, right, low and high of its boxes."""
    found: list[tuple[Any, list[Corners]]] = []
    for patch in axes.patches:
        assert isinstance(patch, PathPatch)
        corners = np.asarray(patch.get_path().vertices).reshape(-1, 5, 2)
        boxes = [(float(box[0, 0]), float(box[1, 0]), float(box[0, 1]), float(box[2, 1])) for box in corners]
        found.append((patch.get_facecolor(), boxes))
    return found


def spans(axes: Axes, rank: int) -> list[tuple[float, float]]:
    """Return where a rank's boxes of all kinds begin and end, in ms, in order."""
    every = [box for _, boxes in patches(axes) for box in boxes]
    return sorted((left, right) for left, right, low, high in every if round((low + high) / 2) == rank)


def legend_of(figure: Figure) -> Legend:
    (legend,) = figure.legends
    return legend


def legend_words(figure: Figure) -> list[str]:
    return [text.get_text() for text in legend_of(figure).get_texts()]


DETAIL = Detail(gap=0.0, mixed=False, numbered=True, note="")
TINY: dict[str, Any] = {
    "microbatches": 1,
    "predicted": [[["0F0", 0, 1000], ["0B0", 4000, 6000]], [["1F0", 1000, 2000], ["1B0", 2000, 4000]]],
    "measured": [[["0F0", 0, 1500], ["0B0", 5000, 8000]], [["1F0", 2000, 3000], ["1B0", 3000, 5000]]],
    "idle": [[0, 1500, 4500, "schedule"], [0, 4500, 5000, "p2p"], [1, 0, 2000, "imbalance"], [1, 5000, 8000, "rest"]],
}


def test_predicted_stands_above_measured_on_one_axis_of_ms() -> None:
    above, below = drawn(pipeline(**TINY)).axes
    assert [axes.get_title(loc="left") for axes in (above, below)] == ["predicted: 6.00 ms", "measured: 8.00 ms"]
    assert above.get_position().y0 > below.get_position().y1
    assert above.get_xlim() == below.get_xlim() == (0, 8.0)
    assert below.get_xlabel() == "time since the step's first action (ms)"
    assert below.xaxis.get_major_formatter()(2.0) == "2"


def test_each_action_is_a_box_where_it_ran() -> None:
    above, below = drawn(pipeline(**TINY)).axes
    assert spans(above, 0) == [(0, 1), (4, 6)]
    assert spans(above, 1) == [(1, 2), (2, 4)]
    assert spans(below, 0) == [(0, 1.5), (1.5, 4.5), (4.5, 5), (5, 8)]
    assert spans(below, 1) == [(0, 2), (2, 3), (3, 5), (5, 8)]


def test_ranks_are_rows_from_the_top() -> None:
    for axes in drawn(pipeline(**TINY)).axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
        low, high = axes.get_ylim()
        assert low > high


def test_kinds_and_causes_differ_in_colour_and_in_height() -> None:
    stages = [["0F0", 0, 10], ["0I0", 10, 20], ["0W0", 20, 30], ["0B1", 30, 40]]
    idle = [[1, 10 * i, 10 * i + 10, cause] for i, cause in enumerate(("schedule", "imbalance", "p2p", "rest"))]
    (axes,) = drawn(pipeline(measured=[stages, []], predicted=None, idle=idle)).axes
    told = patches(axes)
    assert len(told) == 8
    assert len({color for color, _ in told}) == 8
    assert len({round(high - low, 3) for _, boxes in told for _, _, low, high in boxes if high < 1}) == 4
    assert {round(high - low, 3) for _, boxes in told for _, _, low, high in boxes if high > 1} == {0.9, 0.6, 0.4, 0.2}


def test_the_legend_names_what_is_drawn_and_shows_its_height() -> None:
    figure = drawn(pipeline(**TINY))
    assert legend_words(figure) == [
        *("F: forward", "B: backward"),
        *("idle: schedule", "idle: imbalance", "idle: p2p", "idle: rest"),
    ]
    figure.draw_without_rendering()
    shown = [patch.get_height() for patch in legend_of(figure).findobj(Rectangle) if patch.get_height() < 20]
    assert len(set(shown)) == 5  # a forward is as high as what the schedule leaves idle
    zero = drawn(pipeline("zb"))
    assert legend_words(zero)[:3] == ["F: forward", "I: input gradient", "W: weight gradient"]


def test_a_legends_kind_has_the_colour_of_its_boxes() -> None:
    figure = drawn(pipeline(**TINY))
    figure.draw_without_rendering()
    above, _ = figure.axes
    handles = [handle for handle in legend_of(figure).legend_handles if isinstance(handle, Rectangle)]
    assert {handle.get_facecolor() for handle in handles[:2]} == {color for color, _ in patches(above)}


def test_later_chunks_are_paler_and_the_legend_says_so() -> None:
    timeline = [[["0F0", 0, 10], ["2F0", 10, 20]], [["1F0", 10, 20], ["3F0", 20, 30]]]
    one = pipeline(stages_by_rank=[[0, 2], [1, 3]], chunks=2, measured=timeline, predicted=timeline, idle=None)
    figure = drawn(one)
    (first, _), (second, _) = patches(figure.axes[0])
    assert first[:3] == second[:3]
    assert first[3] > second[3]
    assert legend_words(figure) == ["F: forward", "paler: later of 2 chunks"]


def test_a_box_with_room_bears_its_kind_and_microbatch() -> None:
    texts = [text.get_text() for text in drawn(pipeline(**TINY)).axes[0].texts]
    assert texts == ["F0", "B0", "F0", "B0"]
    crowded = [[["0F7", 0, 10], ["0F8", 10, 1000]], []]
    (axes,) = drawn(pipeline(measured=crowded, predicted=None, idle=None)).axes
    assert [text.get_text() for text in axes.texts] == ["7", "F8"]
    narrow = [[["0F7", 0, 1], ["0F8", 10, 1000]], []]
    (axes,) = drawn(pipeline(measured=narrow, predicted=None, idle=None)).axes
    assert [text.get_text() for text in axes.texts] == ["F8"]


@pytest.mark.parametrize("microbatches", [14, 20])
def test_what_is_written_is_no_wider_than_its_box(microbatches: int) -> None:
    one = pipeline("zb", microbatches=microbatches, idle=None)
    axes, _ = (figure := drawn(one, DETAIL)).axes
    figure.draw_without_rendering()
    boxes = {((box.start + box.stop) / 2e3, float(box.rank)): box for box in boxes_of(one, one.predicted or (), DETAIL)}
    assert len(axes.texts) > 3 * microbatches
    for text in axes.texts:
        box = boxes[text.get_position()]
        (left, _), (right, _) = axes.transData.transform([(box.start / 1e3, box.rank), (box.stop / 1e3, box.rank)])
        extent = text.get_window_extent()
        assert left <= extent.x0
        assert extent.x1 <= right


def test_a_number_stands_in_the_middle_of_its_box() -> None:
    text = drawn(pipeline(**TINY)).axes[0].texts[1]
    assert text.get_position() == (5.0, 0)


def test_without_a_prediction_the_measured_one_stands_alone() -> None:
    one = pipeline(predicted=None)
    (axes,) = drawn(one).axes
    assert axes.get_title(loc="left").startswith("measured")
    assert gantt_words(one, detail_of(one)) == "What launch 1 measured, each gap in the colour of its cause."


def test_without_a_measured_timeline_there_is_no_chart() -> None:
    one = pipeline(measured=None)
    assert draw_gantt(one, detail_of(one)) is None
    assert gantt_svg(one, detail_of(one), name="g", title="t") == ""


def test_the_caption_says_what_is_above_and_below() -> None:
    one = pipeline()
    assert gantt_words(one, detail_of(one)) == (
        "Above, the schedule simulated with this step's mean time of each kind and no latency; below, what launch 1 "
        "measured, each gap in the colour of its cause."
    )
    without = pipeline(idle=None)
    assert gantt_words(without, detail_of(without)).endswith("below, what launch 1 measured.")


# --- as text ---


def svg_of(one: Pipeline, detail: Detail | None = None) -> str:
    return gantt_svg(one, detail or detail_of(one), name="g", title="a pipeline")


def test_the_same_timeline_is_the_same_bytes() -> None:
    assert svg_of(pipeline("zb")) == svg_of(pipeline("zb"))
    assert svg_of(pipeline("zb")) != svg_of(pipeline("1f1b"))


def test_it_is_described_and_in_the_pages_colours() -> None:
    svg = svg_of(pipeline())
    assert svg.startswith("<svg ")
    assert '<title id="g-title">a pipeline</title>' in svg
    assert "below, what launch 1 measured" in svg
    assert "The table beside it holds the sums." in svg
    assert "var(--series-0)" in svg
    assert not re.findall(r"fill: #", svg)
    assert set(re.findall(r' id="([^"]*)"', svg)) == set(re.findall(r' id="(g-[^"]*)"', svg))


def test_paths_are_no_finer_than_a_hundredth_of_a_point() -> None:
    paths = re.findall(r' d="([^"]*)"', svg_of(pipeline()))
    assert paths
    assert not [path for path in paths if re.search(r"\.\d{3}", path)]
    numbers = {number for path in paths for number in re.findall(r"\d+\.\d+", path)}
    assert len(numbers) > 20


# --- many actions ---


def crowd(schedule: str = "1f1b", ranks: int = 16, microbatches: int = 64) -> Pipeline:
    return pipeline(schedule, ranks=ranks, microbatches=microbatches)


def count(one: Pipeline, detail: Detail) -> int:
    assert one.predicted is not None
    assert one.measured is not None
    drawn_boxes = [*boxes_of(one, one.predicted, detail), *boxes_of(one, one.measured, detail)]
    return len(drawn_boxes) + len(idle_boxes(one, detail))


def test_few_actions_are_all_drawn_and_numbered() -> None:
    one = pipeline()
    assert detail_of(one) == Detail(gap=0.0, mixed=False, numbered=True, note="")
    assert count(one, detail_of(one)) == 2 * 16 + sum(map(len, one.idle or ()))


def test_more_actions_lose_their_numbers_and_it_is_said() -> None:
    one = crowd(ranks=4, microbatches=64)
    detail = detail_of(one)
    assert (detail.gap, detail.numbered) == (0.0, False)
    assert gantt_words(one, detail).endswith("Numbers of microbatches are left out of 1024 actions.")
    assert not drawn(one, detail).axes[0].texts


def test_too_many_actions_are_joined_by_kind_and_then_with_any_and_it_is_said() -> None:
    by_kind = crowd("gpipe")
    detail = detail_of(by_kind, 1000)
    assert (detail.mixed, detail.numbered) == (False, False)
    assert "Of 4096 actions, neighbours of one kind less than " in gantt_words(by_kind, detail)
    assert {box.kind for box in boxes_of(by_kind, by_kind.measured or (), detail)} == {"F", "B"}
    mixed = crowd("1f1b")
    detail = detail_of(mixed, 1000)
    assert detail.mixed
    assert "neighbours of any kind less than " in gantt_words(mixed, detail)
    assert "shorter idle times not at all" in gantt_words(mixed, detail)
    assert legend_words(drawn(mixed, detail))[0] == "any action"


@pytest.mark.parametrize("most", [60, 300, 1000, 5000])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
def test_no_chart_has_more_boxes_than_it_may(schedule: str, most: int) -> None:
    one = crowd(schedule, ranks=8, microbatches=48)
    detail = detail_of(one, most)
    assert count(one, detail) <= most
    assert (detail.gap == 0.0) == (2 * sum(map(len, one.measured or ())) + sum(map(len, one.idle or ())) <= most)


def test_joining_hides_no_gap_that_is_wide_enough() -> None:
    timeline = [[["0F0", 0, 100], ["0F1", 109, 200], ["0F2", 210, 300], ["0B0", 305, 400]], []]
    one = pipeline(measured=timeline, predicted=None, idle=None)
    assert one.measured is not None
    detail = Detail(gap=10.0, mixed=False, numbered=False, note="")
    joined = boxes_of(one, one.measured, detail)
    assert [(box.kind, box.start, box.stop) for box in joined] == [("F", 0, 200), ("F", 210, 300), ("B", 305, 400)]
    assert [box.text for box in joined] == ["", "F2", "B0"]
    mixed = Detail(gap=10.0, mixed=True, numbered=False, note="")
    assert [(box.kind, box.start, box.stop) for box in boxes_of(one, one.measured, mixed)] == [
        ("any", 0, 200),
        ("any", 210, 400),
    ]


def test_chunks_are_not_joined_with_one_another() -> None:
    timeline = [[["0F0", 0, 100], ["2F0", 100, 200], ["2F1", 200, 300]], []]
    one = pipeline(stages_by_rank=[[0, 2], [1, 3]], chunks=2, measured=timeline, predicted=None, idle=None)
    joined = boxes_of(one, one.measured or (), Detail(gap=10.0, mixed=False, numbered=False, note=""))
    assert [(box.chunk, box.start, box.stop) for box in joined] == [(0, 0, 100), (1, 100, 300)]


def test_short_idle_times_are_left_out_with_detail() -> None:
    one = pipeline(idle=[[0, 0, 9, "rest"], [1, 0, 11, "p2p"]])
    boxes = idle_boxes(one, Detail(gap=10.0, mixed=True, numbered=False, note=""))
    assert boxes == (Box(rank=1, kind="p2p", chunk=0, start=0, stop=11),)


def test_a_huge_chart_stays_small_and_names_a_few_ranks() -> None:
    orders = [[f"{rank}F{i}" for i in range(500)] + [f"{rank}B{i}" for i in range(500)] for rank in range(64)]
    measured = pipeline_timeline(orders, delay=100)
    one = pipeline(
        ranks=64,
        stages_by_rank=[[rank] for rank in range(64)],
        measured=measured,
        predicted=pipeline_timeline(orders),
        idle=pipeline_idle(measured),
    )
    svg = svg_of(one)
    assert len(svg) < 400_000
    assert "Of 128000 actions" in svg
    assert re.findall(r">(rank \d+)<", svg) == [f"rank {rank}" for rank in range(0, 64, 4)] * 2
    (width, height) = [float(number) for number in re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0]]
    assert height < 1.2 * width
