"""Figures of profiled steps over time: the streams of each rank and the parts of its step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline, Timeline
from parbench.bench.results.spans import Span, difference, gaps, length, union
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart, number_name
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
_MAX_AXIS_RATIO = 5.0
_LANE_INCHES = 0.14
PART_NAMES = {
    "compute": "compute",
    "exposed": "exposed communication",
    "hidden": "hidden communication",
    "copy": "copy",
    "idle": "idle",
}
Parts = dict[str, list[Span]]
_TIME = replace(quantities.TIME_SINCE_START, title="time since the first rank began")


class LabeledTimeline(NamedTuple):
    """A profiled step to draw: its label, its repetition and its timeline."""

    label: str
    repetition: int
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class View:
    """The ranks of a timeline that are drawn, and the number of bins of each of their rows.

    ``num_bins`` is None if every span is drawn. ``start`` and ``stop`` are nanoseconds, as spans.
    """

    ranks: tuple[RankTimeline, ...]
    start: float
    stop: float
    num_bins: int | None
    note: str

    @property
    def seconds(self) -> float:
        return self.to_seconds(self.stop)

    def to_seconds(self, nanoseconds: float) -> float:
        """Return the time since the first rank began."""
        return (nanoseconds - self.start) / 1e9


def choose_view(timeline: Timeline, max_boxes: int = 4000) -> View:
    """Return the finest view with at most ``max_boxes``, of at most ``MAX_RANKS`` ranks."""
    start = min((rank.start_us for rank in timeline.ranks), default=0.0) * 1e3
    stop = max((rank.stop_us for rank in timeline.ranks), default=0.0) * 1e3
    stop = max(stop, start + 1)
    ranks = _choose_ranks(timeline.ranks)
    rows = [parts for rank in ranks for parts in build_stream_rows(rank).values()]
    num_bins = choose_num_bins(rows, start, stop, max_boxes)
    notes = []
    if len(ranks) < len(timeline.ranks):
        count = f"{len(ranks)} of {len(timeline.ranks)} ranks"
        notes.append(f"{count} are drawn, among them the slowest.")
    if num_bins:
        resolution = format_seconds((stop - start) / 1e9 / num_bins)
        notes.append(f"Each {resolution} has the color of what fills most of it.")
    return View(ranks=ranks, start=start, stop=stop, num_bins=num_bins, note=" ".join(notes))


def _choose_ranks(ranks: tuple[RankTimeline, ...]) -> tuple[RankTimeline, ...]:
    """Return evenly spaced ranks and the slowest one, if there are too many for all."""
    if len(ranks) <= MAX_RANKS:
        return ranks
    slowest = max(range(len(ranks)), key=lambda i: ranks[i].stop_us - ranks[i].start_us)
    others = [i * (len(ranks) - 1) // (MAX_RANKS - 2) for i in range(MAX_RANKS - 1)]
    return tuple(ranks[i] for i in sorted({*others, slowest}))


def split_step(rank: RankTimeline) -> Parts:
    """Return the spans in which a rank computes, copies, communicates and is idle."""
    streams = {name: to_spans(intervals) for name, intervals in group_by_stream(rank).items()}
    compute = streams.get(COMPUTE, [])
    copy = streams.get(COPY, [])
    communication = [
        span
        for name, spans in streams.items()
        if name not in (PHASE, COMPUTE, COPY)
        for span in spans
    ]
    exposed = difference(communication, [*compute, *copy])
    [step] = to_spans([rank])
    return {
        "compute": union(compute),
        "copy": difference(copy, compute),
        "exposed": exposed,
        "hidden": difference(communication, exposed),
        "idle": gaps([*compute, *copy, *communication], step),
    }


def build_stream_rows(rank: RankTimeline) -> dict[str, Parts]:
    """Return the spans of each stream by part, those of communication as hidden and exposed.

    Compute also has the idle time. Phases have no spans, because they are drawn with their names.
    """
    parts = split_step(rank)
    busy = [*parts["compute"], *parts["copy"]]
    rows: dict[str, Parts] = {}
    for stream, intervals in group_by_stream(rank).items():
        spans = union(to_spans(intervals))
        if stream == PHASE:
            rows[stream] = {}
        elif stream == COMPUTE:
            rows[stream] = {COMPUTE: spans, "idle": parts["idle"]}
        elif stream == COPY:
            rows[stream] = {COPY: spans}
        else:
            exposed = difference(spans, busy)
            rows[stream] = {"hidden": difference(spans, exposed), "exposed": exposed}
    return rows


def choose_axis_lengths(seconds: Sequence[float]) -> list[tuple[float, str]]:
    """Return the length of each time axis: a common one, unless a step is too short for it.

    The text is a sentence for a step with an axis of its own.
    """
    longest = max(seconds, default=0.0)
    lengths = []
    for duration in seconds:
        if longest <= _MAX_AXIS_RATIO * duration:
            lengths.append((longest, ""))
        else:
            lengths.append((duration, " Its time axis is shorter than that of the other steps."))
    return lengths


def describe_timeline(timeline: Timeline, view: View) -> str:
    uncertainty = format_seconds(timeline.uncertainty_seconds)
    duration = format_seconds(view.seconds)
    text = f"A profiled step of {duration} on one clock ({timeline.clock}, +/- {uncertainty})."
    return f"{text} {view.note}".rstrip()


def chart_profiled_step(
    title: str, caption: str, timeline: Timeline, *, is_wide: bool, max_boxes: int
) -> Chart:
    """Return a row for each rank: its step, and the hidden communication in a strip below."""
    view = choose_view(timeline, max_boxes)
    return Chart(
        name="step",
        title=title,
        caption=caption,
        draw=partial(_draw_overview, view, is_wide),
        is_wide=is_wide,
    )


def _draw_overview(view: View, is_wide: bool) -> "Figure":
    rank_inches = min(0.55, 1.3 / max(1, len(view.ranks)))
    phase_height = _LANE_INCHES / rank_inches
    figure, [axes] = new_figure(0.4 + _LANE_INCHES + rank_inches * len(view.ranks), is_wide=is_wide)
    set_x_axis(axes, _TIME, 0.0, view.seconds)
    rows = []
    for index, rank in enumerate(view.ranks):
        row = split_step(rank)
        hidden = {"hidden": row.pop("hidden")}
        rows += [row, hidden]
        _draw_row(axes, row, view, index + 0.36, 0.6)
        _draw_row(axes, hidden, view, index + 0.77, 0.16)
    for rank in view.ranks[:1]:
        _draw_phases(axes, rank, view, -0.6 * phase_height, phase_height)
    axes.set_ylim(len(view.ranks), -1.2 * phase_height)
    middles = [index + 0.4 for index in range(len(view.ranks))]
    axes.set_yticks(middles, [f"rank {rank.rank}" for rank in view.ranks])
    _add_legend(figure, rows, columns=5 if is_wide else 2)
    return figure


def chart_timelines(steps: Sequence[LabeledTimeline], max_boxes: int) -> Iterator[Chart]:
    """Yield every stream of every rank of each step, on one time axis where that is readable."""
    views = [choose_view(step.timeline, max_boxes // len(steps)) for step in steps]
    lengths = choose_axis_lengths([view.seconds for view in views])
    for number, (step, view, axis) in enumerate(zip(steps, views, lengths, strict=True), start=1):
        seconds, note = axis
        description = describe_timeline(step.timeline, view)
        yield Chart(
            name=number_name("timeline", number),
            title=f"Profiled step: {step.label}",
            caption=f"Repetition {step.repetition + 1}. {description}{note}",
            draw=partial(_draw_timeline, view, seconds),
            is_wide=True,
        )


def _draw_timeline(view: View, seconds: float) -> "Figure":
    streams = [(rank, build_stream_rows(rank)) for rank in view.ranks]
    num_lanes = sum(len(rows) + 0.4 for _, rows in streams)
    figure, [axes] = new_figure(0.35 + _LANE_INCHES * num_lanes, is_wide=True)
    set_x_axis(axes, _TIME, 0.0, seconds)
    middles = []
    names = []
    top = 0.0
    for rank, rows in streams:
        axes.axhline(top, color=color("faint"), linewidth=0.5)
        for stream, row in rows.items():
            middle = top + 0.7 + list(rows).index(stream)
            middles.append(middle)
            names.append(name_stream(stream))
            if stream == PHASE:
                _draw_phases(axes, rank, view, middle, 0.8)
            _draw_row(axes, row, view, middle, 0.8)
        if rows:
            names[-len(rows)] = f"rank {rank.rank}  {names[-len(rows)]}"
        top += len(rows) + 0.4
    axes.set_ylim(max(top, 1.0), 0.0)
    axes.set_yticks(middles, names)
    _add_legend(figure, [row for _, rows in streams for row in rows.values()], columns=5)
    return figure


def _draw_row(axes: "Axes", row: Parts, view: View, middle: float, height: float) -> None:
    for part, spans in merge_spans(row, view.start, view.stop, view.num_bins).items():
        boxes = []
        for start, stop in spans:
            left = view.to_seconds(start)
            right = max(view.to_seconds(stop), left + view.seconds / 2500)
            boxes.append(Box(left, right, middle, height))
        description = f"{PART_NAMES[part]}: {format_seconds(length(row[part]) / 1e9)}"
        draw_boxes(axes, boxes, look_of_part(part, style.STEP[part]), description)


def _draw_phases(
    axes: "Axes", rank: RankTimeline, view: View, middle: float, height: float
) -> None:
    for phase in group_by_stream(rank).get(PHASE, []):
        left = view.to_seconds(phase.start_us * 1e3)
        right = view.to_seconds(phase.stop_us * 1e3)
        description = f"{phase.name}: {format_seconds(right - left)}"
        box = Box(left, right, middle, height)
        draw_boxes(axes, [box], look_of_part("phase", "raised"), description)
        write_between(axes, left, right, middle, phase.name)


def _add_legend(figure: "Figure", rows: Sequence[Parts], columns: int) -> None:
    legend = {
        name: look_of_part(part, style.STEP[part])
        for part, name in PART_NAMES.items()
        if any(row.get(part) for row in rows)
    }
    if legend:
        add_patch_legend(figure, legend, columns)
