"""The drawing functions that figures share: lines, bars, intervals, boxes, cells and legends.

Each draws on the matplotlib axes that it gets.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (7, 2, 1.5, 2)),
)
"""The matplotlib line styles of lines that share a color: first solid, then three dashed ones."""
LIMIT_DASHES = (0, (6, 2))
"""The line style of a limit, such as the ceiling of bandwidth."""
MAX_LABEL_LETTERS = 64
LETTERS_PER_INCH = 18
"""The approximate number of letters in an inch of text."""
LEGEND_LINE_INCHES = 1.35 * style.FONT_POINTS / 72
"""The height of a line of a legend."""
_NUM_SHADES = 14
"""The number of shades of a heat map above the palest one."""


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


Lines = Mapping[str, Sequence[LinePoint]]
"""The points of each line of a chart in the order of x, keyed by the label of the line."""


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    """A row of a chart of intervals: a label, and a value with its 95 % interval."""

    label: str
    """The text above the row."""
    interval: tuple[float, float, float]
    """The value, then the lower and the upper bound of its 95 % interval, in units of the x axis.

    Without an interval, both bounds are the value.
    """
    hue: str = "blue"
    """The name of a color in ``style.HUES``."""


def describe(artist: "Artist", text: str) -> None:
    """Set the tooltip of a matplotlib artist: the text that the page shows at the pointer.

    The text is stored in the id of the artist, from which ``figures/svg.py`` makes an SVG title.
    """
    artist.set_gid(f"title:{text}")


def shorten(label: str, max_letters: int = MAX_LABEL_LETTERS) -> str:
    """Return a label, cut to ``max_letters`` by replacing its middle by ``...`` if it is longer."""
    if len(label) <= max_letters:
        return label
    half = (max_letters - 3) // 2
    return f"{label[:half]}...{label[-half:]}"


def draw_lines(axes: "Axes", lines: Lines) -> None:
    """Draw each line with markers at its points, and the 95 % intervals of its points as a band."""
    for points, look in zip(lines.values(), choose_looks(lines), strict=True):
        xs, values, lows, highs = zip(*points, strict=True)
        axes.plot(xs, values, marker="o", clip_on=False, **look)
        if lows != highs:
            axes.fill_between(xs, lows, highs, color=look["color"], alpha=0.13, linewidth=0)


def choose_looks(labels: Collection[str]) -> list[dict[str, Any]]:
    """Return the arguments of ``Axes.plot`` for each label: color, dashes and label.

    A label that begins with a well-known operation (``style.OPERATIONS``) gets the color of the
    operation, unless all labels begin with the same operation. Lines of one color differ in their
    dashes. The result is in the order of the labels.
    """
    operations = [label.partition(" ")[0] for label in labels]
    hues: list[str] = []
    looks = []
    for index, (label, operation) in enumerate(zip(labels, operations, strict=True)):
        hue = list(style.HUES)[index % len(style.HUES)]
        if len(set(operations)) > 1:
            hue = style.OPERATIONS.get(operation, hue)
        dashes = DASHES[hues.count(hue) % len(DASHES)]
        looks.append({"label": label, "color": color(hue), "linestyle": dashes})
        hues.append(hue)
    return looks


def add_legend(figure: "Figure") -> None:
    """Add a legend of all labels above the axes of a figure, and make the figure taller for it.

    The legend has as many columns as fit the width of the figure with the longest label.
    """
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(shorten(label), handle)
    longest = max(map(len, handles), default=0) + 7
    num_columns = max(1, int(figure.get_figwidth() * LETTERS_PER_INCH / longest))
    num_lines = -(-len(handles) // num_columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE_INCHES * num_lines + 0.08)
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=num_columns)


def draw_stacks(
    axes: "Axes",
    stacks: Sequence[tuple[str, Mapping[str, float]]],
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    """Draw a horizontal stacked bar for each stack from top to bottom, with its label above.

    A stack is (label, lengths of the parts keyed by part), with lengths in units of the x axis.
    ``looks`` has the arguments of ``Axes.barh`` for each part, keyed by part, in the order from
    left to right. Each part shows its percentage of the bar where there is space.
    """
    lefts = np.zeros(len(stacks))
    totals = [sum(parts.values()) for _, parts in stacks]
    for part, look in looks.items():
        widths = np.array([parts.get(part, 0.0) for _, parts in stacks])
        bars = axes.barh(range(len(stacks)), widths, 0.42, left=lefts, **look)
        for row, bar in enumerate(bars):
            share = format_share(widths[row] / totals[row])
            describe(bar, f"{part}: {share}")
            options: dict[str, Any] = {"color": color("text" if "alpha" in look else "back")}
            if "hatch" in look:
                options["bbox"] = {"facecolor": look["facecolor"], "pad": 0.8}
            write_between(axes, lefts[row], lefts[row] + widths[row], row, share, **options)
        lefts += widths
    label_rows(axes, [label for label, _ in stacks])


def write_between(
    axes: "Axes", start: float, stop: float, y: float, text: str, **options: Any
) -> None:
    """Write a text in the middle between two positions on the x axis, if it is narrow enough.

    ``y`` is the position on the y axis. ``options`` are arguments of ``Axes.text``.
    """
    left, right = axes.get_xlim()
    inches = axes.get_figure().get_figwidth()  # type: ignore[union-attr]
    space = (stop - start) / (right - left) * inches * LETTERS_PER_INCH
    if len(text) + 1 < space:
        options = {"ha": "center", "va": "center_baseline"} | options
        axes.text((start + stop) / 2, y, text, **options).set_in_layout(False)


def draw_pareto_front(axes: "Axes", points: Sequence[tuple[float, float, str]]) -> None:
    """Draw points (x, y, label), and a line through those with the least y for their x or less.

    The page shows the label of a point on the line at the pointer.
    """
    xs, ys, _ = zip(*points, strict=True)
    axes.plot(xs, ys, "o", color=color("muted"), markersize=2.5, alpha=0.6)
    front: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    front_xs, front_ys, _ = zip(*front, strict=True)
    look: dict[str, Any] = {"color": color("blue"), "drawstyle": "steps-post"}
    axes.plot(front_xs, front_ys, label="Pareto front", **look)
    for x, y, label in front:
        describe(axes.plot([x], [y], "o", color=color("blue"))[0], label)


def label_rows(axes: "Axes", labels: Sequence[str]) -> None:
    """Set the y axis of a chart of rows, and write each of ``labels`` above its row.

    A row has the height 1 on the axis. The first row is at the top.
    """
    axes.set_ylim(len(labels) - 0.65, -0.75)
    axes.set_yticks([])
    background = {"facecolor": color("back"), "pad": 0.6}
    transform = axes.get_yaxis_transform()
    for row, label in enumerate(labels):
        axes.text(
            0, row - 0.26, shorten(label), va="bottom", transform=transform, bbox=background
        ).set_in_layout(False)


def draw_intervals(axes: "Axes", rows: Sequence[IntervalRow]) -> None:
    """Draw a row for each interval: a bar between its bounds, and a diamond at its value."""
    for index, row in enumerate(rows):
        value, low, high = row.interval
        hue = color(row.hue)
        axes.plot([low, high], [index, index], color=hue, linewidth=2)
        axes.plot([value], [index], "D", color=hue, markersize=4)
    label_rows(axes, [row.label for row in rows])


def draw_heat_map(
    axes: "Axes", values: NDArray[np.float64], format_value: Callable[[float], str]
) -> None:
    """Draw a matrix of values as cells, which are the darker the larger the value is.

    ``values`` has rows from top to bottom, and NaN leaves a cell empty. The shade is relative to
    the largest value. ``format_value`` returns the text in a cell, which is written if there is
    space. All cells of one shade are a single path, because a path per cell would make the SVG
    several times larger.
    """
    num_rows, num_columns = values.shape
    axes.set_xlim(0, num_columns)
    axes.set_ylim(num_rows, 0)
    shades = np.round(values / np.nanmax(values) * _NUM_SHADES)
    for shade in range(_NUM_SHADES + 1):
        cells = np.argwhere(shades == shade).tolist()
        boxes = [(column + 0.02, column + 0.98, row + 0.5) for row, column in cells]
        look = {"facecolor": color("blue"), "alpha": 0.06 + shade / 21}
        draw_boxes(axes, boxes, 0.96, look)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            write_between(axes, column, column + 1, row + 0.5, format_value(value))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def draw_boxes(
    axes: "Axes",
    boxes: Iterable[tuple[float, float, float]],
    height: float,
    look: Mapping[str, Any],
    description: str = "",
) -> None:
    """Draw boxes of equal height as a single path.

    A box is (left end, right end, middle on the y axis), and ``height`` is in units of the y axis.
    ``look`` has the arguments of ``PathPatch``. ``description`` is the text that the page shows
    when the pointer is on a box.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    rectangles = []
    for start, stop, middle in boxes:
        top = middle - height / 2
        bottom = middle + height / 2
        corners = [
            (start, top),
            (stop, top),
            (stop, bottom),
            (start, bottom),
            (start, top),
        ]
        rectangles.append(Path(corners, closed=True))
    if rectangles:
        patch = PathPatch(Path.make_compound_path(*rectangles), **look)
        describe(patch, description)
        axes.add_patch(patch)
        patch.set_in_layout(False)
