"""One traced step as an inline picture: each rank's streams below each other, on one axis of time. Pure.

A stream is a line of its own with its name beside it, so that colour is not needed to tell streams apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from bench.results.records import COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from reports import cells
from reports.analysis.timelines import by_stream, covered_us, stream_words

MOST_RANKS, MOST_BOXES = 8, 4000
_WIDTH, _LEFT, _TOP, _LANE, _BAR, _GAP = 1000.0, 130.0, 8.0, 15.0, 11.0, 6.0
_LETTER = 5.6
_COLORS = {COMPUTE: "var(--series-0)", COPY: "var(--series-4)"}
_COMM = ("var(--series-1)", "var(--series-3)", "var(--series-2)", "var(--series-6)")
_MOST_TICKS = 8

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class View:
    """What of a timeline is drawn: some of its ranks, with neighbours closer than ``gap_us`` as one."""

    ranks: tuple[RankTimeline, ...]
    gap_us: float
    note: str


def view_of(timeline: Timeline, most_boxes: int = MOST_BOXES) -> View:
    """Return the finest view with at most so many boxes, of at most ``MOST_RANKS`` ranks, the slowest among them."""
    ranks = _chosen(timeline.ranks)
    gap = _span_us(timeline) / (_WIDTH - _LEFT) / 2
    while _num_boxes(ranks, gap) > most_boxes and gap < _span_us(timeline):
        gap *= 2
    notes = []
    if len(ranks) < len(timeline.ranks):
        notes.append(f"{len(ranks)} of {len(timeline.ranks)} ranks are drawn, the slowest among them.")
    notes.append(f"What is less than {cells.duration(gap / 1e6)} apart is drawn as one.")
    return View(ranks=ranks, gap_us=gap, note=" ".join(notes))


def timeline_svg(timeline: Timeline, view: View, *, name: str, title: str) -> str:
    """Return the picture as an ``<svg>`` element; ``name`` begins its ids."""
    start, span = _start_us(timeline), _span_us(timeline)
    scale = (_WIDTH - _LEFT - 10) / span
    body, top = [], _TOP
    for rank in view.ranks:
        streams = by_stream(rank)
        body.append(_text(4, top + _LANE * max(1, len(streams)) / 2, f"rank {rank.rank}", "font-weight:600"))
        for stream, intervals in streams.items():
            body += _lane(stream, intervals, list(streams), (start, scale), top, view.gap_us)
            top += _LANE
        top += _GAP if streams else _LANE
    body += _axis(span, scale, top)
    ids = f"{name}-title {name}-desc"
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {top + 34:.0f}" role="img" aria-labelledby="{ids}" font-size="10">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(timeline_words(timeline, view))} The table beside it holds the sums.</desc>'
        f"{''.join(body)}</svg>"
    )


def timeline_words(timeline: Timeline, view: View) -> str:
    """Return what the picture shows, on which clock, and what it leaves out."""
    clock = f"{timeline.clock}, right within {cells.duration(timeline.uncertainty_seconds)}"
    return f"One traced step on one clock ({clock}), {cells.duration(_span_us(timeline) / 1e6)} long. {view.note}"


def merged(intervals: Sequence[Interval], gap_us: float) -> list[Span]:
    """Return the times that intervals cover, neighbours closer than the gap as one."""
    found: list[Span] = []
    for one in sorted(intervals, key=lambda one: one.start_us):
        if found and one.start_us - found[-1][1] < gap_us:
            found[-1] = (found[-1][0], max(found[-1][1], one.stop_us))
        else:
            found.append((one.start_us, one.stop_us))
    return found


def _chosen(ranks: Sequence[RankTimeline]) -> tuple[RankTimeline, ...]:
    if len(ranks) <= MOST_RANKS:
        return tuple(ranks)
    slowest = max(range(len(ranks)), key=lambda i: ranks[i].stop_us - ranks[i].start_us)
    spread = [i * (len(ranks) - 1) // (MOST_RANKS - 2) for i in range(MOST_RANKS - 1)]
    return tuple(ranks[i] for i in sorted({*spread, slowest}))


def _num_boxes(ranks: Sequence[RankTimeline], gap_us: float) -> int:
    return sum(len(merged(intervals, gap_us)) for rank in ranks for intervals in by_stream(rank).values())


def _lane(
    stream: str, intervals: Sequence[Interval], streams: Sequence[str], axis: Span, top: float, gap_us: float
) -> Iterator[str]:
    """Yield a stream's name and its boxes; phases one by one with their names, what else neighbours together."""
    yield _text(_LEFT - 6, top + _LANE / 2, stream_words(stream), "text-anchor:end")
    if stream == PHASE:
        for one in intervals:
            yield from _phase(one, axis, top)
        return
    boxes = "".join(_box((left, right), axis, top) for left, right in merged(intervals, gap_us))
    told = f"{stream_words(stream)}: {cells.duration(covered_us(intervals) / 1e6)}"
    yield f'<path d="{boxes}" style="fill:{_color(stream, streams)}"><title>{escape(told)}</title></path>'


