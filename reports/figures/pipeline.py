"""The chart of a pipeline: the actions of each rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from parbench.bench.results.details import PipelineDetails, PipelineTimeline
from parbench.bench.results.formatting import format_seconds
from parbench.reports.analysis.pipelines import Pipeline
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.primitives import Box, add_patch_legend, draw_boxes, write_between
from parbench.reports.figures.quantities import set_x_axis
from parbench.reports.figures.spans import SpanRow, choose_num_bins, merge_spans
from parbench.reports.figures.style import color, new_figure
from parbench.reports.figures.timeline import share_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_NUMBERS = 400
_MICRO = 1e6
_TIME = replace(quantities.TIME_SINCE_START, title="time since the first action")


class Category(NamedTuple):
    """A kind of action of one virtual stage of a rank."""

    kind: str
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How finely a pipeline is drawn: the bins of a rank's row, and whether actions are numbered."""

    num_bins: int | None
    is_numbered: bool
    note: str


def timelines_of(facts: PipelineDetails) -> list[tuple[str, PipelineTimeline]]:
    """Return the simulated timeline, then the measured one, or what there is of them."""
    timelines = (("simulated", facts.predicted), ("measured", facts.measured))
    return [(name, timeline) for name, timeline in timelines if timeline]


def rows_of(facts: PipelineDetails, timeline: PipelineTimeline) -> list[SpanRow[Category]]:
    """Return a row for each rank."""
    rows: list[dict[Category, list[tuple[float, float]]]] = []
    for actions, stages in zip(timeline, facts.stages_by_rank, strict=True):
        row: dict[Category, list[tuple[float, float]]] = {}
        for action in actions:
            chunk = stages.index(action.action.stage)
            category = Category(action.action.kind, chunk)
            row.setdefault(category, []).append((action.start_us, action.stop_us))
        rows.append(row)
    return list(rows)


def choose_detail(facts: PipelineDetails, max_boxes: int = 6000) -> Detail:
    """Return the finest detail with at most ``max_boxes`` boxes, the same for both timelines."""
    timelines = timelines_of(facts)
    rows = [row for _, timeline in timelines for row in rows_of(facts, timeline)]
    num_actions = sum(len(actions) for _, timeline in timelines for actions in timeline)
    stop = compute_length_us(facts)
    num_bins = choose_num_bins(rows, 0.0, stop, max_boxes)
    is_numbered = num_bins is None and num_actions <= _MAX_NUMBERS
    note = ""
    if num_bins:
        resolution = format_seconds(stop / 1e6 / num_bins)
        note = f"Of {num_actions} actions, each {resolution} has the color of the longest."
    elif not is_numbered:
        note = f"The numbers of microbatches are left out of {num_actions} actions."
    return Detail(num_bins=num_bins, is_numbered=is_numbered, note=note)


def describe_pipeline(facts: PipelineDetails, repetition: int, detail: Detail) -> str:
    measured = f"repetition {repetition + 1} as measured."
    if facts.predicted:
        simulated = "Above: the schedule simulated with the mean time of each kind, no latency."
        return f"{simulated} Below: {measured} {detail.note}".rstrip()
    return f"{measured.capitalize()} {detail.note}".rstrip()


def compute_length_us(facts: PipelineDetails) -> float:
    """Return the length of the longer timeline in microseconds, which is never zero."""
    return max([1.0, *(find_stop_us(timeline) for _, timeline in timelines_of(facts))])


def find_stop_us(timeline: PipelineTimeline) -> float:
    """Return when the last action of a timeline ends, in microseconds, which is never zero."""
    return max([1, *(actions[-1].stop_us for actions in timeline if actions)])


_ACTION_LOOKS = {
    "F": ("F: forward", 0.9),
    "B": ("B: backward", 0.78),
    "I": ("I: input gradient", 0.66),
    "W": ("W: weight gradient", 0.54),
}
"""The name and the height of each kind of action, so that color is not needed."""


def chart_measured_pipeline(title: str, step: Pipeline, *, is_wide: bool, max_boxes: int) -> Chart:
    """Return the measured actions alone."""
    facts = msgspec.structs.replace(step.facts, predicted=None)
    detail = choose_detail(facts, max_boxes)
    return Chart(
        name="step",
        title=title,
        caption=f"Repetition {step.repetition + 1}, as measured.",
        draw=partial(_draw_pipeline, facts, detail, compute_length_us(facts), is_wide),
        is_wide=is_wide,
    )


