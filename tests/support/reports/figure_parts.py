"""The lines, boxes and texts of a figure."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

Boxes = list[tuple[float, float]]


def find_boxes(axes: Axes) -> Mapping[str, Boxes]:
    """Return the starts and stops of all boxes by their description."""
    boxes: dict[str, Boxes] = {}
    for patch in axes.patches:
        description = str(patch.get_gid()).removeprefix("title:")
        vertices = patch.get_path().vertices
        places = patch.get_patch_transform().transform(vertices).reshape(-1, 5, 2)
        for box in places:
            start, stop = sorted({round(float(x), 4) for x in box[:4, 0]})
            boxes.setdefault(description, []).append((start, stop))
    return boxes


def find_lines(axes: Axes) -> Mapping[str, list[tuple[float, float]]]:
    """Return the points of all lines in the legend by their label."""
    lines = {}
    for line in axes.get_lines():
        label = str(line.get_label())
        if not label.startswith("_"):
            lines[label] = [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]
    return lines


def find_markers(axes: Axes, marker: str) -> list[float]:
    """Return the place on the x axis of each marker of this kind."""
    lines = [line for line in axes.get_lines() if line.get_marker() == marker]
    return [float(x) for line in lines for x in np.asarray(line.get_xdata())]


def find_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj() if isinstance(text, Text)]