def _phase(one: Interval, axis: Span, top: float) -> Iterator[str]:
    start, scale = axis
    box = _box((one.start_us, one.stop_us), axis, top)
    told = f"{one.name}: {cells.duration((one.stop_us - one.start_us) / 1e6)}"
    style = "fill:var(--faint);stroke:var(--muted);stroke-width:.5"
    yield f'<path d="{box}" style="{style}"><title>{escape(told)}</title></path>'
    if len(one.name) * _LETTER < (one.stop_us - one.start_us) * scale:
        middle = _LEFT + ((one.start_us + one.stop_us) / 2 - start) * scale
        yield _text(middle, top + _LANE / 2, one.name, "text-anchor:middle")


def _box(span: Span, axis: Span, top: float) -> str:
    start, scale = axis
    left, width = _LEFT + (span[0] - start) * scale, max(0.4, (span[1] - span[0]) * scale)
    low = top + (_LANE - _BAR) / 2
    return f"M{left:.1f} {low:.0f}h{width:.1f}v{_BAR:.0f}h-{width:.1f}z"


def _color(stream: str, streams: Sequence[str]) -> str:
    others = [one for one in streams if one not in (PHASE, COMPUTE, COPY)]
    return _COLORS.get(stream) or _COMM[others.index(stream) % len(_COMM)]


def _axis(span_us: float, scale: float, top: float) -> Iterator[str]:
    """Yield the axis of time with its ticks, in one unit."""
    step = _tick_us(span_us)
    unit_us, unit = next((one for one in ((1e6, "s"), (1e3, "ms")) if step >= one[0]), (1.0, "us"))
    yield f'<path d="M{_LEFT:.0f} {top:.0f}h{span_us * scale:.1f}" style="stroke:currentColor;fill:none"/>'
    for i in range(math.floor(span_us / step) + 1):
        x = _LEFT + i * step * scale
        yield f'<path d="M{x:.1f} {top:.0f}v4" style="stroke:currentColor"/>'
        yield _text(x, top + 12, f"{i * step / unit_us:.12g}", "text-anchor:middle")
    yield _text(
        _LEFT + span_us * scale / 2, top + 26, f"time since the first rank began ({unit})", "text-anchor:middle"
    )


def _tick_us(span_us: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that there are few ticks."""
    power = 10.0 ** math.floor(math.log10(span_us / _MOST_TICKS))
    return next(factor * power for factor in (1, 2, 5, 10) if span_us / (factor * power) <= _MOST_TICKS)


def _text(x: float, y: float, words: str, style: str) -> str:
    shown = escape(cells.visible(words))
    return f'<text x="{x:.1f}" y="{y:.1f}" dy=".35em" style="fill:currentColor;{style}">{shown}</text>'


def _start_us(timeline: Timeline) -> float:
    return min((rank.start_us for rank in timeline.ranks), default=0.0)


def _span_us(timeline: Timeline) -> float:
    """Return how long the step takes over all ranks; never nothing, for it is divided by."""
    return max(1e-3, max((rank.stop_us for rank in timeline.ranks), default=0.0) - _start_us(timeline))
