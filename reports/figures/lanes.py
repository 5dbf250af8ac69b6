"""Rows of time spans, such as the streams of a rank, for Gantt charts.

A row is called a lane. In a lane with many spans, time is divided into bins, and each bin gets the
color of the category that fills most of it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.formatting import format_seconds
from parbench.reports.figures.primitives import draw_boxes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Times = Sequence[tuple[float, float]]
SpansByCategory = Mapping[str, Times]
"""The (start, end) of spans of one row in seconds, keyed by category, such as ``compute``.

All spans of a category have one color. No spans of a row overlap.
"""

NUM_BINS = 250
"""The number of bins of the time axis, and the largest number of spans that are drawn exactly."""
_MIN_VISIBLE_SHARE = 1 / 2500
"""The smallest width of a box, as a share of the time axis."""


class Lane(NamedTuple):
    """A row of a Gantt chart, such as the compute stream of a rank."""

    label: str
    """The text at the left of the row, which may be empty."""
    middle: float
    """The middle of the row on the y axis."""
    spans: SpansByCategory
    """The (start, end) spans of the row in seconds, keyed by category."""


def draw_lanes(
    axes: "Axes",
    lanes: Sequence[Lane],
    looks: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> None:
    """Draw rows of colored spans on a time axis from zero to ``seconds``, with labels at the left.

    ``looks`` has the arguments of a matplotlib patch for each category of spans, keyed by category.
    Categories whose arguments contain a ``label`` are in the legend of the figure.
    """
    for lane in lanes:
        for category, spans in merge_spans(lane.spans, seconds).items():
            look = looks[category]
            boxes = []
            for start, stop in spans:
                visible_stop = max(stop, start + seconds * _MIN_VISIBLE_SHARE)
                boxes.append((start, visible_stop, lane.middle))
            total = sum(stop - start for start, stop in lane.spans[category])
            description = f"{look.get('label', category)}: {format_seconds(total)}"
            draw_boxes(axes, boxes, 0.8, look, description)
    axes.set_yticks([lane.middle for lane in lanes], [lane.label for lane in lanes])


def merge_spans(spans: SpansByCategory, seconds: float) -> SpansByCategory:
    """Return the spans of one row of a Gantt chart, merged if they are more than ``NUM_BINS``.

    To merge them, the time axis from 0 to ``seconds`` is divided into ``NUM_BINS`` equal bins. Each
    bin gets the category that covers most of the bin, or none if most is empty. Successive bins of
    one category become one span.
    """
    if sum(map(len, spans.values())) <= NUM_BINS:
        return spans
    edges = np.linspace(0.0, seconds, NUM_BINS + 1)
    covered = [_compute_coverage(times, edges) for times in spans.values()]
    empty = np.diff(edges) - sum(covered)
    winners = np.array([*covered, empty]).argmax(axis=0)
    merged = {}
    for index, category in enumerate(spans):
        # The bins of a category begin and end at its borders in turn.
        is_border = np.diff(winners == index, prepend=False, append=False)
        borders = edges[is_border].tolist()
        merged[category] = list(zip(borders[::2], borders[1::2], strict=True))
    return merged


def _compute_coverage(spans: Times, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds that ``spans`` cover in each time bin, as an array with one value per bin.

    ``edges`` are the borders of the bins in seconds, one more than bins.
    """
    if not spans:
        return np.zeros(len(edges) - 1)
    times = np.ravel(sorted(spans))
    durations = np.diff(times)
    durations[1::2] = 0.0  # the gaps between spans
    busy = np.concatenate([[0.0], np.cumsum(durations)])
    return np.diff(np.interp(edges, times, busy))
