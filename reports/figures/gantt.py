"""Boxes on rows of one axis of time, as inline SVG: the streams of a traced step, the actions of a pipeline. Pure.

Streams have lines with names, and kinds of action and causes of idle time heights of their own: colour is not needed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from bench.results.details import KINDS
from bench.results.details import Timeline as Actions
from bench.results.records import COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from reports import cells
from reports.analysis.pipelines import Pipeline
from reports.analysis.timelines import by_stream, covered_us, stream_words

_WIDTH, _MOST_TICKS = 1000.0, 8
_MIDDLE, _END = "text-anchor:middle", "text-anchor:end"


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


class _Chart:
    """What is drawn from ``left`` on over ``span_us``; ``top`` is where the next thing stands."""

    def __init__(self, left: float, font_size: int, span_us: float, start_us: float = 0.0) -> None:
        self.left, self.font_size, self._span, self._start, self.top = left, font_size, span_us, start_us, 8.0
        self.scale = (_WIDTH - left - 16) / span_us
        self._parts: list[str] = []

    def x(self, us: float) -> float:
        return self.left + (us - self._start) * self.scale

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        shown = escape(cells.visible(words))
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" dy=".35em" style="fill:currentColor;{style}">{shown}</text>')

    def boxes(self, boxes: Iterable[tuple[float, Box]], height: float, style: str, told: str = "") -> None:
        """Draw boxes around their middles in one path: a shape for each would take ten times the bytes."""
        path = []
        for middle, box in boxes:
            left = round(self.x(box.start), 1)
            width = max(0.4, self.x(box.stop) - left)
            path.append(f"M{left:g} {round(middle - height / 2, 1):g}h{width:.1f}v{height:.3g}h-{width:.1f}z")
        title = f"<title>{escape(told)}</title>" if told else ""
        self._parts.append(f'<path d="{"".join(path)}" style="{style}">{title}</path>')

    def swatch(self, x: float, y: float, height: float, style: str) -> None:
        self._parts.append(f'<path d="M{x:.0f} {y - height / 2:.1f}h20v{height:.1f}h-20z" style="{style}"/>')

    def svg(self, since: str, words: str, *, name: str, title: str) -> str:
        """Return all with an axis of time below, in one unit, with ticks at 1, 2 or 5 times a power of ten."""
        power = 10.0 ** math.floor(math.log10(self._span / _MOST_TICKS))
        step = next(factor * power for factor in (1, 2, 5, 10) if self._span / (factor * power) <= _MOST_TICKS)
        unit_us, unit = next((one for one in ((1e6, "s"), (1e3, "ms")) if step >= one[0]), (1.0, "us"))
        ticks = [i * step for i in range(math.floor(self._span / step) + 1)]
        length, top, font_size = self._span * self.scale, self.top, self.font_size
        marks = "".join(f"M{self.left + tick * self.scale:.1f} {top:.0f}v4" for tick in ticks)
        path = f"M{self.left:.0f} {top:.0f}h{length:.1f}{marks}"
        self._parts.append(f'<path d="{path}" style="stroke:currentColor;fill:none"/>')
        for tick in ticks:
            self.text(self.left + tick * self.scale, top + 4 + 0.8 * font_size, f"{tick / unit_us:.12g}", _MIDDLE)
        self.text(self.left + length / 2, top + 6 + 2 * font_size, f"time since {since} ({unit})", _MIDDLE)
        return (
            f'<svg viewBox="0 0 {_WIDTH:.0f} {top + 8 + 2.6 * font_size:.0f}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" font-size="{font_size}">'
            f'<title id="{name}-title">{escape(title)}</title>'
            f'<desc id="{name}-desc">{escape(words)} The table beside it holds the sums.</desc>'
            f"{''.join(self._parts)}</svg>"
        )


MOST_RANKS = 8
_LANE, _BAR, _GAP, _LETTER = 15.0, 11.0, 6.0, 5.6
_STREAMS = {COMPUTE: "var(--series-0)", COPY: "var(--series-4)"}
_COMM = ("var(--series-1)", "var(--series-3)", "var(--series-2)", "var(--series-6)")


@dataclass(frozen=True, kw_only=True)
class View:
    """What of a timeline is drawn: some of its ranks, with neighbours closer than ``gap_us`` as one."""

    ranks: tuple[RankTimeline, ...]
    gap_us: float
    note: str


def view_of(timeline: Timeline, most_boxes: int = 4000) -> View:
    """Return the finest view with at most so many boxes, of at most ``MOST_RANKS`` ranks, the slowest among them."""
    ranks, notes, (_, span) = timeline.ranks, [], _extent(timeline)
    if len(ranks) > MOST_RANKS:
        slowest = max(range(len(ranks)), key=lambda i: ranks[i].stop_us - ranks[i].start_us)
        spread = [i * (len(ranks) - 1) // (MOST_RANKS - 2) for i in range(MOST_RANKS - 1)]
        ranks = tuple(ranks[i] for i in sorted({*spread, slowest}))
        notes.append(f"{len(ranks)} of {len(timeline.ranks)} ranks are drawn, the slowest among them.")
    streams = [intervals for rank in ranks for intervals in by_stream(rank).values()]
    gap = span / 1740
    while sum(len(_stream_boxes(one, gap)) for one in streams) > most_boxes and gap < span:
        gap *= 2
    notes.append(f"What is less than {cells.duration(gap / 1e6)} apart is drawn as one.")
    return View(ranks=ranks, gap_us=gap, note=" ".join(notes))


def timeline_words(timeline: Timeline, view: View) -> str:
    clock = f"{timeline.clock}, right within {cells.duration(timeline.uncertainty_seconds)}"
    return f"One traced step on one clock ({clock}), {cells.duration(_extent(timeline)[1] / 1e6)} long. {view.note}"


def timeline_svg(timeline: Timeline, view: View, *, name: str, title: str) -> str:
    start, span = _extent(timeline)
    chart = _Chart(130.0, 10, span, start)
    for rank in view.ranks:
        streams = by_stream(rank)
        chart.text(4, chart.top + _LANE * max(1, len(streams)) / 2, f"rank {rank.rank}", "font-weight:600")
        comm = [stream for stream in streams if stream not in (PHASE, COMPUTE, COPY)]
        for stream, intervals in streams.items():
            middle = chart.top + _LANE / 2
            chart.text(chart.left - 6, middle, stream_words(stream), _END)
            if stream == PHASE:
                # one by one, with their names where there is room
                style = "fill:var(--faint);stroke:var(--muted);stroke-width:.5"
                for one in intervals:
                    told = f"{one.name}: {cells.duration((one.stop_us - one.start_us) / 1e6)}"
                    phase = Box(kind=PHASE, start=one.start_us, stop=one.stop_us)
                    chart.boxes([(middle, phase)], _BAR, style, told)
                    if len(one.name) * _LETTER < (one.stop_us - one.start_us) * chart.scale:
                        chart.text(chart.x((one.start_us + one.stop_us) / 2), middle, one.name, _MIDDLE)
            else:
                color = _STREAMS.get(stream) or _COMM[comm.index(stream) % len(_COMM)]
                told = f"{stream_words(stream)}: {cells.duration(covered_us(intervals) / 1e6)}"
                boxes = _stream_boxes(intervals, view.gap_us)
                chart.boxes([(middle, box) for box in boxes], _BAR, f"fill:{color}", told)
            chart.top += _LANE
        chart.top += _GAP if streams else _LANE
    return chart.svg("the first rank began", timeline_words(timeline, view), name=name, title=title)


def _stream_boxes(intervals: Iterable[Interval], gap_us: float) -> list[Box]:
    ordered = sorted(intervals, key=lambda one: one.start_us)
    return joined((Box(kind=one.stream, start=one.start_us, stop=one.stop_us) for one in ordered), gap_us)


def _extent(timeline: Timeline) -> tuple[float, float]:
    """Return when the first rank begins and how long the step takes over all; never nothing, for it is divided by."""
    start = min((rank.start_us for rank in timeline.ranks), default=0.0)
    return start, max(1e-3, max((rank.stop_us for rank in timeline.ranks), default=0.0) - start)


_MIXED = "any"
# words, colour and height of a row of each kind of action and cause of idle time
_LOOKS = {
    "F": ("F: forward", "var(--series-0)", 0.9),
    "B": ("B: backward", "var(--series-1)", 0.78),
    "I": ("I: input gradient", "var(--series-2)", 0.66),
    "W": ("W: weight gradient", "var(--series-3)", 0.54),
    _MIXED: ("any action", "currentColor", 0.9),
    "schedule": ("idle: schedule", "var(--series-7)", 0.9),
    "imbalance": ("idle: imbalance", "var(--series-6)", 0.6),
    "p2p": ("idle: p2p", "var(--series-5)", 0.4),
    "rest": ("idle: rest", "var(--series-4)", 0.2),
}
_NUMBER_SIZE = 9
_LETTERS = {"F": 0.58, "B": 0.69, "I": 0.31, "W": 1.0}  # of the size of the font, as digits are 0.65
_MOST_TEXTS, _BOXES_OF_TEXT, _MOST_NAMED_RANKS = 400, 3, 16


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Neighbours closer than ``gap`` microseconds stand as one, if ``mixed`` also of different kinds; 0 draws all."""

    gap: float
    mixed: bool
    numbered: bool
    note: str


