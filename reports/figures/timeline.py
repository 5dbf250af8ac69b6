"""Gantt charts of profiled steps: the streams of each rank, with hidden communication."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline, Timeline
from parbench.bench.results.spans import Span, difference, gaps, intersection, union
from parbench.reports.analysis.timelines import convert_to_spans, group_by_stream, name_stream
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lanes import (
    Lane,
    Look,
    choose_num_bins,
    describe_bins,
    draw_lanes,
)
from parbench.reports.figures.primitives import add_patch_legend, look_of_part, write_between
from parbench.reports.figures.quantities import set_x_axis
from parbench.reports.figures.style import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RANKS = 8
"""The largest number of ranks in a chart."""
_LANE_INCHES = 0.14
_GAP_BETWEEN_RANKS = 0.4
_PART_NAMES = {
    "compute": "compute",
    "exposed": "exposed communication",
    "hidden": "hidden communication",
    "copy": "copy",
    "idle": "idle",
}
_TIME = replace(quantities.TIME_SINCE_START, title="time since the first rank began")


def chart_timeline(
    name: str,
    title: str,
    caption: str,
    timeline: Timeline,
    *,
    max_boxes: int = 4000,
    is_wide: bool = True,
) -> Chart:
    """Return a Gantt chart of a profiled step with a row for each stream of each rank.

    A stream is compute, copies, phases, or the communication of one mesh axis. ``caption`` is
    followed by sentences on the clock and on ranks that are left out. Above ``max_boxes`` boxes,
    neighboring spans are merged for drawing.
    """
    start_us = min((rank.start_us for rank in timeline.ranks), default=0.0)
    stop_us = max((rank.stop_us for rank in timeline.ranks), default=0.0)
    seconds = max(stop_us - start_us, 1e-3) / 1e6
    ranks = choose_ranks(timeline.ranks)
    lanes = make_lanes(ranks, start_us)
    num_bins = choose_num_bins([lane.spans for lane in lanes], seconds, max_boxes)
    uncertainty = format_seconds(timeline.uncertainty_seconds)
    caption += f" {format_seconds(seconds)} on one clock ({timeline.clock}, +/- {uncertainty})."
    if len(ranks) < len(timeline.ranks):
        caption += f" {len(ranks)} of {len(timeline.ranks)} ranks, among them the slowest."

    def draw() -> "Figure":
        """Draw the lanes, the names of phases, and the legend."""
        bottom = lanes[-1].middle + 0.7 if lanes else 1.0
        figure, [axes] = new_figure(0.35 + _LANE_INCHES * bottom, is_wide=is_wide)
        set_x_axis(axes, _TIME, 0.0, seconds)
        looks = _list_looks(lanes)
        draw_lanes(axes, lanes, looks, seconds, num_bins)
        axes.set_ylim(bottom, 0.0)
        drawn_parts = set()
        for lane in lanes:
            for part, spans in lane.spans.items():
                if part not in _PART_NAMES:
                    for start, stop in spans:
                        write_between(axes, start, stop, lane.middle, part)
                elif spans:
                    drawn_parts.add(part)
        legend = {looks[part].name: looks[part].fill for part in _PART_NAMES if part in drawn_parts}
        if legend:
            add_patch_legend(figure, legend, columns=5 if is_wide else 2)
        return figure

    return Chart(
        name=name,
        title=title,
        caption=caption.strip() + describe_bins(seconds, num_bins),
        draw=draw,
        is_wide=is_wide,
    )


def choose_ranks(ranks: Sequence[RankTimeline]) -> Sequence[RankTimeline]:
    """Return at most eight ranks: evenly spaced ones, and the one with the longest step."""
    if len(ranks) <= MAX_RANKS:
        return ranks
    slowest = max(range(len(ranks)), key=lambda i: ranks[i].stop_us - ranks[i].start_us)
    evenly_spaced = [i * (len(ranks) - 1) // (MAX_RANKS - 2) for i in range(MAX_RANKS - 1)]
    return [ranks[i] for i in sorted({*evenly_spaced, slowest})]


def make_lanes(ranks: Sequence[RankTimeline], start_us: float) -> list[Lane]:
    """Return the rows of a Gantt chart, one for each stream of each rank.

    A stream is compute, copies, phases, or the communication of one mesh axis. Spans are (start,
    end) in seconds since ``start_us``, a time in us on the clock of the intervals.
    """
    start_ns = 1e3 * start_us
    lanes = []
    middle = 0.7
    for rank in ranks:
        prefix = f"rank {rank.rank}  "
        for stream, parts in split_streams(rank).items():
            spans = {
                part: [((start - start_ns) / 1e9, (stop - start_ns) / 1e9) for start, stop in times]
                for part, times in parts.items()
            }
            lanes.append(Lane(prefix + name_stream(stream), middle, spans))
            prefix = ""
            middle += 1
        middle += _GAP_BETWEEN_RANKS
    return lanes


def split_streams(rank: RankTimeline) -> dict[str, dict[str, list[Span]]]:
    """Return the (start, end) spans of one rank in nanoseconds, keyed by stream and then by part.

    The streams and their parts are:

    - ``phase``: a part for each phase that the step marks, by its name, such as ``forward``
    - ``compute``: ``compute`` and ``idle`` (nothing runs on the rank)
    - ``copy``: ``copy``
    - ``comm AXIS`` for each mesh axis: ``hidden`` (during compute or copies) and ``exposed``

    Streams without intervals are left out.
    """
    intervals = group_by_stream(rank)
    phases: dict[str, list[Span]] = {}
    for phase in intervals.pop(PHASE, []):
        phases.setdefault(phase.name, []).extend(convert_to_spans([phase]))
    streams = {PHASE: phases} if phases else {}
    spans = {stream: union(convert_to_spans(work)) for stream, work in intervals.items()}
    busy = [*spans.get(COMPUTE, []), *spans.get(COPY, [])]
    for stream, work in spans.items():
        if stream == COMPUTE:
            [step] = convert_to_spans([rank])
            idle = gaps(chain.from_iterable(spans.values()), step)
            streams[stream] = {"compute": work, "idle": idle}
        elif stream == COPY:
            streams[stream] = {"copy": work}
        else:
            exposed = difference(work, busy)
            streams[stream] = {"hidden": intersection(work, busy), "exposed": exposed}
    return streams


def _list_looks(lanes: Sequence[Lane]) -> Mapping[str, Look]:
    """Return the look of each part of a step, keyed by part, such as ``compute`` or ``exposed``.

    The phases that the lanes have are parts, too.
    """
    parts = {
        part: Look(name, look_of_part(part, style.STEP[part])) for part, name in _PART_NAMES.items()
    }
    phases = [part for lane in lanes for part in lane.spans if part not in parts]
    return parts | {phase: Look(phase, look_of_part("phase", "raised")) for phase in phases}
