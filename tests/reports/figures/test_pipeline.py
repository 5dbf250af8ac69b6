"""The chart of a pipeline: a box for each action, simulated above measured."""

from typing import Any

from parbench.bench.results.details import PipelineDetails, read_details
from parbench.reports.figures.pipeline import chart_pipeline
from tests.support.reports.figure_parts import find_boxes, find_texts
from tests.support.reports.reports_fixtures import pipeline_record

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


def test_actions_are_boxes_simulated_above_measured() -> None:
    details = read_details(pipeline_record(**TWO_RANKS), PipelineDetails)
    assert isinstance(details, PipelineDetails)
    figure = chart_pipeline("pipeline", "1f1b", "", details).draw()
    assert {"simulated: 6.00 ms", "measured: 8.00 ms", "rank 0", "F0"} <= set(
        find_texts(figure)
    )
    simulated, measured = (find_boxes(axes) for axes in figure.axes)
    assert simulated["F: forward: 1.00 ms"] == [(0.0, 0.001), (0.001, 0.002)]
    assert simulated["B: backward: 2.00 ms"] == [(0.004, 0.006), (0.002, 0.004)]
    assert measured["F: forward: 1.50 ms"] == [(0.0, 0.0015)]
    assert measured["F: forward: 1.00 ms"] == [(0.002, 0.003)]
