"""Figures of profiled steps over time: the streams of each rank, and where communication is hidden."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline, Timeline
from parbench.bench.results.spans import Span, difference, gaps, intersection, length, union
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.primitives import (
    Box,
    add_patch_legend,
    draw_boxes,
    look_of_part,
    write_between,
)
from parbench.reports.figures.quantities import set_x_axis
from parbench.reports.figures.spans import choose_num_bins, merge_spans
from parbench.reports.figures.style import color, new_figure
from parbench.reports.timelines import group_by_stream, name_stream, to_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RANKS = 8
_LANE_INCHES = 0.14
_LANE_HEIGHT = 0.8
_GAP_BETWEEN_RANKS = 0.4
_MAX_DISTINCT_BOXES = 2500
"""A box is at least that fraction of the time axis wide, so that it is visible."""
_PART_NAMES = {
    "compute": "compute",
    "exposed": "exposed communication",
    "hidden": "hidden communication",
    "copy": "copy",
    "idle": "idle",
}
_TIME = replace(quantities.TIME_SINCE_START, title="time since the first rank began")
Parts = dict[str, list[Span]]
"""The spans of each part of a step, in nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The ranks of a timeline that are drawn, and the number of bins of each of their streams.

    ``num_bins`` is None if every span is drawn. ``start`` and ``stop`` are nanoseconds.
    """

    ranks: Sequence[RankTimeline]
    start: float
    stop: float
    num_bins: int | None
    note: str

    def to_seconds(self, nanoseconds: float) -> float:
        """Return the time since the first rank began."""
        return (nanoseconds - self.start) / 1e9


def chart_timeline(
    name: str,
    title: str,
    caption: str,
    timeline: Timeline,
    *,
    max_boxes: int = 4000,
    is_wide: bool = True,
) -> Chart:
    """Return a lane for each stream of each rank; the caption goes on with what is drawn."""
    view = choose_view(timeline, max_boxes)
    clock = f"{timeline.clock}, +/- {format_seconds(timeline.uncertainty_seconds)}"
    duration = format_seconds(view.to_seconds(view.stop))
    description = f"{caption} Duration {duration} on one clock ({clock}). {view.note}"
    return Chart(
        name=name,
        title=title,
        caption=description.strip(),
        draw=partial(_draw_timeline, view, is_wide),
        is_wide=is_wide,
    )


def choose_view(timeline: Timeline, max_boxes: int = 4000) -> View:
    """Return the finest view with at most ``max_boxes``, of at most ``MAX_RANKS`` ranks."""
    start = min((rank.start_us for rank in timeline.ranks), default=0.0) * 1e3
    stop = max((rank.stop_us for rank in timeline.ranks), default=0.0) * 1e3
    stop = max(stop, start + 1)
    ranks = _choose_ranks(timeline.ranks)
    streams = [parts for rank in ranks for parts in split_streams(rank).values()]
    num_bins = choose_num_bins(streams, start, stop, max_boxes)
    notes = []
    if len(ranks) < len(timeline.ranks):
        count = f"{len(ranks)} of {len(timeline.ranks)} ranks"
        notes.append(f"{count} are drawn, among them the slowest.")
    if num_bins:
        bin_width = format_seconds((stop - start) / 1e9 / num_bins)
        notes.append(f"Each {bin_width} has the color of its longest part.")
    return View(ranks=ranks, start=start, stop=stop, num_bins=num_bins, note=" ".join(notes))


def _choose_ranks(ranks: Sequence[RankTimeline]) -> Sequence[RankTimeline]:
    """Return evenly spaced ranks and the slowest one, if there are too many for all."""
    if len(ranks) <= MAX_RANKS:
        return ranks
    slowest = max(range(len(ranks)), key=lambda i: ranks[i].stop_us - ranks[i].start_us)
    others = [i * (len(ranks) - 1) // (MAX_RANKS - 2) for i in range(MAX_RANKS - 1)]
    return [ranks[i] for i in sorted({*others, slowest})]


def split_streams(rank: RankTimeline) -> dict[str, Parts]:
    """Return the parts of each stream: communication is hidden or exposed, compute has idle time.

    Phases have no parts, because they are drawn with their names.
    """
    spans = {name: to_spans(intervals) for name, intervals in group_by_stream(rank).items()}
    phases = spans.pop(PHASE, None)
    busy = [*spans.get(COMPUTE, []), *spans.get(COPY, [])]
    streams: dict[str, Parts] = {} if phases is None else {PHASE: {}}
    for name, stream in spans.items():
        if name == COMPUTE:
            [step] = to_spans([rank])
            work = [span for other in spans.values() for span in other]
            streams[name] = {"compute": union(stream), "idle": gaps(work, step)}
        elif name == COPY:
            streams[name] = {"copy": union(stream)}
        else:
            hidden = intersection(stream, busy)
            streams[name] = {"hidden": hidden, "exposed": difference(stream, busy)}
    return streams


def _draw_timeline(view: View, is_wide: bool) -> "Figure":
    streams = [(rank, split_streams(rank)) for rank in view.ranks]
    num_lanes = sum(len(lanes) + _GAP_BETWEEN_RANKS for _, lanes in streams)
    figure, [axes] = new_figure(0.35 + _LANE_INCHES * num_lanes, is_wide=is_wide)
    set_x_axis(axes, _TIME, 0.0, view.to_seconds(view.stop))
    names: dict[float, str] = {}
    top = 0.0
    for rank, lanes in streams:
        axes.axhline(top, color=color("faint"), linewidth=0.5)
        prefix = f"rank {rank.rank}  "
        for lane, (stream, parts) in enumerate(lanes.items()):
            middle = top + 0.7 + lane
            names[middle] = prefix + name_stream(stream)
            prefix = ""
            if stream == PHASE:
                _draw_phases(axes, rank, view, middle)
            _draw_parts(axes, parts, view, middle)
        top += len(lanes) + _GAP_BETWEEN_RANKS
    axes.set_ylim(max(top, 1.0), 0.0)
    axes.set_yticks(list(names), list(names.values()))
    all_parts = [parts for _, lanes in streams for parts in lanes.values()]
    _add_legend(figure, all_parts, columns=5 if is_wide else 2)
    return figure


def _draw_parts(axes: "Axes", parts: Parts, view: View, middle: float) -> None:
    min_width = view.to_seconds(view.stop) / _MAX_DISTINCT_BOXES
    for part, spans in merge_spans(parts, view.start, view.stop, view.num_bins).items():
        boxes = []
        for start, stop in spans:
            left = view.to_seconds(start)
            right = max(view.to_seconds(stop), left + min_width)
            boxes.append(Box(left, right, middle, _LANE_HEIGHT))
        description = f"{_PART_NAMES[part]}: {format_seconds(length(parts[part]) / 1e9)}"
        draw_boxes(axes, boxes, look_of_part(part, style.STEP[part]), description)


def _draw_phases(axes: "Axes", rank: RankTimeline, view: View, middle: float) -> None:
    for phase in group_by_stream(rank).get(PHASE, []):
        left = view.to_seconds(phase.start_us * 1e3)
        right = view.to_seconds(phase.stop_us * 1e3)
        description = f"{phase.name}: {format_seconds(right - left)}"
        box = Box(left, right, middle, _LANE_HEIGHT)
        draw_boxes(axes, [box], look_of_part("phase", "raised"), description)
        write_between(axes, left, right, middle, phase.name)


def _add_legend(figure: "Figure", all_parts: Sequence[Parts], columns: int) -> None:
    legend = {
        name: look_of_part(part, style.STEP[part])
        for part, name in _PART_NAMES.items()
        if any(parts.get(part) for parts in all_parts)
    }
    if legend:
        add_patch_legend(figure, legend, columns)
