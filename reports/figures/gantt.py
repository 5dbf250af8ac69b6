"""A pipeline step's Gantt chart: the predicted timeline above the measured one, with what left ranks idle.

Kinds of action and causes of idle time differ in colour and in height, so that neither is needed alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.results.details import CAUSES, KINDS, Idle, Ran, Timeline
from reports import cells
from reports.analysis.pipelines import Pipeline
from reports.figures.svg import INK, SERIES, drawing, inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

MOST_BOXES = 6000
_MIXED = "any"
_KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", _MIXED: "any action"}
_CAUSE_WORDS = {"schedule": "idle: schedule", "imbalance": "idle: imbalance", "p2p": "idle: p2p", "rest": "idle: rest"}
_COLORS = dict(zip((*KINDS, *CAUSES, _MIXED), (*SERIES[:4], *SERIES[7:3:-1], INK), strict=True))
# of a row
_HEIGHTS = {"F": 0.9, "B": 0.78, "I": 0.66, "W": 0.54, _MIXED: 0.9}
_HEIGHTS |= {"schedule": 0.9, "imbalance": 0.6, "p2p": 0.4, "rest": 0.2}
_WIDTH_INCHES, _PLOT_SHARE, _POINTS = 10.0, 0.92, 72
_TEXT_POINTS, _DIGIT_POINTS = 6.5, 4.2
_LETTER_POINTS = {"F": 3.8, "B": 4.5, "I": 2.0, "W": 6.5}
_MOST_TEXTS, _BOXES_OF_TEXT = 400, 3
_MOST_NAMED_RANKS = 16
_VERTEX = re.compile(r"(\.\d\d)\d+")
_PATH = re.compile(r' d="[^"]*"')


@dataclass(frozen=True, kw_only=True)
class Box:
    """What is drawn as one: an action, or neighbours of one rank; ``text`` is empty where it stands for several."""

    rank: int
    kind: str
    chunk: int
    start: float
    stop: float
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How much a chart of so many actions can show: neighbours closer than ``gap`` microseconds stand as one.

    ``mixed`` says that they do so even if they differ in kind. A gap of zero draws every action.
    """

    gap: float
    mixed: bool
    numbered: bool
    note: str


def gantt_svg(pipeline: Pipeline, detail: Detail, *, name: str, title: str) -> str:
    """Return the chart as an ``<svg>`` element, empty without a measured timeline; ``name`` begins its ids."""
    figure = draw_gantt(pipeline, detail)
    if figure is None:
        return ""
    description = f"{gantt_words(pipeline, detail)} The table beside it holds the sums."
    drawn = inline_svg(figure, name=name, title=title, description=description)
    # a hundredth of a point is enough, and halves the bytes
    return _PATH.sub(lambda found: _VERTEX.sub(r"\1", found[0]), drawn)


def draw_gantt(pipeline: Pipeline, detail: Detail) -> Figure | None:
    """Return the chart, both timelines on one axis in ms; None without a measured timeline."""
    from matplotlib.figure import Figure

    if pipeline.facts.measured is None:
        return None
    shown = [("predicted", pipeline.facts.predicted), ("measured", pipeline.facts.measured)]
    known = [(word, timeline) for word, timeline in shown if timeline]
    last = max(_last(timeline) for _, timeline in known)
    row_inches = max(0.06, min(0.3, 4.5 / pipeline.facts.ranks))
    with drawing():
        height = 0.9 + len(known) * (0.25 + row_inches * pipeline.facts.ranks)
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        panels = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
        names: set[str] = set()
        for axes, (word, timeline) in zip(panels, known, strict=True):
            boxes = boxes_of(pipeline, timeline, detail)
            idle = idle_boxes(pipeline, detail) if word == "measured" else ()
            names |= {box.kind for box in (*boxes, *idle)}
            _draw_boxes(axes, (*idle, *boxes), edged=not detail.gap)
            if detail.numbered:
                _write_numbers(axes, boxes, last)
            _name_ranks(axes, pipeline.facts.ranks, f"{word}: {cells.duration(_last(timeline) / 1e6)}")
        _scale(panels[-1], last)
        _add_legend(figure, names, pipeline.facts.chunks)
    return figure


