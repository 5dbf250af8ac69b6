"""Traced steps over time: what each rank's streams did, exposed communication hatched, idle gaps outlined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.results.records import COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from bench.results.spans import Span, difference, gaps, length, union
from reports import cells
from reports.analysis.steps import by_stream, stream_words
from reports.figures.bars import part_style
from reports.figures.palette import STEP
from reports.figures.svg import FONT, NARROW, WIDE, Drawing, Scale, time_ticks, width_of

MOST_RANKS = 8
_LANE, _BAR, _GAP = 17.0, 13.0, 6.0
_FIRST_HEIGHT, _MOST_ROW, _MOST_RATIO = 190.0, 80.0, 5.0
_PARTS = {"compute": "compute", "exposed": "exposed communication", "hidden": "hidden communication"}
_PARTS |= {"copy": "copy", "idle": "idle"}


@dataclass(frozen=True, kw_only=True)
class Box:
    """What is drawn as one, in microseconds; ``text`` is empty where it stands for several."""

    rank: int = 0
    kind: str
    chunk: int = 0
    start: float
    stop: float
    text: str = ""


def joined(boxes: Iterable[Box], gap_us: float) -> list[Box]:
    """Return boxes of one row in the order of time, neighbours that are alike and closer than the gap as one."""
    found: list[Box] = []
    for box in boxes:
        before = found[-1] if found else None
        if before and (before.kind, before.chunk) == (box.kind, box.chunk) and box.start - before.stop < gap_us:
            found[-1] = replace(before, stop=max(before.stop, box.stop), text="")
        else:
            found.append(box)
    return found


def shared(spans: Sequence[float]) -> list[tuple[float, str]]:
    """Return the span of each chart's axis, one for all, unless it could not be read on that."""
    longest = max(spans, default=0.0)
    own = " Too short for the others' axis: it has its own."
    return [(longest, "") if longest <= _MOST_RATIO * span else (span, own) for span in spans]


class TimeChart(Drawing):
    """Boxes from ``left`` on over ``span_us``, an axis of time in one unit below."""

    def __init__(
        self, left: float, span_us: float, start_us: float = 0.0, *, width: float = WIDE, font_size: float = FONT
    ) -> None:
        super().__init__(width, font_size)
        self.left, self.span_us = left, span_us
        self.x = Scale(low=start_us, high=start_us + span_us, first=left, last=width - 16)
        self.scale = (width - 16 - left) / span_us

    def boxes(self, boxes: Iterable[tuple[float, Box]], height: float, style: str, told: str = "") -> None:
        """Draw boxes around their middles in one path: a shape for each would take ten times the bytes."""
        path = []
        for middle, box in boxes:
            left = round(self.x(box.start), 1)
            width = max(0.4, self.x(box.stop) - left)
            path.append(f"M{left:g} {round(middle - height / 2, 1):g}h{width:.1f}v{height:.3g}h-{width:.1f}z")
        if path:
            self.path("".join(path), style, told)

    def time_axis(self, since: str) -> None:
        unit, ticks = time_ticks(self.span_us / 1e6)
        scale = Scale(low=0.0, high=self.span_us / 1e6, first=self.left, last=self.width - 16)
        self.axis_below(scale, ticks, f"time since {since} ({unit})")


def parts_of(rank: RankTimeline) -> dict[str, list[Span]]:
    """Return when a rank computes, copies, communicates hidden by either or exposed, and when it idles."""
    streams = {name: _spans(intervals) for name, intervals in by_stream(rank).items()}
    compute, copy = streams.get(COMPUTE, []), streams.get(COPY, [])
    comm = [span for name, of in streams.items() if name not in (PHASE, COMPUTE, COPY) for span in of]
    exposed = difference(comm, [*compute, *copy])
    return {
        "compute": union(compute),
        "copy": difference(copy, compute),
        "exposed": exposed,
        "hidden": difference(comm, exposed),
        "idle": gaps([*compute, *copy, *comm], _span(rank.start_us, rank.stop_us)),
    }


@dataclass(frozen=True, kw_only=True)
class View:
    """What of a timeline is drawn: some of its ranks, with neighbours closer than ``gap_us`` as one."""

    ranks: tuple[RankTimeline, ...]
    gap_us: float
    note: str


