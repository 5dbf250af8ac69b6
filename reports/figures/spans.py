"""Merging of spans that are too many to draw: each bin of time has the category that fills most."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K")
Times = Sequence[tuple[float, float]]
SpanRow = Mapping[K, Times]
"""The spans of each category, which do not overlap."""

MAX_BINS = 1600
_MIN_BINS = 16
_MAX_EXACT_SPANS = 400


def choose_num_bins(
    rows: Sequence[SpanRow[K]], start: float, stop: float, max_boxes: int
) -> int | None:
    """Return the finest number of bins with at most ``max_boxes`` boxes; None to draw every span.

    Every span is drawn if each row has few, and all rows together are within the limit.
    """
    counts = [sum(map(len, row.values())) for row in rows]
    if max(counts, default=0) <= _MAX_EXACT_SPANS and sum(counts) <= max_boxes:
        return None
    num_bins = MAX_BINS
    while num_bins > _MIN_BINS:
        merged = [merge_spans(row, start, stop, num_bins) for row in rows]
        if sum(len(spans) for row in merged for spans in row.values()) <= max_boxes:
            break
        num_bins //= 2
    return num_bins


def merge_spans(
    row: SpanRow[K], start: float, stop: float, num_bins: int | None
) -> dict[K, list[tuple[float, float]]]:
    """Return spans that consist of whole bins, or the spans themselves without a number of bins."""
    if num_bins is None:
        return {category: list(spans) for category, spans in row.items()}
    edges = np.linspace(start, stop, num_bins + 1)
    covered = [_cover(spans, edges) for spans in row.values()]
    empty = np.diff(edges) - sum(covered)
    winners = np.array([*covered, empty]).argmax(axis=0)
    merged = {}
    for index, category in enumerate(row):
        # The edges at which the bins of this category begin and end, in turn.
        is_edge = np.diff(winners == index, prepend=False, append=False)
        borders = edges[is_edge].tolist()
        merged[category] = list(zip(borders[::2], borders[1::2], strict=True))
    return merged


def _cover(spans: Times, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the length that the spans cover of each bin."""
    if not spans:
        return np.zeros(len(edges) - 1)
    starts, stops = np.array(sorted(spans), dtype=float).T
    times = np.ravel((starts, stops), order="F")
    totals = np.concatenate([[0.0], np.cumsum(stops - starts)])
    busy = np.ravel((totals[:-1], totals[1:]), order="F")
    return np.diff(np.interp(edges, times, busy))
