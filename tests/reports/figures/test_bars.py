"""Bars of step times, of their parts and of memory, and memory over time."""

from itertools import pairwise

import pytest

from parbench.reports.figures.bars import (
    draw_breakdown,
    draw_steps,
)
from parbench.reports.figures.svg import HATCHED
from tests.support.figure_parts import parse_drawing
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import ok_record, step_case, training_metrics

AXIS_START = 10.0
LENGTH = 490.0


def test_steps_show_repetitions_and_their_mean() -> None:
    times = [0.010, 0.011, 0.013]
    records = [ok_record(step_case("ddp"), i, seconds) for i, seconds in enumerate(times)]
    records.append(ok_record(step_case("fsdp"), 0, 0.02))
    parts = parse_drawing(draw_steps(summarize_rows(*records, repetitions=3)))
    scale = 0.02 * 1.1 * 1.02 / LENGTH  # the axis ends 2 % after the longest interval
    repetitions = [scale * (box.center_x - AXIS_START) for box in parts.boxes]
    assert repetitions == pytest.approx(times, abs=1e-5)
    diamonds = [path for path in parts.paths if "l5 -5" in path.d]
    means = [scale * (diamond.points[0][0] + 5 - AXIS_START) for diamond in diamonds]
    assert means == pytest.approx([0.011267, 0.02], abs=1e-5)
    assert parts.texts[:2] == ["ddp", "fsdp"]


def test_breakdown_stacks_parts_of_a_step() -> None:
    metrics = training_metrics(1.0, ("dp", "tp"))
    record = ok_record(step_case(), metrics=metrics)
    boxes = parse_drawing(draw_breakdown(summarize_rows(record))).titled_boxes
    names = [box.title.partition(":")[0] for box in boxes]
    assert names == ["compute", "exposed dp", "exposed tp", "copy", "idle"]
    assert boxes[0].title == "compute: 600 ms, 61 %"
    widths = [0.98 * box.width / LENGTH for box in boxes]
    assert widths == pytest.approx([0.6, 0.15, 0.15, 0.02, 0.06], abs=1e-3)
    for box, next_box in pairwise(boxes):
        assert box.x + box.width == pytest.approx(next_box.x, abs=0.2)
    hatched = [HATCHED in box.style for box in boxes]
    assert hatched == [False, True, True, False, False]
