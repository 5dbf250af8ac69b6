"""Traced steps over time: what each rank's streams did, exposed communication hatched, idle gaps pale."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parbench.bench.results.records import COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from parbench.bench.results.spans import Span, difference, gaps, length, union
from parbench.reports import cells
from parbench.reports.analysis.steps import by_stream, spans_of, stream_words
from parbench.reports.figures.bars import part_style
from parbench.reports.figures.palette import STEP
from parbench.reports.figures.svg import NARROW, WIDE, Drawing, Scale, time_ticks, width_of

MOST_RANKS = 8
_LANE, _BAR, _GAP = 17.0, 13.0, 6.0
_FIRST_HEIGHT, _MOST_ROW, _MOST_RATIO = 190.0, 80.0, 5.0
_PARTS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "hidden": "hidden communication",
}
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
        if (
            before
            and (before.kind, before.chunk) == (box.kind, box.chunk)
            and box.start - before.stop < gap_us
        ):
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
        self, left: float, span_us: float, start_us: float = 0.0, *, width: float = WIDE
    ) -> None:
        super().__init__(width)
        self.left, self.span_us = left, span_us
        self.x = Scale(low=start_us, high=start_us + span_us, first=left, last=width - 16)
        self.scale = (width - 16 - left) / span_us

    def boxes(
        self, boxes: Iterable[tuple[float, Box]], height: float, style: str, told: str = ""
    ) -> None:
        """Draw boxes around their middles in one path: a shape for each would take ten times the bytes."""
        path = []
        for middle, box in boxes:
            left = round(self.x(box.start), 1)
            width = max(0.4, self.x(box.stop) - left)
            path.append(
                f"M{left:g} {round(middle - height / 2, 1):g}h{width:.1f}v{height:.3g}h-{width:.1f}z"
            )
        if path:
            self.path("".join(path), style, told)

    def time_axis(self, since: str) -> None:
        unit, ticks = time_ticks(self.span_us / 1e6)
        scale = Scale(low=0.0, high=self.span_us / 1e6, first=self.left, last=self.width - 16)
        self.axis_below(scale, ticks, f"time since {since} ({unit})")


def parts_of(rank: RankTimeline) -> dict[str, list[Span]]:
    """Return when a rank computes, copies, communicates hidden by either or exposed, and when it idles."""
    streams = {name: spans_of(intervals) for name, intervals in by_stream(rank).items()}
    compute, copy = streams.get(COMPUTE, []), streams.get(COPY, [])
    comm = [
        span for name, of in streams.items() if name not in (PHASE, COMPUTE, COPY) for span in of
    ]
    exposed = difference(comm, [*compute, *copy])
    return {
        "compute": union(compute),
        "copy": difference(copy, compute),
        "exposed": exposed,
        "hidden": difference(comm, exposed),
        "idle": gaps([*compute, *copy, *comm], *spans_of([rank])),
    }


def boxes_of(parts: Mapping[str, Iterable[Span]], gap_us: float) -> list[Box]:
    """Return a row of parts that exclude each other, in order, neighbours shorter than the gap as one.

    That one is drawn as what most of its time is: no part hides another that takes longer.
    """
    every = ((start, stop, part) for part, spans in parts.items() for start, stop in spans)
    found: list[Box] = []
    short: list[Box] = []
    for start, stop, part in [*sorted(every), (0, 0, "")]:
        box = Box(kind=part, start=start / 1e3, stop=stop / 1e3)
        is_long = box.stop - box.start >= gap_us
        if short and (
            is_long
            or not part
            or box.start - short[-1].stop >= gap_us
            or box.stop - short[0].start >= 2 * gap_us
        ):
            shares = defaultdict[str, float](float)
            for one in short:
                shares[one.kind] += one.stop - one.start
            found.append(
                Box(
                    kind=max(shares, key=shares.__getitem__),
                    start=short[0].start,
                    stop=short[-1].stop,
                )
            )
            short = []
        if part:
            (found if is_long else short).append(box)
    return joined(found, gap_us)


def _rows(rank: RankTimeline) -> dict[str, dict[str, list[Span]]]:
    """Return what the line of each stream holds: computing with the idle time, communication hidden or exposed."""
    parts, found = parts_of(rank), dict[str, dict[str, list[Span]]]()
    for stream, intervals in by_stream(rank).items():
        spans = spans_of(intervals)
        if stream in (PHASE, COPY, COMPUTE):
            found[stream] = {stream: spans} | ({"idle": parts["idle"]} if stream == COMPUTE else {})
        else:
            exposed = difference(spans, [*parts["compute"], *parts["copy"]])
            found[stream] = {"hidden": difference(spans, exposed), "exposed": exposed}
    return found


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
        notes.append(
            f"{len(ranks)} of {len(timeline.ranks)} ranks are drawn, the slowest among them."
        )
    rows = [parts for rank in ranks for parts in _rows(rank).values()]
    gap = span / 1740
    while sum(len(boxes_of(parts, gap)) for parts in rows) > most_boxes and gap < span:
        gap *= 2
    notes.append(
        f"What is shorter than {cells.duration(gap / 1e6)} is drawn as its neighbours are."
    )
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
        streams = by_stream(rank)
        chart.text(
            4,
            chart.top + _LANE * max(1, len(streams)) / 2,
            f"rank {rank.rank}",
            style="font-weight:600",
        )
        for stream, parts in _rows(rank).items():
            middle = chart.top + _LANE / 2
            chart.text(chart.left - 6, middle, stream_words(stream), "end")
            if stream == PHASE:
                _phases(chart, middle, streams[PHASE])
            else:
                _draw_row(chart, middle, _BAR, parts, view.gap_us)
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
        parts = parts_of(rank)
        hidden = {"hidden": parts.pop("hidden")}
        _draw_row(chart, chart.top + height * 0.35, height * 0.6, parts, view.gap_us)
        _draw_row(chart, chart.top + height * 0.76, height * 0.14, hidden, view.gap_us)
        chart.top += height
    chart.top += 4
    chart.time_axis("the first rank began")
    return chart


def _legend(chart: TimeChart, ranks: Sequence[RankTimeline]) -> None:
    known = {part for rank in ranks for part, spans in parts_of(rank).items() if spans}
    shown = (
        (words, 1.0, part_style(part, STEP[part]))
        for part, words in _PARTS.items()
        if part in known
    )
    chart.legend(shown, chart.left if chart.width == WIDE else 8.0)
    chart.top += 4


def _phases(chart: TimeChart, middle: float, phases: Iterable[Interval]) -> None:
    """Draw phases one by one, with their names where there is room."""
    for one in phases:
        told = f"{one.name}: {cells.duration((one.stop_us - one.start_us) / 1e6)}"
        phase = Box(kind=PHASE, start=one.start_us, stop=one.stop_us)
        chart.boxes(
            [(middle, phase)], _BAR, "fill:var(--raised);stroke:var(--muted);stroke-width:.5", told
        )
        if width_of(one.name, 11) < (one.stop_us - one.start_us) * chart.scale:
            chart.text(
                chart.x((one.start_us + one.stop_us) / 2),
                middle,
                one.name,
                "middle",
                "font-size:11px",
            )


def _draw_row(
    chart: TimeChart, middle: float, height: float, parts: Mapping[str, list[Span]], gap_us: float
) -> None:
    boxes = boxes_of(parts, gap_us)
    for part, spans in parts.items():
        shown, told = (
            [box for box in boxes if box.kind == part],
            cells.duration(length(spans) / 1e9),
        )
        chart.boxes(
            [(middle, box) for box in shown],
            height,
            part_style(part, STEP[part]),
            f"{_PARTS[part]}: {told}",
        )


def extent_of(timeline: Timeline) -> tuple[float, float]:
    """Return when the first rank begins and how long the step takes over all; never nothing, for it is divided by."""
    start = min((rank.start_us for rank in timeline.ranks), default=0.0)
    return start, max(1e-3, max((rank.stop_us for rank in timeline.ranks), default=0.0) - start)
