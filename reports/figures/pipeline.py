"""Figures of pipelines: the actions of each rank over time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from parbench.bench.results.details import PipelineDetails, PipelineTimeline
from parbench.bench.results.formatting import format_seconds
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.primitives import Box, add_patch_legend, draw_boxes, write_between
from parbench.reports.figures.quantities import set_x_axis
from parbench.reports.figures.spans import SpanRow, choose_num_bins, merge_spans
from parbench.reports.figures.style import color, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_NUMBERED_ACTIONS = 400
_MAX_RANK_LABELS = 16
_TIME = replace(quantities.TIME_SINCE_START, title="time since the first action")
_KINDS = {
    "F": ("F: forward", 0.9),
    "B": ("B: backward", 0.78),
    "I": ("I: input gradient", 0.66),
    "W": ("W: weight gradient", 0.54),
}
"""The name and the height of each kind of action. Heights differ so that color is not needed."""


class Category(NamedTuple):
    """A kind of action of one virtual stage of a rank."""

    kind: str
    chunk: int = 0


def chart_pipeline(
    name: str,
    title: str,
    caption: str,
    details: PipelineDetails,
    *,
    max_boxes: int = 6000,
    is_wide: bool = True,
) -> Chart:
    """Return the actions of each rank: the simulated ones above the measured ones.

    If there are more actions than ``max_boxes``, each bin of time has the color of the longest.
    """
    timelines = list_timelines(details).values()
    rows = [row for timeline in timelines for row in build_rank_rows(details, timeline)]
    seconds = compute_length(details)
    num_bins = choose_num_bins(rows, 0.0, seconds, max_boxes)
    if num_bins:
        bin_width = format_seconds(seconds / num_bins)
        caption += f" Each {bin_width} has the color of its longest action."
    return Chart(
        name=name,
        title=title,
        caption=caption,
        draw=partial(_draw_pipeline, details, num_bins, is_wide),
        is_wide=is_wide,
    )


def list_timelines(details: PipelineDetails) -> dict[str, PipelineTimeline]:
    """Return the simulated and the measured timeline, or the one that exists."""
    timelines = {"simulated": details.predicted, "measured": details.measured}
    return {name: timeline for name, timeline in timelines.items() if timeline}


def build_rank_rows(
    details: PipelineDetails, timeline: PipelineTimeline
) -> list[SpanRow[Category]]:
    """Return the spans of each rank by kind and virtual stage, in seconds."""
    rows: list[SpanRow[Category]] = []
    for actions, stages in zip(timeline, details.stages_by_rank, strict=True):
        row: dict[Category, list[tuple[float, float]]] = {}
        for timed in actions:
            action = timed.action
            category = Category(action.kind, stages.index(action.stage))
            row.setdefault(category, []).append((timed.start_us / 1e6, timed.stop_us / 1e6))
        rows.append(row)
    return rows


def compute_length(details: PipelineDetails) -> float:
    """Return the seconds of the longer timeline, which are never zero."""
    return max([1e-6, *map(find_stop, list_timelines(details).values())])


def find_stop(timeline: PipelineTimeline) -> float:
    """Return when the last action of a timeline ends, in seconds, which are never zero."""
    return max([1e-6, *(actions[-1].stop_us / 1e6 for actions in timeline if actions)])


def _draw_pipeline(details: PipelineDetails, num_bins: int | None, is_wide: bool) -> "Figure":
    seconds = compute_length(details)
    timelines = list_timelines(details)
    rank_inches = max(0.06, min(0.2, 2.6 / details.ranks))
    height = 0.4 + (0.25 + rank_inches * details.ranks) * len(timelines)
    figure, all_axes = new_figure(height, is_wide=is_wide, num_rows=len(timelines))
    categories: set[Category] = set()
    for axes, (name, timeline) in zip(all_axes, timelines.items(), strict=True):
        rows = build_rank_rows(details, timeline)
        categories.update(category for row in rows for category in row)
        set_x_axis(axes, _TIME, 0.0, seconds)
        _draw_actions(axes, rows, num_bins, seconds)
        if num_bins is None and sum(map(len, timeline)) <= _MAX_NUMBERED_ACTIONS:
            _number_actions(axes, timeline)
        axes.set_title(f"{name}: {format_seconds(find_stop(timeline))}")
        _label_ranks(axes, details.ranks)
    add_patch_legend(figure, _make_legend(categories), columns=8 if is_wide else 3)
    return figure


def _label_ranks(axes: "Axes", num_ranks: int) -> None:
    axes.set_ylim(num_ranks, 0)
    interval = -(-num_ranks // _MAX_RANK_LABELS)
    ranks = range(0, num_ranks, interval)
    axes.set_yticks([rank + 0.5 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.label_outer()


def _make_legend(categories: set[Category]) -> dict[str, Mapping[str, Any]]:
    kinds = {category.kind for category in categories}
    legend: dict[str, Mapping[str, Any]] = {
        name: _look_of_action(Category(kind)) for kind, (name, _) in _KINDS.items() if kind in kinds
    }
    num_chunks = 1 + max(category.chunk for category in categories)
    if num_chunks > 1:
        name = f"paler: later of {num_chunks} virtual stages"
        legend[name] = _look_of_action(Category("F", 1))
    return legend


def _draw_actions(
    axes: "Axes", rows: Sequence[SpanRow[Category]], num_bins: int | None, seconds: float
) -> None:
    boxes: dict[Category, list[Box]] = {}
    for rank, row in enumerate(rows):
        merged = merge_spans(row, 0.0, seconds, num_bins)
        for category, spans in merged.items():
            _, height = _KINDS[category.kind]
            boxes.setdefault(category, []).extend(
                Box(start, stop, rank + 0.5, height) for start, stop in spans
            )
    for category in sorted(boxes):
        look = _look_of_action(category)
        if num_bins is None:
            look |= {"edgecolor": color("back"), "linewidth": 0.4}
        name, _ = _KINDS[category.kind]
        draw_boxes(axes, boxes[category], look, name)


def _look_of_action(category: Category) -> dict[str, Any]:
    """Return the color of a kind, paler for later virtual stages."""
    alpha = max(0.15, 0.65 * 0.55**category.chunk)
    return {"facecolor": color(style.PIPELINE[category.kind]), "alpha": alpha}


def _number_actions(axes: "Axes", timeline: PipelineTimeline) -> None:
    """Write the kind and the microbatch on an action, or only the microbatch, where it fits."""
    font_size = style.FONT_POINTS - 1
    for rank, actions in enumerate(timeline):
        for timed in actions:
            number = str(timed.action.microbatch)
            texts = (f"{timed.action.kind}{number}", number)
            start = timed.start_us / 1e6
            stop = timed.stop_us / 1e6
            write_between(axes, start, stop, rank + 0.5, *texts, fontsize=font_size)
