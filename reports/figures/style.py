"""The style of all figures: colors for light and dark pages, sizes for print, and settings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = {
    "blue": ("#1f6fd6", "#4a8dff"),
    "orange": ("#d67400", "#f46a0e"),
    "green": ("#369564", "#8be9a1"),
    "purple": ("#7b1fa2", "#c070c1"),
    "gold": ("#817029", "#f9db69"),
    "teal": ("#129bb0", "#84ebf5"),
    "red": ("#8c1028", "#f45454"),
    "grey": ("#70757a", "#a9969e"),
}
"""The hex codes (light theme, dark theme) of each color of marks and lines, keyed by name.

Each color has a contrast of at least 3:1 with the background of its theme. All remain
distinguishable without red or green vision. The values were found by search.
"""

PAGE = {
    "back": ("#ffffff", "#14171b"),
    "raised": ("#f4f5f7", "#1e2329"),
    "text": ("#1b1f24", "#e4e7eb"),
    "muted": ("#59636e", "#a3acb7"),
    "faint": ("#d5d9de", "#3a414a"),
}
"""The hex codes (light theme, dark theme) of the page's background, text and rules, by name."""

PARTS = {
    "compute": "blue",
    "hidden": "teal",
    "exposed": "orange",
    "copy": "gold",
    "non-pipeline": "purple",
    "update": "purple",
    "parameters": "blue",
    "gradients": "gold",
    "optimizer": "green",
    "activations": "purple",
    "buffers": "teal",
}
"""The color (name in ``HUES``) of each part of a training step's time or memory.

The key is the first word of the part: ``exposed`` for ``exposed dp``. Other parts are grey.
"""
OPERATIONS = {
    "all_reduce": "blue",
    "all_gather": "orange",
    "reduce_scatter": "green",
    "all_to_all": "purple",
    "broadcast": "red",
    "sendrecv": "teal",
}
"""The color (name in ``HUES``) of each well-known operation.

The color of other operations follows from their order in a chart.
"""

HATCHES = ("//////", "xxxxxx", "------")
"""The hatches of parts of a step that are exposed communication, such as those of mesh axes."""
COLUMN_INCHES = 3.5
PAGE_INCHES = 7.16
"""The full width of a two-column paper, whose single columns are ``COLUMN_INCHES`` wide."""
FONT_POINTS = 6.5


def color(name: str) -> str:
    """Return the hex code of a color in the light theme, given its name in ``HUES`` or ``PAGE``."""
    return (HUES | PAGE)[name][0]


def look_of_part(part: str, number: int = 0) -> dict[str, Any]:
    """Return the arguments of a matplotlib patch for a part of a step, such as ``compute``.

    Exposed communication is hatched, and idle time is pale. ``number`` is the index of the part in
    the chart. It selects the hatch, so that exposed communication on several axes differs.
    """
    hue = PARTS.get(part.partition(" ")[0], "grey")
    look: dict[str, Any] = {"label": part, "facecolor": color(hue)}
    if part.startswith("exposed"):
        look |= {"hatch": HATCHES[number % len(HATCHES)], "edgecolor": color("back")}
    if part == "idle":
        look["alpha"] = 0.4
    return look


def variables_by_color() -> dict[str, str]:
    """Return the CSS variable of each light color, keyed by hex code.

    An example is ``{"#1f6fd6": "var(--blue)"}``. Figures are drawn in light colors, which the page
    replaces by these variables.
    """
    return {light: f"var(--{name})" for name, (light, _) in (HUES | PAGE).items()}


def style_sheet() -> str:
    """Return CSS that sets the variable of each color, for light and dark pages.

    Print uses the light colors.
    """
    colors = HUES | PAGE
    light = ";".join(f"--{name}:{pair[0]}" for name, pair in colors.items())
    dark = ";".join(f"--{name}:{pair[1]}" for name, pair in colors.items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


SETTINGS: Any = {
    "font.size": FONT_POINTS,
    "text.color": color("text"),
    "text.parse_math": False,
    "axes.edgecolor": color("muted"),
    "axes.labelcolor": color("text"),
    "axes.titlesize": FONT_POINTS,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": color("faint"),
    "xtick.color": color("muted"),
    "ytick.color": color("muted"),
    "xtick.labelcolor": color("text"),
    "ytick.labelcolor": color("text"),
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "lines.linewidth": 1.1,
    "lines.markersize": 2.5,
    "patch.linewidth": 0,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.borderaxespad": 0.6,
    "legend.handlelength": 3.0,
    "figure.constrained_layout.w_pad": 0.02,
    "figure.constrained_layout.h_pad": 0.02,
    "figure.dpi": 72,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}
"""Matplotlib's settings for drawing and writing a figure."""


@contextmanager
def use_style() -> Iterator[None]:
    """Apply ``SETTINGS`` to matplotlib inside a ``with`` block.

    Warnings about letters that the font lacks are suppressed.
    """
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def new_figure(
    height_inches: float, *, is_wide: bool = False, num_rows: int = 1
) -> "tuple[Figure, list[Axes]]":
    """Return a new figure and its axes, which share the x axis, in order from top to bottom.

    ``num_rows`` is the number of axes. The figure is as wide as the page if ``is_wide``, otherwise
    as one column of a paper.
    """
    from matplotlib.figure import Figure

    width = PAGE_INCHES if is_wide else COLUMN_INCHES
    figure = Figure(figsize=(width, height_inches), layout="constrained")
    axes = figure.subplots(num_rows, 1, squeeze=False, sharex=True)
    return figure, [row[0] for row in axes]
