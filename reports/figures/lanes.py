"""Lanes of spans over time, such as the streams of a rank.

Spans that are too many to draw are merged: each bin of time has the category that fills most of it.
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
"""The starts and stops of spans in seconds, keyed by category. Spans do not overlap."""

MAX_BINS = 1600
_MIN_BINS = 16
_MAX_EXACT_SPANS = 400
_MIN_VISIBLE_SHARE = 1 / 2500
"""The smallest width of a box, as a share of the time axis."""


class Lane(NamedTuple):
    """A row of a figure: its label, its middle on the y axis, and its spans keyed by category."""

    label: str
    middle: float
    spans: SpansByCategory[str]


class Look(NamedTuple):
    """The look of the spans of a category: their name, color and height."""

    name: str
    fill: Mapping[str, Any]
    height: float = 0.8


def draw_lanes(
    axes: "Axes",
    lanes: Sequence[Lane],
    looks: Mapping[str, Look],
    seconds: float,
    num_bins: int | None,
) -> None:
    """Draw lanes from zero to ``seconds``, with their labels at the left."""
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
    """Return a sentence about the bins, empty if every span is drawn."""
    if num_bins is None:
        return ""
    return f" Each {format_seconds(seconds / num_bins)} has the color of its longest part."


def choose_num_bins(
    lanes: Sequence[SpansByCategory[K]], seconds: float, max_boxes: int
) -> int | None:
    """Return the finest number of bins with at most ``max_boxes`` boxes, None to draw every span.

    Every span is drawn if each lane has few spans, and all lanes together are within the limit.
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
    """Return spans that consist of full bins, or the spans themselves if ``num_bins`` is None."""
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
    """Return the seconds that the spans cover in each bin."""
    if not spans:
        return np.zeros(len(edges) - 1)
    starts, stops = np.array(sorted(spans), dtype=float).T
    times = np.ravel((starts, stops), order="F")
    totals = np.concatenate([[0.0], np.cumsum(stops - starts)])
    busy = np.ravel((totals[:-1], totals[1:]), order="F")
    return np.diff(np.interp(edges, times, busy))
