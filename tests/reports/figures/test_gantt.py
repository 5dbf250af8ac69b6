"""The Gantt chart of a pipeline: a box for each action, few boxes for many actions."""

from collections import defaultdict
from typing import Any

import pytest

from parbench.reports.analysis.pipelines import Pipeline, read_pipeline
from parbench.reports.figures.gantt import (
    boxes_of,
    detail_of,
    draw_pipeline,
    span_of,
)
from tests.support.figure_parts import parse_drawing
from tests.support.report_rows import summarize_row
from tests.support.reports_fixtures import pipeline_record

AXIS_START = 66.0
WIDTH = 918.0
LEGEND_HEIGHT = 50.0
TWO_RANKS: dict[str, Any] = {
    "microbatches": 1,
    "predicted": [
        [["0F0", 0, 1000], ["0B0", 4000, 6000]],
        [["1F0", 1000, 2000], ["1B0", 2000, 4000]],
    ],
    "measured": [
        [["0F0", 0, 1500], ["0B0", 5000, 8000]],
        [["1F0", 2000, 3000], ["1B0", 3000, 5000]],
    ],
}


def make_pipeline(schedule: str = "1f1b", **details: Any) -> Pipeline:
    pipeline = read_pipeline(summarize_row(pipeline_record(schedule, **details)))
    assert isinstance(pipeline, Pipeline)
    return pipeline


def test_actions_are_boxes_simulated_above_measured() -> None:
    pipeline = make_pipeline(**TWO_RANKS)
    parts = parse_drawing(draw_pipeline(pipeline, detail_of(pipeline), span_of(pipeline)))
    assert {"simulated: 6.00 ms", "measured: 8.00 ms", "rank 0", "F0"} <= set(parts.texts)
    rows = defaultdict(set)
    for box in parts.boxes:
        if box.x >= AXIS_START and box.y >= LEGEND_HEIGHT:
            start = 8 * (box.x - AXIS_START) / WIDTH
            stop = start + 8 * box.width / WIDTH
            rows[round(box.center_y)].add((round(start, 1), round(stop, 1)))
    simulated_0, simulated_1, measured_0, measured_1 = (rows[y] for y in sorted(rows))
    assert simulated_0 == {(0, 1), (4, 6)}
    assert simulated_1 == {(1, 2), (2, 4)}
    assert measured_0 == {(0, 1.5), (5, 8)}
    assert measured_1 == {(2, 3), (3, 5)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("limit", [2000, 300, 50])
def test_detail_limits_the_number_of_boxes(schedule: str, limit: int) -> None:
    pipeline = make_pipeline(schedule, ranks=4, microbatches=24)
    detail = detail_of(pipeline, limit)
    assert (detail.gap > 0) == (limit < 2000)
    count = 0
    for timeline in (pipeline.facts.predicted, pipeline.facts.measured):
        assert timeline is not None
        count += len(boxes_of(pipeline, timeline, detail))
    assert count <= limit
