"""Figures of the changes between two runs, and of times over the runs of a history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_seconds
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.primitives import DASHES, IntervalRow, draw_intervals, shorten
from parbench.reports.figures.quantities import AxisQuantity, set_x_axis, set_y_axis
from parbench.reports.figures.style import color, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_EFFECTS = 40
"""The largest number of changes in one figure."""
MAX_HISTORY_SERIES = 6
"""The largest number of cases whose times one figure of the history shows."""


_CHANGE = AxisQuantity(
    title="change of time, + is slower",
    text=lambda fraction: f"{100 * fraction:+.4g} %",
    is_log=False,
)


def chart_effects(rows: Sequence[IntervalRow], threshold: float) -> Chart | None:
    """Return a chart of the relative change of each series with its 95 % interval.

    A series is one benchmark case with fixed parameters. ``rows`` have the change and its bounds as
    fractions: 0.05 is 5 % slower. ``threshold`` is the minimum relevant change, as a fraction. The
    range of smaller changes is shaded. The largest changes come first, and at most 40 are drawn.
    None without rows.
    """
    if not rows:
        return None
    drawn_rows = sorted(rows, key=lambda row: -abs(row.interval[0]))[:MAX_EFFECTS]

    def draw() -> "Figure":
        """Draw a row with a diamond and an interval for each change."""
        figure, [axes] = new_figure(0.4 + 0.27 * len(drawn_rows))
        axes.axvspan(-threshold, threshold, color=color("raised"))
        axes.axvline(0, color=color("muted"), linewidth=0.5)
        numbers = [number for row in drawn_rows for number in row.interval]
        width = max(threshold, *map(abs, numbers)) * 1.08
        set_x_axis(axes, _CHANGE, max(-1.0, -width), width)
        draw_intervals(axes, drawn_rows)
        return figure

    return Chart(
        name="effects",
        title="Change of each series",
        caption=f"Lines are 95 % intervals. {len(drawn_rows)} of {len(rows)} series are shown.",
        draw=draw,
    )


@dataclass(frozen=True, kw_only=True)
class HistorySeries:
    """The times of one benchmark case over the runs of a history, and the levels of its newest runs.

    A level is successive runs whose times differ only by noise.
    """

    label: str
    """The label of the case."""
    seconds_by_place: Mapping[int, float]
    """The time in seconds, keyed by the index from 0 of the run in the history."""
    levels: Sequence[tuple[int, int, float]]
    """The levels, oldest first: (index of the first run, index of the last run, seconds).

    The indices are those of ``seconds_by_place``. The seconds are the typical time of the level.
    """


def chart_history(runs: Sequence[str], series: Sequence[HistorySeries]) -> Chart:
    """Return a chart of the time of each case over the runs of a history, with its levels.

    A level is successive runs whose times differ only by noise. ``runs`` has the names of the runs
    in order. ``series`` has the times of each case, of which only the first
    ``MAX_HISTORY_SERIES`` are drawn.
    """
    drawn_series = series[:MAX_HISTORY_SERIES]

    def draw() -> "Figure":
        """Draw the series below each other, with the runs on a common x axis."""
        figure, all_axes = new_figure(
            0.4 + 1.1 * len(drawn_series), is_wide=True, num_rows=len(drawn_series)
        )
        places = range(0, len(runs), -(-len(runs) // 8))
        for axes, history in zip(all_axes, drawn_series, strict=True):
            seconds = list(history.seconds_by_place.values())
            axes.plot(list(history.seconds_by_place), seconds, "o", color=color("muted"))
            for start, stop, level in history.levels:
                axes.plot([start, stop], [level, level], color=color("blue"), linewidth=1.6)
                if start > history.levels[0][0]:
                    axes.axvline(start - 0.5, color=color("red"), linestyle=DASHES[2])
            title = shorten(history.label, 120)
            quantity = AxisQuantity(title=title, text=format_seconds, is_log=False)
            set_y_axis(axes, quantity, 0.95 * min(seconds), 1.05 * max(seconds))
            axes.set_xlim(-0.5, len(runs) - 0.5)
            axes.set_xticks(places, [runs[place] for place in places])
            axes.label_outer()
        return figure

    return Chart(
        name="history",
        title="Time over runs",
        caption="Dots are runs, lines are levels, and dashes are changes between them. "
        f"{len(drawn_series)} of {len(series)} series are shown.",
        draw=draw,
        is_wide=True,
    )
