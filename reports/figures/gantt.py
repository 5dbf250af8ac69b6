"""Pipelines over time, as inline SVG: each action of each rank, predicted above measured.

Each kind of action has its own height, so that color is not needed.
"""

from dataclasses import dataclass
from typing import Protocol

from parbench.bench.results import details
from parbench.bench.results.details import ACTION_KINDS
from parbench.bench.results.details import PipelineTimeline as Actions
from parbench.reports import cells
from parbench.reports.analysis.pipelines import Pipeline
from parbench.reports.figures.palette import PIPELINE, css_of
from parbench.reports.figures.svg import WIDE
from parbench.reports.figures.timeline import Box, TimeChart, joined

_MIXED = "any"
# label and height of a row of each kind of action
_LOOKS = {
    "F": ("F: forward", 0.9),
    "B": ("B: backward", 0.78),
    "I": ("I: input gradient", 0.66),
    "W": ("W: weight gradient", 0.54),
    _MIXED: ("any action", 0.9),
}
_NUMBER_SIZE = 10
_LETTERS = {
    "F": 0.58,
    "B": 0.69,
    "I": 0.31,
    "W": 1.0,
}  # of the size of the font, as digits are 0.65
_MOST_TEXTS, _BOXES_OF_TEXT, _MOST_NAMED_RANKS = 400, 3, 16


class Drawn(Protocol):
    """What has a pipeline's timelines."""

    @property
    def facts(self) -> details.PipelineDetails: ...


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Neighbours closer than ``gap`` microseconds stand as one, if ``mixed`` also of different kinds; 0 draws all."""

    gap: float
    mixed: bool
    numbered: bool
    note: str


def detail_of(pipeline: Drawn, most_boxes: int = 6000) -> Detail:
    """Return the finest detail that needs no more boxes than ``most_boxes``, the same for both timelines."""
    shown = [one for one in (pipeline.facts.predicted, pipeline.facts.measured) if one]
    num_actions = sum(len(actions) for one in shown for actions in one)
    if num_actions <= most_boxes:
        numbered = num_actions <= min(_MOST_TEXTS, most_boxes // _BOXES_OF_TEXT)
        note = "" if numbered else f"Numbers of microbatches are left out of {num_actions} actions."
        return Detail(gap=0.0, mixed=False, numbered=numbered, note=note)

    # neighbours of one kind whose gap is narrower than a pixel, then those of any kind across wider and wider gaps
    for mixed, factor in ((False, 1), *((True, 2**i) for i in range(10))):
        gap = span_of(pipeline) / 720 * factor
        alike = f"neighbours of {'any' if mixed else 'one'} kind less than {cells.duration(gap / 1e6)} apart"
        note = f"Of {num_actions} actions, {alike} are drawn as one."
        detail = Detail(gap=gap, mixed=mixed, numbered=False, note=note)
        drawn = [box for one in shown for box in boxes_of(pipeline, one, detail)]
        if len(drawn) <= most_boxes:
            break
    return detail


def boxes_of(pipeline: Drawn, timeline: Actions, detail: Detail) -> list[Box]:
    found = []
    for rank, (ran, stages) in enumerate(zip(timeline, pipeline.facts.stages_by_rank, strict=True)):
        boxes = []
        for one in ran:
            kind, chunk = (
                (_MIXED, 0) if detail.mixed else (one.action.kind, stages.index(one.action.stage))
            )
            text = f"{one.action.kind}{one.action.microbatch}"
            boxes.append(
                Box(
                    rank=rank,
                    kind=kind,
                    chunk=chunk,
                    start=one.start_us,
                    stop=one.stop_us,
                    text=text,
                )
            )
        found += joined(boxes, detail.gap)
    return found


def gantt_words(pipeline: Pipeline, detail: Detail) -> str:
    predicted = "Above, the schedule simulated with this step's mean time of each kind and no latency; below, "
    told = f"{predicted if pipeline.facts.predicted else ''}what repetition {pipeline.repetition + 1} measured."
    return f"{told[0].upper()}{told[1:]} {detail.note}".rstrip()


def span_of(pipeline: Drawn) -> float:
    """Return how long the longer of a pipeline's timelines is, in microseconds."""
    return max(
        map(last_of, filter(None, (pipeline.facts.predicted, pipeline.facts.measured))), default=1.0
    )


