"""Bars: step times launch by launch, where the time of a step went, and what its memory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports import cells
from reports.analysis.labels import short_labels
from reports.analysis.step_parts import broken_down, memory_lines, parts
from reports.analysis.summary import Row
from reports.figures import plot
from reports.figures.svg import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_FROM_RATIO, _MANY_DECADES = 10, 1000
_MIN_LABELLED, _MAX_LAUNCHES = 0.12, 20


def draw_steps(rows: Sequence[Row]) -> Figure | None:
    drawable = [row for row in rows if plot.extent(row.metrics.get(row.headline))]
    if not drawable:
        return None
    labels = short_labels(rows)
    with plot.canvas(5.2, 1.0 + 0.5 * len(drawable)) as (figure, [axes]):
        ends = [end for place, row in enumerate(drawable) for end in _draw_step(axes, place, row)]
        plot.name_rows(axes, [labels[row.case.id] for row in drawable])
        # lengths compare from zero on, unless the shortest could not be seen
        axes.set_xlabel("step time")
        if (ratio := max(ends) / min(ends)) > _LOG_FROM_RATIO:
            axes.set_xscale("log")
            plot.log_ticks(axes.xaxis, cells.duration, (1.0,) if ratio > _MANY_DECADES else (1.0, 3.0))
            axes.set_xlabel("step time (log axis)")
        else:
            axes.set_xlim(0, max(ends) * 1.06)
            plot.even_ticks(axes.xaxis, max(ends), cells.duration)
    return figure


def _draw_step(axes: Axes, place: int, row: Row) -> list[float]:
    """Draw a step's first launches above it all, which alone is all there is to draw of one; return all their ends."""
    launches = [record.metrics[row.headline] for record in row.measured if row.headline in record.metrics]
    known = [found for metric in launches if (found := plot.extent(metric))]
    shown = known[:_MAX_LAUNCHES] if len(launches) != 1 else []
    first: dict[str, Any] = {"color": SERIES[0], "marker": "o", "markersize": 3.5}
    whole: dict[str, Any] = {"color": SERIES[1], "marker": "D", "markersize": 5.5}
    marks = [(place - 0.32 + 0.42 * i / max(1, len(shown) - 1), one, 0.9, first) for i, one in enumerate(shown)]
    if total := plot.extent(row.metrics[row.headline]):
        known.append(total)
        marks.append((place + (0.25 if len(launches) != 1 else 0), total, 1.8, whole))
    for height, (value, low, high), linewidth, style in marks:
        axes.hlines([height], low, high, color=style["color"], linewidth=linewidth)
        axes.plot([value], [height], linestyle="none", **style)
    return [end for _, low, high in known for end in (low, high)]


def draw_breakdown(rows: Sequence[Row]) -> Figure | None:
    return _draw_stacks(
        rows, {row.case.id: parts(row) for row in broken_down(rows)}, "time of a traced step", cells.duration
    )


def draw_memory(rows: Sequence[Row]) -> Figure | None:
    stacks: dict[str, dict[str, float]] = {}
    for line in memory_lines(rows):
        stacks.setdefault(line.row.case.id, {})[line.component] = line.num_bytes("memory") or 0.0
    return _draw_stacks(rows, stacks, "memory of the fullest rank", cells.num_bytes)


def _draw_stacks(
    rows: Sequence[Row], stacks: Mapping[str, Mapping[str, float]], quantity: str, words: Callable[[float], str]
) -> Figure | None:
    """Draw a bar for each row whose stack has a part above zero, by case id; parts have shares where there is room."""
    from matplotlib.patches import Rectangle

    known = {name: {part: max(0.0, value) for part, value in stack.items()} for name, stack in stacks.items()}
    bars = {row.case.id: known[row.case.id] for row in rows if any(known.get(row.case.id, {}).values())}
    if not bars:
        return None
    every = dict.fromkeys(part for stack in bars.values() for part in stack)
    shown = [part for part in every if any(stack.get(part) for stack in bars.values())]
    # in an order that all bars share: computing first, then every axis, copy and idle last
    shown.sort(key=lambda part: (part != "compute", part == "idle", part == "copy"))
    longest = max(sum(stack.values()) for stack in bars.values())
    labels, handles = short_labels(rows), []
    with plot.canvas(5.2, 1.4 + 0.5 * len(bars)) as (figure, [axes]):
        for i, part in enumerate(shown):
            style: dict[str, Any] = {"color": SERIES[i % len(SERIES)], "alpha": 0.55, "linewidth": 0}
            handles.append(Rectangle((0, 0), 1, 1, **style))
            for place, stack in enumerate(bars.values()):
                width, left = stack.get(part, 0.0), sum(stack.get(before, 0.0) for before in shown[:i])
                if width:
                    axes.barh(place, width, left=left, height=0.6, **style)
                if width > _MIN_LABELLED * longest:
                    share = f"{100 * width / sum(stack.values()):.0f} %"
                    axes.text(left + width / 2, place, share, ha="center", va="center")
        plot.name_rows(axes, [labels[case_id] for case_id in bars])
        axes.set_xlim(0, longest * 1.06)
        plot.even_ticks(axes.xaxis, longest, words)
        axes.set_xlabel(quantity)
        plot.add_legend(figure, handles, shown, columns=3)
    return figure
