"""Step times repetition by repetition, where the time of a step went, what its memory holds, and an area of that over
time."""

from collections.abc import Callable, Mapping, Sequence

from parbench.reports import cells
from parbench.reports.analysis.labels import short_labels
from parbench.reports.analysis.steps import broken_down, memory_lines, parts
from parbench.reports.analysis.summary import Row
from parbench.reports.figures.lines import extent
from parbench.reports.figures.palette import MEMORY, STEP, css_of
from parbench.reports.figures.svg import (
    HATCHED,
    Drawing,
    Scale,
    elided,
    even_ticks,
    log_ticks,
    width_of,
)

_LOG_FROM_RATIO, _MAX_REPETITIONS = 10, 20
_LEFT, _RIGHT, _MOST_LETTERS = 10.0, 500.0, 68
_NAME, _BAR, _ROW = 18.0, 20.0, 46.0
EXPOSED = "exposed "
Stack = tuple[str, Mapping[str, float]]
"""A label, and the parts of its bar."""


def draw_steps(rows: Sequence[Row]) -> Drawing | None:
    """Return each step's first repetitions above it all, which alone is all there is to draw of one."""
    labels, found = short_labels(rows), []
    for row in rows:
        repetitions = [record.metrics.get(row.headline) for record in row.measured]
        known = [told for metric in repetitions if (told := extent(metric))]
        if whole := extent(row.metrics.get(row.headline)):
            found.append(
                (
                    labels[row.case.id],
                    whole,
                    known[:_MAX_REPETITIONS] if len(repetitions) != 1 else [],
                    known,
                )
            )
    if not found:
        return None
    ends = [end for _, whole, _, known in found for one in (whole, *known) for end in one[1:]]
    # lengths compare from zero on, unless the shortest could not be seen
    is_log = max(ends) / min(ends) > _LOG_FROM_RATIO
    low, high = (min(ends) if is_log else 0.0), max(ends) * 1.02
    x = Scale(low=low, high=high, first=_LEFT, last=_RIGHT, is_log=is_log)
    chart = Drawing()
    for label, whole, shown, _ in found:
        chart.text(_LEFT, chart.top + 6, elided(label, _MOST_LETTERS))
        for i, (value, least, most) in enumerate(shown):
            y = chart.top + _NAME + 14 * i / max(1, len(shown) - 1)
            chart.rule(
                f"M{x(least):.1f} {y:.1f}H{x(most):.1f}", "stroke:currentColor;stroke-width:.8"
            )
            chart.box(x(value) - 1.5, y - 1.5, 3, 3, "fill:currentColor")
        value, least, most = whole
        y = chart.top + _NAME + (20 if shown else 4)
        chart.rule(f"M{_LEFT:.1f} {y:.1f}H{_RIGHT:.1f}")
        chart.rule(
            f"M{x(least):.1f} {y:.1f}H{x(most):.1f}",
            f"stroke:{css_of(STEP['compute'])};stroke-width:3",
        )
        chart.path(f"M{x(value) - 5:.1f} {y:.1f}l5 -5l5 5l-5 5z", f"fill:{css_of(STEP['compute'])}")
        chart.top += _ROW if shown else _ROW - 16
    ticks = log_ticks(low, high, cells.duration) if is_log else even_ticks(high, cells.duration)
    chart.axis_below(x, ticks, "step time, log axis" if is_log else "step time")
    return chart


def draw_breakdown(rows: Sequence[Row]) -> Drawing | None:
    stacks = {row.case.id: parts(row) for row in broken_down(rows)}
    return draw_stacks(_labelled(rows, stacks), STEP, "time of a traced step", cells.duration)


def draw_memory(rows: Sequence[Row]) -> Drawing | None:
    stacks: dict[str, dict[str, float]] = {}
    for line in memory_lines(rows):
        stacks.setdefault(line.row.case.id, {})[line.component] = line.num_bytes("memory") or 0.0
    return draw_stacks(
        _labelled(rows, stacks), MEMORY, "memory of the fullest rank", cells.num_bytes
    )


def _labelled(rows: Sequence[Row], stacks: Mapping[str, Mapping[str, float]]) -> list[Stack]:
    labels = short_labels(rows)
    return [(labels[row.case.id], stacks[row.case.id]) for row in rows if row.case.id in stacks]


def draw_stacks(
    stacks: Sequence[Stack],
    hues: Mapping[str, str],
    quantity: str,
    words: Callable[[float | None], str],
    limit: tuple[float, str] | None = None,
) -> Drawing | None:
    """Draw a bar for each stack that has a part above zero; parts have shares where there is room."""
    known = [
        (label, {part: max(0.0, value) for part, value in stack.items()}) for label, stack in stacks
    ]
    bars = [(label, stack) for label, stack in known if any(stack.values())]
    if not bars:
        return None
    every = dict.fromkeys(part for _, stack in bars for part in stack)
    # in an order that all bars share: computing first, then every axis, copy and idle last
    shown = [part for part in every if any(stack.get(part) for _, stack in bars)]
    shown.sort(key=lambda part: (part != "compute", part == "idle", part == "copy"))
    styles = {part: part_style(part, hues.get(part, "grey")) for part in shown}
    longest, chart = (
        max(limit[0] if limit else 0.0, *(sum(stack.values()) for _, stack in bars)),
        Drawing(),
    )
    x = Scale(low=0.0, high=longest, first=_LEFT, last=_RIGHT)
    # several axes look alike, and are named where they stand
    exposed = [part for part in shown if part.startswith(EXPOSED)]
    named = {
        styles[part]: "exposed communication" if part in exposed[1:] else part for part in shown
    }
    chart.legend(((words, 1.0, style) for style, words in named.items()), _LEFT)
    top = chart.top
    for label, stack in bars:
        total, before = sum(stack.values()), 0.0
        chart.text(_LEFT, chart.top + 6, elided(label, _MOST_LETTERS))
        for part in shown:
            if value := stack.get(part, 0.0):
                left, width, share = (
                    x(before),
                    x(before + value) - x(before),
                    f"{100 * value / total:.0f} %",
                )
                edge = {"idle": ";stroke:currentColor"}.get(
                    part, ";stroke:var(--back)" if part in exposed[1:] else ""
                )
                told = f"{part}: {words(value)}, {share}"
                chart.box(left, chart.top + _NAME, width, _BAR, f"{styles[part]}{edge}", told)
                axis = (
                    f"{part.removeprefix(EXPOSED)} {share}"
                    if part in exposed and len(exposed) > 1
                    else share
                )
                css = "" if part == "idle" else "on hatched" if part in exposed else "on"
                if shares := [one for one in (axis, share) if width > width_of(one) + 8]:
                    chart.text(
                        left + width / 2, chart.top + _NAME + _BAR / 2, shares[0], "middle", css=css
                    )
                before += value
        chart.top += _ROW
    if limit:
        chart.rule(
            f"M{x(limit[0]):.1f} {top:.1f}V{chart.top:.1f}",
            "stroke:currentColor;stroke-dasharray:8 3",
        )
        chart.text(x(limit[0]), chart.top + 8, limit[1], "end")
        chart.top += 20
    chart.axis_below(x, even_ticks(longest, words), quantity)
    return chart


def part_style(part: str, hue: str) -> str:
    """Return how a part of a step's time is filled: what is exposed is hatched, and idle time pale."""
    if part.startswith("exposed"):
        return f"fill:{HATCHED}"
    return f"fill:{css_of(hue)};fill-opacity:.4" if part == "idle" else f"fill:{css_of(hue)}"
