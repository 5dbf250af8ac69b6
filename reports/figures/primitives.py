"""The drawing functions of all figures: lines, bars, intervals, boxes and legends.

Each draws on the matplotlib axes that it gets.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parbench.reports.figures import style
from parbench.reports.figures.quantities import format_share
from parbench.reports.figures.style import color

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
"""The line styles of lines that share a color, in order."""
HATCH = "//////"
MAX_LABEL_LETTERS = 64
MAX_LEGEND_LETTERS = 24
LEGEND_LINE_INCHES = 1.35 * style.FONT_POINTS / 72
MAX_ECDF_STEPS = 150
_BAR_HEIGHT = 0.42
_AXES_SHARE = 0.86
"""The approximate share of the width of a figure that its axes take."""
_WIDTH_OF_LETTER = 0.6
"""The width of a letter relative to the size of the font."""
_SHADES = 14
_PALEST = 0.06
_FULLEST = 0.72


class LinePoint(NamedTuple):
    """One point of a line, and the bounds of its 95 % interval."""

    x: float
    """The position on the x axis."""
    value: float
    """The position on the y axis."""
    low: float
    """The lower bound of the interval, the value if there is no interval."""
    high: float
    """The upper bound of the interval, the value if there is no interval."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A named line of a chart, and the curve that was fitted to its points."""

    label: str
    """The name in the legend."""
    points: tuple[LinePoint, ...]
    """The points in the order of x."""
    fit: tuple[tuple[tuple[float, float], ...], ...] = ()
    """The (x, y) points of each line of the fit, empty without a fit."""


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    """A row of a chart of intervals."""

    label: str
    """The text above the row."""
    interval: tuple[float, float, float]
    """The value, then the lower and the upper bound of its 95 % interval."""
    parts: Sequence[float] = ()
    """Single values that are drawn above the interval, such as those of repetitions."""
    hue: str = "blue"
    """The name of a color in ``style.HUES``."""


class Box(NamedTuple):
    """A rectangle to draw, in the units of the axes."""

    start: float
    """The left end on the x axis."""
    stop: float
    """The right end on the x axis."""
    middle: float
    """The middle on the y axis."""
    height: float
    """The height on the y axis."""


def describe(artist: "Artist", text: str) -> None:
    """Set the text that the page shows when the pointer is on an artist.

    The text is stored in the id of the artist, from which ``figures/svg.py`` makes an SVG title.
    """
    artist.set_gid(f"title:{text}")


def shorten(label: str, max_letters: int = MAX_LABEL_LETTERS) -> str:
    """Return a label with at most ``max_letters``: its first word, ``...``, and its last words.

    The last words of labels differ most.
    """
    if len(label) <= max_letters:
        return label
    head, *rest = label.split(" ")
    while rest and len(f"{head} ... {' '.join(rest)}") > max_letters:
        rest.pop(0)
    return f"{head} ... {' '.join(rest)}" if rest else f"{label[: max_letters - 3]}..."


