"""Gantt charts of pipelines: the forward and backward actions of each rank over time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parbench.bench.results.details import PipelineDetails, PipelineTimeline
from parbench.bench.results.formatting import format_seconds
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lanes import (
    Lane,
    Look,
    choose_num_bins,
    describe_bins,
    draw_lanes,
)
from parbench.reports.figures.primitives import add_patch_legend, write_between
from parbench.reports.figures.quantities import set_x_axis
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


def chart_pipeline(
    name: str,
    title: str,
    caption: str,
    details: PipelineDetails,
    *,
    max_boxes: int = 6000,
    is_wide: bool = True,
) -> Chart:
    """Return a Gantt chart of the forward and backward actions of each rank of a pipeline.

    If the details have both, the simulated timeline is above the measured one. Above ``max_boxes``
    boxes, neighboring actions are merged for drawing.
    """
    recorded = {"simulated": details.predicted, "measured": details.measured}
    timelines = {name: timeline for name, timeline in recorded.items() if timeline}
    lanes = {name: make_lanes(details, timeline) for name, timeline in timelines.items()}
    seconds = max(1e-6, *map(get_end, timelines.values()))
    all_spans = [lane.spans for ranks in lanes.values() for lane in ranks]
    num_bins = choose_num_bins(all_spans, seconds, max_boxes)

    def draw() -> "Figure":
        """Draw one set of axes for each timeline, with a lane for each rank."""
        num_ranks = max(map(len, timelines.values()))
        rank_inches = max(0.06, min(0.2, 2.6 / num_ranks))
        height = 0.4 + (0.25 + rank_inches * num_ranks) * len(timelines)
        figure, all_axes = new_figure(height, is_wide=is_wide, num_rows=len(timelines))
        looks = _list_looks([lane for ranks in lanes.values() for lane in ranks], num_bins)
        for axes, (kind, timeline) in zip(all_axes, timelines.items(), strict=True):
            set_x_axis(axes, _TIME, 0.0, seconds)
            draw_lanes(axes, lanes[kind], looks, seconds, num_bins)
            if num_bins is None and sum(map(len, timeline)) <= _MAX_NUMBERED_ACTIONS:
                _number_actions(axes, timeline)
            axes.set_title(f"{kind}: {format_seconds(get_end(timeline))}")
            axes.set_ylim(num_ranks, 0)
            axes.label_outer()
        add_patch_legend(figure, _make_legend(looks), columns=8 if is_wide else 3)
        return figure

    return Chart(
        name=name,
        title=title,
        caption=caption + describe_bins(seconds, num_bins),
        draw=draw,
        is_wide=is_wide,
    )


def make_lanes(details: PipelineDetails, timeline: PipelineTimeline) -> list[Lane]:
    """Return a lane for each rank of a pipeline, with its actions as spans in seconds.

    A category is the kind of action and the index of the virtual stage on the rank, such as ``F0``.
    """
    label_interval = -(-details.ranks // _MAX_RANK_LABELS)
    lanes = []
    for rank, actions in enumerate(timeline):
        spans: dict[str, list[tuple[float, float]]] = {}
        for timed in actions:
            action = timed.action
            chunk = details.stages_by_rank[rank].index(action.stage)
            times = (timed.start_us / 1e6, timed.stop_us / 1e6)
            spans.setdefault(f"{action.kind}{chunk}", []).append(times)
        label = "" if rank % label_interval else f"rank {rank}"
        lanes.append(Lane(label, rank + 0.5, spans))
    return lanes


def get_end(timeline: PipelineTimeline) -> float:
    """Return the end of the last action on any rank in seconds since the first action."""
    return max((actions[-1].stop_us / 1e6 for actions in timeline if actions), default=0.0)


def _list_looks(lanes: Sequence[Lane], num_bins: int | None) -> dict[str, Look]:
    """Return the look of each category of spans in a pipeline chart, keyed by category.

    A category is the kind of action and the index of the virtual stage, such as ``F0``. Later
    virtual stages are paler. ``num_bins`` is None if every action is drawn. Only then actions have
    borders.
    """
    border = {"edgecolor": color("back"), "linewidth": 0.4} if num_bins is None else {}
    looks = {}
    categories = {category for lane in lanes for category in lane.spans}
    for category in sorted(categories, key=lambda name: (list(_KINDS).index(name[0]), name)):
        kind = category[0]
        chunk = int(category[1:])
        name, height = _KINDS[kind]
        alpha = max(0.15, 0.65 * 0.55**chunk)
        fill = {"facecolor": color(style.PIPELINE[kind]), "alpha": alpha}
        looks[category] = Look(name, fill | border, height)
    return looks


def _make_legend(looks: dict[str, Look]) -> dict[str, Any]:
    """Return the fills that the legend shows, keyed by name.

    There is one for each kind of action, and a pale one that explains later virtual stages, if any.
    """
    legend = {look.name: look.fill for category, look in looks.items() if category[1:] == "0"}
    num_chunks = 1 + max((int(category[1:]) for category in looks), default=0)
    if num_chunks > 1:
        legend[f"paler: later of {num_chunks} virtual stages"] = looks["F1"].fill
    return legend


def _number_actions(axes: "Axes", timeline: PipelineTimeline) -> None:
    """Write the kind and the microbatch on each action, such as ``F3``, where there is space."""
    font_size = style.FONT_POINTS - 1
    for rank, actions in enumerate(timeline):
        for timed in actions:
            number = str(timed.action.microbatch)
            texts = (f"{timed.action.kind}{number}", number)
            start = timed.start_us / 1e6
            stop = timed.stop_us / 1e6
            write_between(axes, start, stop, rank + 0.5, *texts, fontsize=font_size)