def chart_pipelines(steps: Sequence[tuple[str, Pipeline]], max_boxes: int) -> Iterator[Chart]:
    """Yield the simulated actions above the measured ones, of each step with its label."""
    axes = share_axis([compute_length_us(step.facts) for _, step in steps])
    for number, ((label, step), axis) in enumerate(zip(steps, axes, strict=True), start=1):
        length_us, note = axis
        detail = choose_detail(step.facts, max_boxes // len(steps))
        description = describe_pipeline(step.facts, step.repetition, detail)
        yield Chart(
            name=number_name("pipeline", number),
            title=f"Pipeline: {label}",
            caption=f"{description}{note}",
            draw=partial(_draw_pipeline, step.facts, detail, length_us, True),
            is_wide=True,
        )


def chart_predicted_pipeline(name: str, title: str, caption: str, facts: PipelineDetails) -> Chart:
    detail = choose_detail(facts)
    return Chart(
        name=name,
        title=title,
        caption=f"{caption} {detail.note}".rstrip(),
        draw=partial(_draw_pipeline, facts, detail, compute_length_us(facts), True),
        is_wide=True,
    )


def _draw_pipeline(
    facts: PipelineDetails, detail: Detail, length_us: float, is_wide: bool
) -> "Figure":
    charts = timelines_of(facts)
    rank_inches = max(0.06, min(0.2, 2.6 / facts.ranks))
    height = 0.4 + (0.25 + rank_inches * facts.ranks) * len(charts)
    figure, all_axes = new_figure(height, is_wide=is_wide, num_rows=len(charts))
    categories = set()
    for axes, (name, actions) in zip(all_axes, charts, strict=True):
        rows = rows_of(facts, actions)
        categories |= {category for row in rows for category in row}
        set_x_axis(axes, _TIME, 0.0, length_us / _MICRO)
        _draw_actions(axes, rows, detail, length_us)
        if detail.is_numbered:
            _number_actions(axes, actions)
        stop = format_seconds(find_stop_us(actions) / _MICRO)
        axes.set_title(f"{name}: {stop}")
        axes.set_ylim(facts.ranks, 0)
        ranks = range(0, facts.ranks, -(-facts.ranks // 16))
        axes.set_yticks([rank + 0.5 for rank in ranks], [f"rank {rank}" for rank in ranks])
        axes.label_outer()
    add_patch_legend(figure, _pipeline_legend(categories), columns=8 if is_wide else 3)
    return figure


def _pipeline_legend(categories: set[Category]) -> dict[str, Mapping[str, Any]]:
    kinds = {category.kind for category in categories}
    legend: dict[str, Mapping[str, Any]] = {
        name: _look_of_action(Category(kind))
        for kind, (name, _) in _ACTION_LOOKS.items()
        if kind in kinds
    }
    num_chunks = 1 + max(category.chunk for category in categories)
    if num_chunks > 1:
        name = f"paler: later of {num_chunks} virtual stages"
        legend[name] = _look_of_action(Category("F", 1))
    return legend


def _draw_actions(
    axes: "Axes",
    rows: Sequence[Mapping[Category, Sequence[tuple[float, float]]]],
    detail: Detail,
    length_us: float,
) -> None:
    boxes: dict[Category, list[Box]] = {}
    for rank, row in enumerate(rows):
        for category, spans in merge_spans(row, 0.0, length_us, detail.num_bins).items():
            height = _ACTION_LOOKS[category.kind][1]
            boxes.setdefault(category, []).extend(
                Box(start / _MICRO, stop / _MICRO, rank + 0.5, height) for start, stop in spans
            )
    for category in sorted(boxes):
        look: dict[str, Any] = dict(_look_of_action(category))
        if detail.num_bins is None:
            look |= {"edgecolor": color("back"), "linewidth": 0.4}
        draw_boxes(axes, boxes[category], look, _ACTION_LOOKS[category.kind][0])


def _look_of_action(category: Category) -> dict[str, Any]:
    """Return the color of a kind, paler for later virtual stages."""
    alpha = max(0.15, 0.65 * 0.55**category.chunk)
    return {"facecolor": color(style.PIPELINE[category.kind]), "alpha": alpha}


def _number_actions(axes: "Axes", timeline: PipelineTimeline) -> None:
    """Write the kind and the microbatch on an action, or only the microbatch, where it fits."""
    for rank, actions in enumerate(timeline):
        for action in actions:
            number = str(action.action.microbatch)
            texts = (f"{action.action.kind}{number}", number)
            start = action.start_us / _MICRO
            stop = action.stop_us / _MICRO
            write_between(axes, start, stop, rank + 0.5, *texts, fontsize=style.FONT_POINTS - 1)