def draw_lines(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draw each line with markers, its interval as a band, and its fit as thin dashes."""
    for line, look in zip(lines, choose_looks([line.label for line in lines]), strict=True):
        xs, values, lows, highs = zip(*line.points, strict=True)
        hue = look["color"]
        if lows != highs:
            axes.fill_between(xs, lows, highs, color=hue, alpha=0.13, linewidth=0)
        axes.plot(xs, values, marker="o", clip_on=False, **look)
        for piece in line.fit:
            axes.plot(*zip(*piece, strict=True), color=hue, linestyle=(0, (4, 2)), linewidth=0.6)


def choose_looks(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the arguments of ``Axes.plot`` for each label: color, dashes, label and id.

    Lines of the same color differ in their dashes.
    """
    hues = choose_hues(labels)
    return [
        {
            "label": label,
            "gid": f"title:{label}",
            "color": color(hue),
            "linestyle": DASHES[hues[:index].count(hue) % len(DASHES)],
        }
        for index, (label, hue) in enumerate(zip(labels, hues, strict=True))
    ]


def choose_hues(labels: Sequence[str]) -> list[str]:
    """Return the name of a color for each label, in order.

    A label that begins with an operation has the color of the operation, others have free colors.
    If all labels are of one operation, all have different colors as far as possible.
    """
    hues = [style.OPERATIONS.get(label.partition(" ")[0], "") for label in labels]
    if len(set(hues)) == 1 < len(hues):
        hues = [""] * len(hues)
    free_hues = [hue for hue in style.HUES if hue not in hues] or list(style.HUES)
    chosen: list[str] = []
    num_named = 0
    for hue in hues:
        if not hue:
            hue = free_hues[num_named % len(free_hues)]
            num_named += 1
        chosen.append(hue)
    return chosen


def draw_reference(axes: "Axes", value: float, label: str) -> None:
    """Draw a labeled dashed horizontal line across the axes, such as a bandwidth limit."""
    axes.axhline(value, color=color("text"), linestyle=(0, (6, 2)), linewidth=0.8, label=label)


def add_line_legend(figure: "Figure", axes: "Axes") -> None:
    """Add the legend of a line chart to the right of the axes, in the order of the lines' ends.

    If a name is long, the legend is below, and the figure becomes taller.
    """
    handles, labels = axes.get_legend_handles_labels()
    ends = [float(handle.get_ydata()[-1]) for handle in handles]  # type: ignore[attr-defined]
    order = sorted(range(len(ends)), key=lambda index: -ends[index])
    handles = [handles[index] for index in order]
    labels = [shorten(labels[index]) for index in order]
    if all(len(label) <= MAX_LEGEND_LETTERS for label in labels):
        figure.legend(handles, labels, loc="outside right upper")
        return
    height = figure.get_figheight() + LEGEND_LINE_INCHES * len(labels)
    figure.set_figheight(height)
    figure.legend(handles, labels, loc="outside lower left", ncols=1)


def add_patch_legend(
    figure: "Figure", names: Mapping[str, Mapping[str, Any]], columns: int
) -> None:
    """Add a legend of filled areas above the axes, and make the figure taller by its height.

    ``names`` has the arguments of ``Patch`` for each area, keyed by name. ``columns`` is the
    largest number of columns.
    """
    from matplotlib.patches import Patch

    handles = [Patch(label=name, **look) for name, look in names.items()]
    num_lines = math.ceil(len(handles) / columns)
    columns = math.ceil(len(handles) / num_lines)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE_INCHES * num_lines + 0.08)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.4)


def look_of_part(part: str, hue: str) -> dict[str, Any]:
    """Return the arguments of a matplotlib patch for a part of a step, such as ``compute``.

    ``hue`` is the name of its color. Exposed communication is hatched, and idle time is pale.
    """
    if part.startswith("exposed"):
        return {"facecolor": color("orange"), "hatch": HATCH, "edgecolor": color("back")}
    if part == "phase":
        return {"facecolor": color("raised"), "edgecolor": color("muted"), "linewidth": 0.3}
    return {"facecolor": color(hue), "alpha": 0.4 if part == "idle" else 1.0}


def draw_stacks(
    axes: "Axes",
    stacks: Sequence[tuple[str, Mapping[str, float]]],
    looks: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
) -> None:
    """Draw a horizontal stacked bar for each stack from top to bottom, with its label above.

    A stack is a label and the lengths of its parts, keyed by part. ``looks`` has the fill of each
    part, in the order of drawing. Each part shows its share of the bar where there is space, after
    its name if ``names`` has one.
    """
    lefts = [0.0] * len(stacks)
    for part, look in looks.items():
        widths = [parts.get(part, 0.0) for _, parts in stacks]
        bars = axes.barh(range(len(stacks)), widths, _BAR_HEIGHT, left=lefts, **look)
        text_color = color("text" if look.get("alpha", 1.0) < 1 else "back")
        background = {"facecolor": color("orange"), "pad": 0.8} if "hatch" in look else None
        for row, bar in enumerate(bars):
            share = format_share(widths[row] / sum(stacks[row][1].values()))
            describe(bar, f"{part}: {share}")
            texts = (f"{names[part]} {share}", share) if part in names else (share,)
            stop = lefts[row] + widths[row]
            write_between(axes, lefts[row], stop, row, *texts, color=text_color, bbox=background)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    label_rows(axes, [label for label, _ in stacks])


def write_between(
    axes: "Axes", start: float, stop: float, y: float, *texts: str, **options: Any
) -> None:
    """Write the first of ``texts`` that fits between two positions on the x axis, if any fits.

    ``y`` is the position on the y axis. ``options`` are arguments of ``Axes.text``.
    """
    left, right = axes.get_xlim()
    figure_points = 72 * axes.get_figure().get_figwidth()  # type: ignore[union-attr]
    space = (stop - start) / (right - left) * _AXES_SHARE * figure_points
    font_points = options.get("fontsize", style.FONT_POINTS)
    for text in texts:
        if _WIDTH_OF_LETTER * font_points * len(text) + 2 < space:
            middle = (start + stop) / 2
            options = {"ha": "center", "va": "center_baseline"} | options
            axes.text(middle, y, text, **options).set_in_layout(False)
            return


