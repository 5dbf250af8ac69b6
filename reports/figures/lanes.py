"""Rows of time spans, such as the streams of a rank, for Gantt charts.

A row is called a lane. If there are too many spans to draw, time is divided into bins, and each bin
gets the color of the category that fills most of it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.formatting import format_seconds
from parbench.reports.figures.primitives import Box, draw_boxes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

K = TypeVar("K")
Times = Sequence[tuple[float, float]]
SpansByCategory = Mapping[K, Times]
"""The starts and ends of spans in seconds, keyed by category. The spans do not overlap.

A category has one color, such as ``compute``.
"""

MAX_BINS = 1600
"""The largest number of bins of the time axis."""
_MIN_BINS = 16
_MAX_EXACT_SPANS = 400
_MIN_VISIBLE_SHARE = 1 / 2500
"""The smallest width of a box, as a share of the time axis."""


class Lane(NamedTuple):
    """A row of a Gantt chart, such as the compute stream of a rank."""

    label: str
    """The text at the left of the row, which may be empty."""
    middle: float
    """The middle of the row on the y axis."""
    spans: SpansByCategory[str]
    """The (start, end) spans of the row in seconds, keyed by category."""


class Look(NamedTuple):
    """The look of the spans of one category."""

    name: str
    """The name of the category in texts and legends."""
    fill: Mapping[str, Any]
    """The arguments of a matplotlib patch, such as ``facecolor``."""
    height: float = 0.8
    """The height of a span, of a row of height 1."""


def draw_lanes(
    axes: "Axes",
    lanes: Sequence[Lane],
    looks: Mapping[str, Look],
    seconds: float,
    num_bins: int | None,
) -> None:
    """Draw rows of colored spans on a time axis from zero to ``seconds``, with labels at the left.

    ``looks`` has the look of each category of spans, keyed by category. Later ones are drawn on
    top. ``num_bins`` is the number of time bins into which spans are merged, None to draw every
    span.
    """
    for lane in lanes:
        merged = merge_spans(lane.spans, seconds, num_bins)
        for category in sorted(merged, key=list(looks).index):
            look = looks[category]
            boxes = []
            for start, stop in merged[category]:
                visible_stop = max(stop, start + seconds * _MIN_VISIBLE_SHARE)
                boxes.append(Box(start, visible_stop, lane.middle, look.height))
            total = sum(stop - start for start, stop in lane.spans[category])
            draw_boxes(axes, boxes, look.fill, f"{look.name}: {format_seconds(total)}")
    axes.set_yticks([lane.middle for lane in lanes], [lane.label for lane in lanes])


def describe_bins(seconds: float, num_bins: int | None) -> str:
    """Return a sentence about the width of the time bins into which spans are merged.

    ``seconds`` is the length of the time axis. The sentence is empty if ``num_bins`` is None, which
    means that every span is drawn. It begins with a space, because it follows a caption.
    """
    if num_bins is None:
        return ""
    return f" Each {format_seconds(seconds / num_bins)} has the color of its longest part."


def choose_num_bins(
    lanes: Sequence[SpansByCategory[K]], seconds: float, max_boxes: int
) -> int | None:
    """Return the number of time bins into which a Gantt chart merges its spans.

    It is the first of 1600, 800, ... 12 that gives at most ``max_boxes`` boxes, otherwise 12.
    ``lanes`` has the spans of each row of the chart in seconds, and ``seconds`` is the length of
    the time axis. None means that every span is drawn: no row has over 400, and all together are
    within the limit.
    """
    counts = [sum(map(len, spans.values())) for spans in lanes]
    if max(counts, default=0) <= _MAX_EXACT_SPANS and sum(counts) <= max_boxes:
        return None
    num_bins = MAX_BINS
    while num_bins > _MIN_BINS:
        merged = [merge_spans(spans, seconds, num_bins) for spans in lanes]
        if sum(len(spans) for lane in merged for spans in lane.values()) <= max_boxes:
            break
        num_bins //= 2
    return num_bins


def merge_spans(
    spans: SpansByCategory[K], seconds: float, num_bins: int | None
) -> dict[K, list[tuple[float, float]]]:
    """Return the (start, end) spans of one row of a Gantt chart in seconds, keyed by category.

    The time axis is divided into ``num_bins`` equal bins. Each bin gets the category that covers
    most of it, or none. Successive bins of a category are merged into one span. If ``num_bins`` is
    None, the spans are returned unchanged. ``seconds`` is the length of the time axis.
    """
    if num_bins is None:
        return {category: list(times) for category, times in spans.items()}
    edges = np.linspace(0.0, seconds, num_bins + 1)
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
    """Return the seconds that spans cover in each time bin.

    ``edges`` are the borders of the bins in seconds.
    """
    if not spans:
        return np.zeros(len(edges) - 1)
    starts, stops = np.array(sorted(spans), dtype=float).T
    times = np.ravel((starts, stops), order="F")
    totals = np.concatenate([[0.0], np.cumsum(stops - starts)])
    busy = np.ravel((totals[:-1], totals[1:]), order="F")
    return np.diff(np.interp(edges, times, busy))