def gantt_words(pipeline: Pipeline, detail: Detail) -> str:
    """Return what the chart shows, and what it leaves out."""
    predicted = "Above, the schedule simulated with this step's mean time of each kind and no latency; below, "
    causes = ", each gap in the colour of its cause" if pipeline.facts.idle else ""
    start = predicted if pipeline.facts.predicted else ""
    told = f"{start}what launch {pipeline.launch + 1} measured{causes}."
    return f"{told[0].upper()}{told[1:]} {detail.note}".rstrip()


def detail_of(pipeline: Pipeline, most_boxes: int = MOST_BOXES) -> Detail:
    """Return the finest detail that needs no more boxes than ``most_boxes``, the same for both timelines.

    First every action, then neighbours of one kind as one where their gap is narrower than a pixel, then neighbours of
    any kind, across wider and wider gaps.
    """
    shown = _timelines(pipeline)
    num_actions = sum(len(actions) for one in shown for actions in one)
    if num_actions + len(pipeline.facts.idle or ()) <= most_boxes:
        numbered = num_actions <= min(_MOST_TEXTS, most_boxes // _BOXES_OF_TEXT)
        note = "" if numbered else f"Numbers of microbatches are left out of {num_actions} actions."
        return Detail(gap=0.0, mixed=False, numbered=numbered, note=note)
    last = max(map(_last, shown), default=1)
    gap = last / (_WIDTH_INCHES * _POINTS)
    detail = _coarser(num_actions, gap, mixed=False)
    while gap < last and _num_boxes(pipeline, detail) > most_boxes:
        detail = _coarser(num_actions, gap, mixed=True)
        gap *= 2
    return detail


def boxes_of(pipeline: Pipeline, timeline: Timeline, detail: Detail) -> tuple[Box, ...]:
    """Return what is drawn of a timeline."""
    stages = pipeline.facts.stages_by_rank
    return tuple(
        box
        for rank, told in enumerate(timeline)
        for box in _merged((_box(rank, stages[rank], one, detail) for one in told), detail)
    )


def idle_boxes(pipeline: Pipeline, detail: Detail) -> tuple[Box, ...]:
    """Return the idle times that the detail can show, as boxes whose kind is the cause."""
    return tuple(_idle_box(one) for one in pipeline.facts.idle or () if one.stop_us - one.start_us > detail.gap)


def _timelines(pipeline: Pipeline) -> list[Timeline]:
    return [one for one in (pipeline.facts.predicted, pipeline.facts.measured) if one]


def _coarser(num_actions: int, gap: float, *, mixed: bool) -> Detail:
    alike = "neighbours of any kind" if mixed else "neighbours of one kind"
    note = (
        f"Of {num_actions} actions, {alike} less than {cells.duration(gap / 1e6)} apart are drawn as one, and shorter "
        "idle times not at all."
    )
    return Detail(gap=gap, mixed=mixed, numbered=False, note=note)


def _num_boxes(pipeline: Pipeline, detail: Detail) -> int:
    drawn = sum(len(boxes_of(pipeline, one, detail)) for one in _timelines(pipeline))
    return drawn + len(idle_boxes(pipeline, detail))


def _box(rank: int, stages: Sequence[int], ran: Ran, detail: Detail) -> Box:
    action = ran.action
    return Box(
        rank=rank,
        kind=_MIXED if detail.mixed else action.kind,
        chunk=0 if detail.mixed else stages.index(action.stage),
        start=ran.start_us,
        stop=ran.stop_us,
        text=f"{action.kind}{action.microbatch}",
    )


def _merged(boxes: Iterable[Box], detail: Detail) -> list[Box]:
    """Return one rank's boxes, neighbours joined as far as the detail asks for."""
    found: list[Box] = []
    for box in boxes:
        before = found[-1] if found else None
        if before and detail.gap and _is_joined(before, box, detail.gap):
            found[-1] = Box(
                rank=box.rank, kind=box.kind, chunk=box.chunk, start=before.start, stop=max(before.stop, box.stop)
            )
        else:
            found.append(box)
    return found


def _is_joined(before: Box, box: Box, gap: float) -> bool:
    return (before.kind, before.chunk) == (box.kind, box.chunk) and box.start - before.stop < gap


def _idle_box(one: Idle) -> Box:
    return Box(rank=one.rank, kind=one.cause, chunk=0, start=one.start_us, stop=one.stop_us)


def _draw_boxes(axes: Axes, boxes: Sequence[Box], *, edged: bool) -> None:
    """Draw one path for each kind and chunk: a shape for each box would take ten times the bytes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    groups: dict[tuple[str, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.kind, box.chunk), []).append(box)
    for (kind, chunk), found in sorted(groups.items(), key=lambda one: (list(_COLORS).index(one[0][0]), one[0][1])):
        corners = [corner for box in found for corner in _corners(box, _HEIGHTS[kind])]
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(found)
        path = Path(corners, codes)
        axes.add_patch(PathPatch(path, **_style(kind, chunk), linewidth=0.4 if edged and kind in KINDS else 0))


def _corners(box: Box, height: float) -> list[tuple[float, float]]:
    left, right, low, high = box.start / 1e3, box.stop / 1e3, box.rank - height / 2, box.rank + height / 2
    return [(left, low), (right, low), (right, high), (left, high), (left, low)]


def _style(kind: str, chunk: int = 0) -> dict[str, Any]:
    """Return the colour of a kind, paler for each later chunk, or of a cause, paler than any kind."""
    alpha = 0.32 if kind in CAUSES else max(0.15, 0.65 * 0.55**chunk)
    return {"facecolor": (_COLORS[kind], alpha), "edgecolor": INK}


def _write_numbers(axes: Axes, boxes: Iterable[Box], last: float) -> None:
    """Write the kind and the microbatch, or the microbatch alone, into every box that has room."""
    points = _WIDTH_INCHES * _PLOT_SHARE * _POINTS / last
    for box in boxes:
        room = (box.stop - box.start) * points - 1
        text = next((text for text in (box.text, box.text[1:]) if _text_points(text) <= room), "")
        if text:
            middle = (box.start + box.stop) / 2e3
            axes.text(middle, box.rank, text, ha="center", va="center_baseline", fontsize=_TEXT_POINTS)


def _text_points(text: str) -> float:
    return sum(_LETTER_POINTS.get(letter, _DIGIT_POINTS) for letter in text)


def _name_ranks(axes: Axes, ranks: int, title: str) -> None:
    places = range(0, ranks, -(-ranks // _MOST_NAMED_RANKS))
    axes.set_yticks(places, [f"rank {place}" for place in places])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontsize=9)


def _scale(axes: Axes, last: float) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xlim(0, last / 1e3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.12g}"))
    axes.set_xlabel("time since the step's first action (ms)")


def _add_legend(figure: Figure, names: set[str], chunks: int) -> None:
    """Explain each kind and cause by a patch of its own height, and chunks by their shades."""
    from matplotlib.legend_handler import HandlerPatch
    from matplotlib.patches import Rectangle

    words = {**{kind: f"{kind}: {word}" for kind, word in _KIND_WORDS.items()}, **_CAUSE_WORDS, _MIXED: "any action"}
    known = [name for name in words if name in names]
    patches: list[Patch] = [Rectangle((0, 0), 1, 1, **_style(name), linewidth=0) for name in known]
    texts = [words[name] for name in known]
    if chunks > 1 and _MIXED not in names:
        patches.append(Rectangle((0, 0), 1, 1, **_style(known[0], 1), linewidth=0))
        texts.append(f"paler: later of {chunks} chunks")
    heights = {id(patch): _HEIGHTS.get(name, 0.9) for patch, name in zip(patches, known, strict=False)}
    ncols = len(texts) if len(texts) <= 6 else 4
    handlers = {Rectangle: HandlerPatch(patch_func=_legend_patch(heights))}
    figure.legend(patches, texts, loc="outside upper center", ncols=ncols, handlelength=2, handler_map=handlers)


def _legend_patch(heights: dict[int, float]) -> Any:
    """Return what draws a legend's patch as high, of its line, as the chart draws it of a row."""
    from matplotlib.patches import Rectangle

    def draw(
        *, orig_handle: Patch, xdescent: float, ydescent: float, width: float, height: float, **_: object
    ) -> Rectangle:
        share = heights.get(id(orig_handle), 0.9)
        return Rectangle((-xdescent, -ydescent + height * (1 - share) / 2), width, height * share)

    return draw


def _last(timeline: Timeline) -> float:
    """Return when the last action of a timeline ends, in microseconds; never nothing, for it is divided by."""
    return max([1, *(actions[-1].stop_us for actions in timeline if actions)])