def draw_pipeline(
    pipeline: Drawn, detail: Detail, span_us: float, *, width: float = WIDE, is_alone: bool = False
) -> TimeChart | None:
    """Return the predicted timeline above the measured one, or what there is of them; ``is_alone`` leaves it out."""
    facts = pipeline.facts
    told = (("simulated", None if is_alone else facts.predicted), ("measured", facts.measured))
    known = [(words, one) for words, one in told if one]
    if not known:
        return None
    drawn = [boxes_of(pipeline, one, detail) for _, one in known]
    chart = TimeChart(66.0, span_us, width=width)
    _legend(chart, {box.kind for boxes in drawn for box in boxes}, facts.chunks)
    height = max(6.0, min(30.0, (190 if is_alone else 450) / facts.ranks))
    for (words, timeline), boxes in zip(known, drawn, strict=True):
        chart.text(
            chart.left, chart.top + 14, f"{words}: {cells.duration(last_of(timeline) / 1e6)}"
        )
        chart.top += 26
        middles = [chart.top + (rank + 0.5) * height for rank in range(facts.ranks)]
        for kind, (_, share) in _LOOKS.items():
            edge = (
                ";stroke:currentColor;stroke-width:.5"
                if not detail.gap and kind in ACTION_KINDS
                else ""
            )
            for chunk in sorted({box.chunk for box in boxes if box.kind == kind}):
                shown = [
                    (middles[box.rank], box)
                    for box in boxes
                    if (box.kind, box.chunk) == (kind, chunk)
                ]
                chart.boxes(shown, share * height, f"{_style(kind, chunk)}{edge}")
        for box in boxes if detail.numbered else ():
            # the kind and the microbatch, or the microbatch alone, where there is room
            room = ((box.stop - box.start) * chart.scale - 1.4) / _NUMBER_SIZE
            ems = [_LETTERS.get(letter, 0.65) for letter in box.text]
            if (
                text := box.text
                if sum(ems) <= room
                else box.text[1:]
                if sum(ems[1:]) <= room
                else ""
            ):
                x = chart.x((box.start + box.stop) / 2)
                chart.text(x, middles[box.rank], text, "middle", f"font-size:{_NUMBER_SIZE}px")
        for rank in range(0, facts.ranks, -(-facts.ranks // _MOST_NAMED_RANKS)):
            chart.text(chart.left - 6, middles[rank], f"rank {rank}", "end")
        chart.top += facts.ranks * height
    chart.time_axis("the step's first action")
    return chart


def _legend(chart: TimeChart, kinds: set[str], chunks: int) -> None:
    shown = [
        (words, share, _style(kind)) for kind, (words, share) in _LOOKS.items() if kind in kinds
    ]
    if shown and chunks > 1 and _MIXED not in kinds:
        first = next(kind for kind in _LOOKS if kind in kinds)
        shown.append((f"paler: later of {chunks} chunks", 0.9, _style(first, 1)))
    chart.legend(shown, 8.0 if chart.width < WIDE else chart.left)


def _style(kind: str, chunk: int = 0) -> str:
    """Return the color of a kind, paler for each later chunk."""
    opacity = max(0.15, 0.65 * 0.55**chunk)
    fill = css_of(PIPELINE[kind]) if kind in PIPELINE else "currentColor"
    return f"fill:{fill};fill-opacity:{opacity:.3g}"


def last_of(timeline: Actions) -> float:
    """Return when the last action of a timeline ends, in microseconds; never nothing, for it is divided by."""
    return max([1, *(actions[-1].stop_us for actions in timeline if actions)])