def detail_of(pipeline: Pipeline, most_boxes: int = 6000) -> Detail:
    """Return the finest detail that needs no more boxes than ``most_boxes``, the same for both timelines."""
    shown = [one for one in (pipeline.facts.predicted, pipeline.facts.measured) if one]
    num_actions = sum(len(actions) for one in shown for actions in one)
    if num_actions + len(pipeline.facts.idle or ()) <= most_boxes:
        numbered = num_actions <= min(_MOST_TEXTS, most_boxes // _BOXES_OF_TEXT)
        note = "" if numbered else f"Numbers of microbatches are left out of {num_actions} actions."
        return Detail(gap=0.0, mixed=False, numbered=numbered, note=note)

    # neighbours of one kind whose gap is narrower than a pixel, then those of any kind across wider and wider gaps
    for mixed, factor in ((False, 1), *((True, 2**i) for i in range(10))):
        gap = max(map(_last, shown), default=1) / 720 * factor
        alike = f"neighbours of {'any' if mixed else 'one'} kind less than {cells.duration(gap / 1e6)} apart"
        note = f"Of {num_actions} actions, {alike} are drawn as one, and shorter idle times not at all."
        detail = Detail(gap=gap, mixed=mixed, numbered=False, note=note)
        drawn = [*idle_boxes(pipeline, detail), *(box for one in shown for box in boxes_of(pipeline, one, detail))]
        if len(drawn) <= most_boxes:
            break
    return detail


def boxes_of(pipeline: Pipeline, timeline: Actions, detail: Detail) -> list[Box]:
    found = []
    for rank, (ran, stages) in enumerate(zip(timeline, pipeline.facts.stages_by_rank, strict=True)):
        boxes = []
        for one in ran:
            kind, chunk = (_MIXED, 0) if detail.mixed else (one.action.kind, stages.index(one.action.stage))
            text = f"{one.action.kind}{one.action.microbatch}"
            boxes.append(Box(rank=rank, kind=kind, chunk=chunk, start=one.start_us, stop=one.stop_us, text=text))
        found += joined(boxes, detail.gap)
    return found


def idle_boxes(pipeline: Pipeline, detail: Detail) -> list[Box]:
    shown = [one for one in pipeline.facts.idle or () if one.stop_us - one.start_us > detail.gap]
    return [Box(rank=one.rank, kind=one.cause, start=one.start_us, stop=one.stop_us) for one in shown]


def gantt_words(pipeline: Pipeline, detail: Detail) -> str:
    predicted = "Above, the schedule simulated with this step's mean time of each kind and no latency; below, "
    causes = ", each gap in the colour of its cause" if pipeline.facts.idle else ""
    told = f"{predicted if pipeline.facts.predicted else ''}what launch {pipeline.launch + 1} measured{causes}."
    return f"{told[0].upper()}{told[1:]} {detail.note}".rstrip()


def gantt_svg(pipeline: Pipeline, detail: Detail, *, name: str, title: str) -> str:
    """Return the predicted timeline above the measured one, empty without that; ``name`` begins the ids."""
    facts = pipeline.facts
    if not facts.measured:
        return ""
    known = [(words, one) for words, one in (("predicted", facts.predicted), ("measured", facts.measured)) if one]
    drawn = [boxes_of(pipeline, one, detail) for _, one in known]
    drawn[-1] = [*idle_boxes(pipeline, detail), *drawn[-1]]
    chart = _Chart(66.0, 12, max(_last(one) for _, one in known))
    _draw_legend(chart, {box.kind for boxes in drawn for box in boxes}, facts.chunks)
    height = max(6.0, min(30.0, 450 / facts.ranks))
    for (words, timeline), boxes in zip(known, drawn, strict=True):
        chart.text(chart.left, chart.top + 14, f"{words}: {cells.duration(_last(timeline) / 1e6)}")
        chart.top += 26
        middles = [chart.top + (rank + 0.5) * height for rank in range(facts.ranks)]
        for kind, (_, _, share) in _LOOKS.items():
            edge = ";stroke:currentColor;stroke-width:.5" if not detail.gap and kind in KINDS else ""
            for chunk in sorted({box.chunk for box in boxes if box.kind == kind}):
                shown = [(middles[box.rank], box) for box in boxes if (box.kind, box.chunk) == (kind, chunk)]
                chart.boxes(shown, share * height, f"{_style(kind, chunk)}{edge}")
        for box in boxes if detail.numbered else ():
            # the kind and the microbatch, or the microbatch alone, where there is room
            room = ((box.stop - box.start) * chart.scale - 1.4) / _NUMBER_SIZE
            ems = [_LETTERS.get(letter, 0.65) for letter in box.text]
            if text := box.text if sum(ems) <= room else box.text[1:] if sum(ems[1:]) <= room else "":
                x = chart.x((box.start + box.stop) / 2)
                chart.text(x, middles[box.rank], text, f"{_MIDDLE};font-size:{_NUMBER_SIZE}px")
        for rank in range(0, facts.ranks, -(-facts.ranks // _MOST_NAMED_RANKS)):
            chart.text(chart.left - 6, middles[rank], f"rank {rank}", _END)
        chart.top += facts.ranks * height
    return chart.svg("the step's first action", gantt_words(pipeline, detail), name=name, title=title)


def _draw_legend(chart: _Chart, kinds: set[str], chunks: int) -> None:
    shown = [(words, share, _style(kind)) for kind, (words, _, share) in _LOOKS.items() if kind in kinds]
    if shown and chunks > 1 and _MIXED not in kinds:
        first = next(kind for kind in _LOOKS if kind in kinds)
        shown.append((f"paler: later of {chunks} chunks", 0.9, _style(first, 1)))
    left = chart.left
    for words, share, style in shown:
        width = 40 + 0.6 * chart.font_size * len(words)
        if left + width > _WIDTH:
            left, chart.top = chart.left, chart.top + 1.5 * chart.font_size
        chart.swatch(left, chart.top + 6, share * chart.font_size, style)
        chart.text(left + 26, chart.top + 6, words)
        left += width
    chart.top += 1.5 * chart.font_size


def _style(kind: str, chunk: int = 0) -> str:
    """Return the colour of a kind, paler for each later chunk, or of a cause, paler than any kind."""
    opacity = max(0.15, 0.65 * 0.55**chunk) if kind in (*KINDS, _MIXED) else 0.32
    return f"fill:{_LOOKS[kind][1]};fill-opacity:{opacity:.3g}"


def _last(timeline: Actions) -> float:
    """Return when the last action of a timeline ends, in microseconds; never nothing, for it is divided by."""
    return max([1, *(actions[-1].stop_us for actions in timeline if actions)])