def label_rows(axes: "Axes", labels: Sequence[str]) -> None:
    """Set the y axis to one unit per row, the first at the top, and write a label above each."""
    axes.set_ylim(len(labels) - 0.65, -0.75)
    axes.set_yticks([])
    for row, label in enumerate(labels):
        axes.annotate(
            shorten(label),
            (0, row - 0.26),
            xycoords=("axes fraction", "data"),
            va="bottom",
            bbox={"facecolor": color("back"), "pad": 0.6},
        ).set_in_layout(False)


def draw_intervals(axes: "Axes", rows: Sequence[IntervalRow]) -> None:
    """Draw a row for each interval: a bar between its bounds, and a diamond at its value.

    The ``parts`` of a row, such as one value per repetition, are small squares above its bar.
    """
    for index, row in enumerate(rows):
        value, low, high = row.interval
        middle = index + (0.17 if row.parts else -0.04)
        axes.plot([low, high], [middle] * 2, color=color(row.hue), linewidth=2)
        [diamond] = axes.plot([value], [middle], "D", color=color(row.hue), markersize=4)
        describe(diamond, row.label)
        for part_index, part in enumerate(row.parts):
            y = index - 0.18 + 0.3 * part_index / max(1, len(row.parts) - 1)
            axes.plot([part], [y], "s", color=color("text"), markersize=1.6)
    label_rows(axes, [row.label for row in rows])


def draw_heat_map(
    axes: "Axes", values: NDArray[np.float64], format_value: Callable[[float], str] | None
) -> None:
    """Draw a cell for each value, darker for larger values relative to the largest.

    NaN leaves a cell empty. ``format_value`` returns the text in a cell, None for no texts. Cells
    of one shade are a single path, because a path for each would be several times larger.
    """
    boxes_by_shade: dict[int, list[Box]] = defaultdict(list)
    largest = max(value for value in values.flat if not math.isnan(value))
    for (row, column), value in np.ndenumerate(values):
        if math.isnan(value):
            continue
        box = Box(column + 0.02, column + 0.98, row + 0.5, 0.96)
        boxes_by_shade[round(value / largest * _SHADES)].append(box)
        if format_value:
            axes.text(
                column + 0.5, row + 0.5, format_value(value), ha="center", va="center_baseline"
            ).set_in_layout(False)
    for shade, boxes in sorted(boxes_by_shade.items()):
        alpha = _PALEST + (_FULLEST - _PALEST) * shade / _SHADES
        draw_boxes(axes, boxes, {"facecolor": color("blue"), "alpha": alpha})
    num_rows, num_columns = values.shape
    axes.set_xlim(0, num_columns)
    axes.set_ylim(num_rows, 0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def draw_boxes(
    axes: "Axes", boxes: Iterable[Box], look: Mapping[str, Any], description: str = ""
) -> None:
    """Draw boxes as a single path with the patch arguments ``look``.

    ``description`` is the text that the page shows when the pointer is on a box.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    rectangles = []
    for start, stop, middle, height in boxes:
        top = middle - height / 2
        bottom = middle + height / 2
        corners = [(start, top), (stop, top), (stop, bottom), (start, bottom), (start, top)]
        rectangles.append(Path(corners, closed=True))
    if not rectangles:
        return
    patch = PathPatch(Path.make_compound_path(*rectangles), **look)
    if description:
        describe(patch, description)
    axes.add_patch(patch)
    patch.set_in_layout(False)


def draw_ecdf(axes: "Axes", samples: Mapping[str, Sequence[float]]) -> None:
    """Draw the empirical distribution function of the samples of each label as a step line.

    At most ``MAX_ECDF_STEPS`` evenly spaced shares are drawn.
    """
    for values, look in zip(samples.values(), choose_looks(list(samples)), strict=True):
        shares = np.linspace(0.0, 1.0, min(len(values), MAX_ECDF_STEPS) + 1)
        quantiles = np.quantile(values, shares, method="inverted_cdf")
        axes.plot(quantiles, shares, drawstyle="steps-post", **look)


def draw_levels(
    axes: "Axes", values: Mapping[int, float], levels: Sequence[tuple[int, int, float]]
) -> None:
    """Draw dots for values, a horizontal line for each level, and dashes where a level begins.

    ``values`` are keyed by x position. A level is (first x position, last x position, value).
    """
    axes.plot(list(values), list(values.values()), "o", color=color("muted"), clip_on=False)
    for first, last, value in levels:
        axes.plot([first, last], [value, value], color=color("blue"), linewidth=1.6)
        if first > levels[0][0]:
            axes.axvline(first - 0.5, color=color("red"), linestyle=DASHES[2], linewidth=0.8)
