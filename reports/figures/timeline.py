"""Gantt charts of profiled steps: the streams of each rank, with hidden communication."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline, Timeline
from parbench.bench.results.spans import Span, difference, intersection, union
from parbench.reports.analysis.timelines import convert_to_spans, group_by_stream, name_stream
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lanes import Lane, draw_lanes
from parbench.reports.figures.primitives import add_legend, write_between
from parbench.reports.figures.quantities import TIME_SINCE_START, set_x_axis
from parbench.reports.figures.style import color, look_of_part, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RANKS = 8
"""The largest number of ranks in a chart."""
_LANE_INCHES = 0.14
_GAP_BETWEEN_RANKS = 0.4
"""The distance between the rows of two ranks on the y axis, on which a row has the height 1."""
_PARTS = ("compute", "exposed communication", "hidden communication", "copy", "idle")
"""The categories of spans that have a color. All others are names of phases that a step marks."""


def chart_timeline(
    name: str, title: str, caption: str, timeline: Timeline, *, is_wide: bool = True
) -> Chart:
    """Return a Gantt chart of a profiled step with a row for each stream of each rank.

    A stream is compute, copies, phases, or the communication of one mesh axis. At most eight ranks
    are drawn, those with the longest steps. Sentences on the clock and the number of ranks are
    appended to ``caption``. ``name`` is the id of the chart and the stem of its file.
    """
    seconds = max((rank.stop_us for rank in timeline.ranks), default=1.0) / 1e6
    ranks = sorted(timeline.ranks, key=lambda rank: rank.start_us - rank.stop_us)[:MAX_RANKS]
    lanes = make_lanes(sorted(ranks, key=lambda rank: rank.rank))
    uncertainty = format_seconds(timeline.uncertainty_seconds)
    caption += f" {format_seconds(seconds)} on one clock ({timeline.clock}, +/- {uncertainty})."
    if len(ranks) < len(timeline.ranks):
        caption += f" The {len(ranks)} slowest of {len(timeline.ranks)} ranks."

    def draw() -> "Figure":
        """Draw the lanes, the names of phases, and the legend."""
        bottom = lanes[-1].middle + 0.7 if lanes else 1.0
        figure, [axes] = new_figure(0.35 + _LANE_INCHES * bottom, is_wide=is_wide)
        set_x_axis(axes, TIME_SINCE_START, 0.0, seconds * 1.003)
        phase_look = {"facecolor": color("raised"), "edgecolor": color("muted"), "linewidth": 0.3}
        looks = {}
        for part in chain.from_iterable(lane.spans for lane in lanes):
            looks[part] = look_of_part(part) if part in _PARTS else phase_look
        draw_lanes(axes, lanes, looks, seconds)
        axes.set_ylim(bottom, 0.0)
        for lane in lanes:
            for phase in lane.spans.keys() - _PARTS:
                for start, stop in lane.spans[phase]:
                    write_between(axes, start, stop, lane.middle, phase)
        add_legend(figure)
        return figure

    return Chart(
        name=name,
        title=title,
        caption=caption.strip(),
        draw=draw,
        is_wide=is_wide,
    )


def make_lanes(ranks: Sequence[RankTimeline]) -> list[Lane]:
    """Return the rows of a Gantt chart, one for each stream of each rank.

    A stream is compute, copies, phases, or the communication of one mesh axis. Spans are (start,
    end) in seconds since the first rank began the step.
    """
    lanes = []
    middle = 0.7
    for rank in ranks:
        prefix = f"rank {rank.rank}  "
        for stream, parts in split_streams(rank).items():
            spans = {
                part: [(start / 1e9, stop / 1e9) for start, stop in times]
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
    - ``comm AXIS`` for each mesh axis: ``hidden communication`` (during compute or copies) and
      ``exposed communication``

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
            idle = difference([step], chain.from_iterable(spans.values()))
            streams[stream] = {"compute": work, "idle": idle}
        elif stream == COPY:
            streams[stream] = {"copy": work}
        else:
            streams[stream] = {
                "hidden communication": intersection(work, busy),
                "exposed communication": difference(work, busy),
            }
    return streams
