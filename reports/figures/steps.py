"""Figures of training steps: step times, parts of profiled steps, and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_bytes
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.figures import quantities, style
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import read_interval
from parbench.reports.figures.primitives import (
    IntervalRow,
    add_patch_legend,
    draw_intervals,
    draw_stacks,
    look_of_part,
)
from parbench.reports.figures.quantities import AxisQuantity, set_x_axis
from parbench.reports.figures.style import color, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_REPETITIONS = 20
"""The largest number of repetitions that are drawn next to an interval."""
_LOG_FROM_RATIO = 10.0
Stacks = Mapping[str, Mapping[str, float]]
"""The lengths of the parts of each bar, keyed by the label of the bar and then by part."""


def chart_step_times(steps: Mapping[str, CaseResult]) -> Chart | None:
    """Return a chart of the step time of each case with its 95 % interval and its repetitions.

    ``steps`` are keyed by label. None if no step time is known.
    """
    intervals = []
    for label, step in steps.items():
        interval = read_interval(step.metrics.get(step.headline))
        if interval:
            repetitions = list(step.by_repetition(step.headline).values())
            parts = repetitions[:MAX_REPETITIONS] if len(repetitions) > 1 else []
            intervals.append(IntervalRow(label=label, interval=interval, parts=parts))
    if not intervals:
        return None

    def draw() -> "Figure":
        """Draw a row for each step, on a logarithmic axis if times differ by a factor of ten."""
        figure, [axes] = new_figure(0.35 + sum(0.36 if row.parts else 0.28 for row in intervals))
        draw_intervals(axes, intervals)
        ends = [end for row in intervals for end in (*row.interval, *row.parts)]
        low = min(ends)
        high = max(ends)
        # Lengths start at zero unless the shortest would be invisible.
        is_log = high / low > _LOG_FROM_RATIO
        quantity = replace(quantities.STEP_TIME, is_log=is_log)
        set_x_axis(axes, quantity, low / 1.1 if is_log else 0.0, high * 1.02)
        return figure

    return Chart(
        name="step_times",
        title="Step time",
        caption="Diamonds are means over repetitions, squares are single repetitions. Lines are "
        "95 % intervals, within the repetition if there is only one.",
        draw=draw,
    )


def chart_breakdown(stacks: Stacks) -> Chart | None:
    """Return a chart of the parts of each profiled step, such as compute and idle, in seconds.

    None if no step was profiled.
    """
    return chart_stacks(
        "step_breakdown",
        "Where the time goes: the parts of each step",
        "Each bar is a profiled step.",
        list(stacks.items()),
        style.STEP,
        replace(quantities.STEP_TIME, title="time of a profiled step"),
    )


def chart_memory(stacks: Stacks) -> Chart | None:
    """Return a chart of the measured memory of each step by component, in bytes.

    Each component is a maximum over ranks. None without data.
    """
    quantity = AxisQuantity(
        title="memory, maximum over ranks", text=format_bytes, is_log=False, base=2
    )
    return chart_stacks(
        "memory",
        "Memory by component, measured",
        "Each bar is the rank that needs most.",
        list(stacks.items()),
        style.MEMORY,
        quantity,
    )


def chart_stacks(
    name: str,
    title: str,
    caption: str,
    stacks: Sequence[tuple[str, Mapping[str, float]]],
    hues: Mapping[str, str],
    quantity: AxisQuantity,
    limit: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart with a horizontal stacked bar for each stack that has a part above zero.

    A stack is (label, lengths of its parts keyed by part), in units of ``quantity``. ``hues`` has
    the name of the color of each part. ``limit`` is (position, name) of a line across the bars. The
    result is None if no stack has a part above zero.
    """
    bars = []
    for label, stack in stacks:
        positive = {part: value for part, value in stack.items() if value > 0}
        if positive:
            bars.append((label, positive))
    if not bars:
        return None

    def draw() -> "Figure":
        """Draw the bars, the line of the limit, and the legend of the parts."""
        part_names = list(dict.fromkeys(part for _, stack in bars for part in stack))
        # All bars have one order: compute, exposed communication by axis, copy, idle.
        part_names.sort(key=lambda part: (part != "compute", part == "idle", part == "copy"))
        looks = {part: look_of_part(part, hues.get(part, "grey")) for part in part_names}
        exposed = [part for part in part_names if part.startswith("exposed ")]
        # Several axes look alike, so their names are on the bars.
        bar_names = {part: part.removeprefix("exposed ") for part in exposed if len(exposed) > 1}
        legend = {
            "exposed communication" if part in bar_names else part: look
            for part, look in looks.items()
        }
        longest = max(sum(stack.values()) for _, stack in bars)
        longest = max(longest, limit[0] if limit else 0.0) * 1.01
        figure, [axes] = new_figure(0.35 + 0.34 * len(bars))
        set_x_axis(axes, quantity, 0.0, longest)
        draw_stacks(axes, bars, looks, bar_names)
        if limit:
            axes.axvline(limit[0], color=color("text"), linestyle=(0, (6, 2)), linewidth=0.8)
            axes.set_title(limit[1], loc="right")
        add_patch_legend(figure, legend, columns=4)
        return figure

    return Chart(name=name, title=title, caption=caption, draw=draw)
