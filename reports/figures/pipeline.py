"""Gantt charts of pipelines: the forward and backward actions of each rank over time."""

from typing import TYPE_CHECKING, Any

from parbench.bench.results.details import PipelineDetails, PipelineTimeline
from parbench.bench.results.formatting import format_seconds
from parbench.reports.figures import style
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lanes import Lane, draw_lanes
from parbench.reports.figures.primitives import add_legend, write_between
from parbench.reports.figures.quantities import TIME_SINCE_START, set_x_axis
from parbench.reports.figures.style import color, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_NUMBERED_ACTIONS = 400
"""The actions of a pipeline step with more actions on all ranks have no text, such as ``F3``."""
_MAX_RANK_LABELS = 16
"""The largest number of ranks with a label at the left of a chart."""
_KINDS = {
    "F": ("F: forward", "blue"),
    "B": ("B: backward", "green"),
    "I": ("I: input gradient", "teal"),
    "W": ("W: weight gradient", "purple"),
}
"""The text in the legend and the color (``style.HUES``) of each kind of action, keyed by letter."""


def chart_pipeline(
    name: str, title: str, caption: str, details: PipelineDetails, *, is_wide: bool = True
) -> Chart:
    """Return a Gantt chart of the forward and backward actions of each rank of a pipeline.

    ``details`` has the simulated and the measured timeline of the actions. If both are known, the
    simulated one is drawn above the measured one. ``name`` is the id of the chart.
    """
    recorded = {"simulated": details.predicted, "measured": details.measured}
    timelines = {name: timeline for name, timeline in recorded.items() if timeline}
    seconds = max(1e-6, *map(get_end, timelines.values()))

    def draw() -> "Figure":
        """Draw one set of axes for each timeline, with a lane for each rank."""
        rank_inches = max(0.06, min(0.2, 2.6 / details.ranks))
        height = 0.4 + (0.25 + rank_inches * details.ranks) * len(timelines)
        figure, all_axes = new_figure(height, is_wide=is_wide, num_rows=len(timelines))
        looks = _list_looks(details.virtual_stages)
        for axes, (kind, timeline) in zip(all_axes, timelines.items(), strict=True):
            set_x_axis(axes, TIME_SINCE_START, 0.0, seconds * 1.003)
            draw_lanes(axes, make_lanes(details, timeline), looks, seconds)
            if sum(map(len, timeline)) <= _MAX_NUMBERED_ACTIONS:
                _number_actions(axes, timeline)
            axes.set_title(f"{kind}: {format_seconds(get_end(timeline))}")
            axes.set_ylim(details.ranks, 0)
            axes.label_outer()
        add_legend(figure)
        return figure

    if details.virtual_stages > 1:
        caption += " Later virtual stages of a rank are paler."
    return Chart(name=name, title=title, caption=caption, draw=draw, is_wide=is_wide)


def make_lanes(details: PipelineDetails, timeline: PipelineTimeline) -> list[Lane]:
    """Return a lane (row of a Gantt chart) for each rank, with its actions as spans in seconds.

    ``timeline`` has the actions of each rank of the pipeline that ``details`` describes. The
    category of a span is the kind of action and the index of the virtual stage on the rank, such as
    ``F0``.
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
        kinds = list(_KINDS)
        categories = sorted(spans, key=lambda category: (kinds.index(category[0]), category))
        ordered = {category: spans[category] for category in categories}
        lanes.append(Lane(label, rank + 0.5, ordered))
    return lanes


def get_end(timeline: PipelineTimeline) -> float:
    """Return the end of the last action on any rank, in seconds since the first action began.

    It is 0 without actions.
    """
    return max((actions[-1].stop_us / 1e6 for actions in timeline if actions), default=0.0)


def _list_looks(chunks: int) -> dict[str, dict[str, Any]]:
    """Return the matplotlib patch arguments of the spans in a pipeline chart, keyed by category.

    A category is the kind of action and the index of the virtual stage, such as ``F0``. Later
    virtual stages are paler. ``chunks`` is the number of virtual stages of a rank.
    """
    border = {"edgecolor": color("back"), "linewidth": 0.3}
    looks = {}
    for kind, (name, hue) in _KINDS.items():
        for chunk in range(chunks):
            alpha = max(0.15, 0.65 * 0.55**chunk)
            look = {"label": name, "facecolor": color(hue), "alpha": alpha}
            looks[f"{kind}{chunk}"] = look | border
    return looks


def _number_actions(axes: "Axes", timeline: PipelineTimeline) -> None:
    """Write the kind and the microbatch on each action, such as ``F3``, where there is space."""
    for rank, actions in enumerate(timeline):
        for timed in actions:
            text = f"{timed.action.kind}{timed.action.microbatch}"
            start, stop = timed.start_us / 1e6, timed.stop_us / 1e6
            write_between(axes, start, stop, rank + 0.5, text, fontsize=style.FONT_POINTS - 1)