def view_of(timeline: Timeline, most_boxes: int = 4000) -> View:
    """Return the finest view with at most so many boxes, of at most ``MOST_RANKS`` ranks, the slowest among them."""
    ranks, notes, (_, span) = timeline.ranks, [], extent_of(timeline)
    if len(ranks) > MOST_RANKS:
        slowest = max(range(len(ranks)), key=lambda i: ranks[i].stop_us - ranks[i].start_us)
        spread = [i * (len(ranks) - 1) // (MOST_RANKS - 2) for i in range(MOST_RANKS - 1)]
        ranks = tuple(ranks[i] for i in sorted({*spread, slowest}))
        notes.append(f"{len(ranks)} of {len(timeline.ranks)} ranks are drawn, the slowest among them.")
    rows = [of for rank in ranks for of in (*map(_spans, by_stream(rank).values()), parts_of(rank)["idle"])]
    gap = span / 1740
    while sum(len(_boxes(spans, gap)) for spans in rows) > most_boxes and gap < span:
        gap *= 2
    notes.append(f"Gaps under {cells.duration(gap / 1e6)} are merged.")
    return View(ranks=ranks, gap_us=gap, note=" ".join(notes))


def timeline_words(timeline: Timeline, view: View) -> str:
    clock = f"{timeline.clock}, right within {cells.duration(timeline.uncertainty_seconds)}"
    return f"One traced step on one clock ({clock}), {cells.duration(extent_of(timeline)[1] / 1e6)} long. {view.note}"


def draw_timeline(timeline: Timeline, view: View, span_us: float) -> TimeChart:
    """Return every stream of every rank on an axis of so many microseconds."""
    start, _ = extent_of(timeline)
    chart = TimeChart(150.0, span_us, start)
    _legend(chart, view.ranks)
    for rank in view.ranks:
        streams, parts = by_stream(rank), parts_of(rank)
        chart.text(4, chart.top + _LANE * max(1, len(streams)) / 2, f"rank {rank.rank}", style="font-weight:600")
        for stream, intervals in streams.items():
            middle, told = chart.top + _LANE / 2, f"{stream_words(stream)}: {_length(_spans(intervals))}"
            chart.text(chart.left - 6, middle, stream_words(stream), "end")
            if stream == PHASE:
                _phases(chart, middle, intervals)
            elif stream in (COMPUTE, COPY):
                _row(chart, middle, _BAR, _boxes(_spans(intervals), view.gap_us), stream, told)
            else:
                exposed = difference(_spans(intervals), [*parts["compute"], *parts["copy"]])
                _row(chart, middle, _BAR, _boxes(_spans(intervals), view.gap_us), "hidden", told)
                _row(chart, middle, _BAR, _boxes(exposed, view.gap_us), "exposed", f"of it exposed: {_length(exposed)}")
            if stream == COMPUTE:
                _row(chart, middle, _BAR, _wide(parts["idle"], view), "idle", f"idle: {_length(parts['idle'])}")
            chart.top += _LANE
        chart.top += _GAP if streams else _LANE
    chart.time_axis("the first rank began")
    return chart


def draw_first(timeline: Timeline, view: View, width: float = NARROW) -> TimeChart:
    """Return a row for each rank: what it did, and below in a narrow strip the communication that this hid."""
    start, span = extent_of(timeline)
    chart = TimeChart(56.0, span, start, width=width)
    _legend(chart, view.ranks)
    phases = by_stream(view.ranks[0]).get(PHASE, []) if view.ranks else []
    if phases:
        _phases(chart, chart.top + _LANE / 2, phases)
        chart.top += _LANE + 4
    height = min(_MOST_ROW, _FIRST_HEIGHT / max(1, len(view.ranks)))
    for rank in view.ranks:
        chart.text(chart.left - 6, chart.top + height * 0.35, f"rank {rank.rank}", "end")
        for part, spans in parts_of(rank).items():
            boxes = _wide(spans, view) if part == "idle" else _boxes(spans, view.gap_us)
            thick = height * (0.14 if part == "hidden" else 0.6)
            middle = chart.top + height * (0.76 if part == "hidden" else 0.35)
            _row(chart, middle, thick, boxes, part, f"{_PARTS[part]}: {_length(spans)}")
        chart.top += height
    chart.top += 4
    chart.time_axis("the first rank began")
    return chart


def _legend(chart: TimeChart, ranks: Sequence[RankTimeline]) -> None:
    known = {part for rank in ranks for part, spans in parts_of(rank).items() if spans}
    shown = ((words, 1.0, part_style(part, STEP[part])) for part, words in _PARTS.items() if part in known)
    chart.legend(shown, chart.left if chart.width == WIDE else 8.0)
    chart.top += 4


def _phases(chart: TimeChart, middle: float, phases: Iterable[Interval]) -> None:
    """Draw phases one by one, with their names where there is room."""
    for one in phases:
        told = f"{one.name}: {cells.duration((one.stop_us - one.start_us) / 1e6)}"
        phase = Box(kind=PHASE, start=one.start_us, stop=one.stop_us)
        chart.boxes([(middle, phase)], _BAR, "fill:var(--raised);stroke:var(--muted);stroke-width:.5", told)
        if width_of(one.name, 11) < (one.stop_us - one.start_us) * chart.scale:
            chart.text(chart.x((one.start_us + one.stop_us) / 2), middle, one.name, "middle", "font-size:11px")


def _row(chart: TimeChart, middle: float, height: float, boxes: Sequence[Box], part: str, told: str) -> None:
    chart.boxes([(middle, box) for box in boxes], height, part_style(part, STEP[part]), told)


def _boxes(spans: Iterable[Span], gap_us: float) -> list[Box]:
    return joined((Box(kind="", start=start / 1e3, stop=stop / 1e3) for start, stop in sorted(spans)), gap_us)


def _wide(spans: Iterable[Span], view: View) -> list[Box]:
    return [box for box in _boxes(spans, 0.0) if box.stop - box.start >= view.gap_us]


def _span(start_us: float, stop_us: float) -> Span:
    return round(1e3 * start_us), round(1e3 * max(start_us, stop_us))


def _spans(intervals: Iterable[Interval]) -> list[Span]:
    return [_span(one.start_us, one.stop_us) for one in intervals]


def _length(spans: Iterable[Span]) -> str:
    return cells.duration(length(spans) / 1e9)


def extent_of(timeline: Timeline) -> tuple[float, float]:
    """Return when the first rank begins and how long the step takes over all; never nothing, for it is divided by."""
    start = min((rank.start_us for rank in timeline.ranks), default=0.0)
    return start, max(1e-3, max((rank.stop_us for rank in timeline.ranks), default=0.0) - start)
