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
    categories = list(row)
    covered = [_cover(row[category], edges) for category in categories]
    empty = np.diff(edges) - sum(covered)
    winners = np.array([*covered, empty]).argmax(axis=0)
    changes = np.flatnonzero(np.diff(winners)) + 1
    firsts = [0, *changes.tolist()]
    lasts = [*changes.tolist(), num_bins]
    merged: dict[K, list[tuple[float, float]]] = {category: [] for category in categories}
    for first, last in zip(firsts, lasts, strict=True):
        if winners[first] < len(categories):
            merged[categories[winners[first]]].append((float(edges[first]), float(edges[last])))
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
