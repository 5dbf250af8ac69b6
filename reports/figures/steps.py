"""Figures of training steps: parts of profiled steps, memory, and the steps of a plan."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_bytes, format_seconds
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.primitives import (
    LIMIT_DASHES,
    add_legend,
    draw_pareto_front,
    draw_stacks,
)
from parbench.reports.figures.quantities import AxisQuantity, set_x_axis, set_y_axis
from parbench.reports.figures.style import color, look_of_part, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Stacks = Mapping[str, Mapping[str, float]]
"""The lengths of the parts of each bar, keyed by the label of the bar and then by part.

The lengths are in seconds for time and in bytes for memory.
"""
_STEP_SECONDS = AxisQuantity(title="step time", text=format_seconds)


def chart_breakdown(stacks: Stacks) -> Chart | None:
    """Return a chart of the parts of each profiled step, such as compute and idle, in seconds.

    ``stacks`` has the seconds of the parts, keyed by the label of the step and then by part. None
    if no step was profiled.
    """
    title = "Where the time goes: the parts of each step"
    caption = "Each bar is a profiled step."
    return chart_stacks("step_breakdown", title, caption, stacks, quantities.STEP_TIME)


def chart_memory(stacks: Stacks) -> Chart | None:
    """Return a chart of the measured memory of each step by component, in bytes.

    ``stacks`` has the bytes of each component, such as parameters, keyed by the label of the step
    and then by component. The bytes are maxima over ranks. None if no component has bytes.
    """
    title = "Memory by component, measured"
    quantity = AxisQuantity(
        title="memory, maximum over ranks", text=format_bytes, is_log=False, base=2
    )
    caption = "Each part of a bar is the maximum over ranks."
    return chart_stacks("memory", title, caption, stacks, quantity)


def chart_stacks(
    name: str,
    title: str,
    caption: str,
    stacks: Stacks,
    quantity: AxisQuantity,
    limit: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart with a horizontal stacked bar for each stack that has a part above zero.

    ``name`` is the id of the chart and the stem of its file. ``stacks`` has the lengths of parts,
    keyed by the label of the bar and then by part. ``quantity`` is the quantity of the x axis, and
    lengths are in its unit. ``limit`` is (position, name) of a vertical line across the bars, None
    for no line. The result is None if no bar has a part above zero.
    """
    bars = []
    for label, stack in stacks.items():
        positive = {part: value for part, value in stack.items() if value > 0}
        if positive:
            bars.append((label, positive))
    if not bars:
        return None

    def draw() -> "Figure":
        """Draw the bars, the line of the limit, and the legend of the parts."""
        parts = list(dict.fromkeys(part for _, stack in bars for part in stack))
        # All bars have one order: compute, exposed communication by axis, copy, idle.
        parts.sort(key=lambda part: (part != "compute", part == "idle", part == "copy"))
        looks = {part: look_of_part(part, number) for number, part in enumerate(parts)}
        longest = max(sum(stack.values()) for _, stack in bars)
        height = 0.35 + 0.34 * len(bars) + (0.25 if limit else 0.0)
        figure, [axes] = new_figure(height)
        set_x_axis(axes, quantity, 0.0, max(longest, limit[0] if limit else 0.0) * 1.01)
        draw_stacks(axes, bars, looks)
        if limit:
            axes.axvline(limit[0], color=color("text"), linestyle=LIMIT_DASHES, linewidth=0.8)
            axes.set_title(limit[1], loc="right")
        add_legend(figure)
        return figure

    return Chart(name=name, title=title, caption=caption, draw=draw)


def chart_pareto(
    name: str, title: str, caption: str, points: Sequence[tuple[float, float, str]]
) -> Chart:
    """Return a chart of step time over memory: all steps, and the fastest step for each memory.

    ``name`` is the id of the chart and the stem of its file. ``points`` are (memory of a
    rank in GB, seconds, label).
    """

    def draw() -> "Figure":
        """Draw the steps as points, and the Pareto front as a line."""
        figure, [axes] = new_figure(2.0)
        set_x_axis(axes, quantities.PLANNED_MEMORY, 0.0, max(x for x, _, _ in points) * 1.04)
        seconds = [y for _, y, _ in points]
        set_y_axis(axes, _STEP_SECONDS, min(seconds) / 1.1, max(seconds) * 1.1)
        draw_pareto_front(axes, points)
        add_legend(figure)
        return figure

    return Chart(name=name, title=title, caption=caption, draw=draw)
