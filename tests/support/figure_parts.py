"""What a figure holds, for the tests that look at it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def panels_of(figure: Figure | None) -> list[Axes]:
    assert figure is not None
    return list(figure.axes)


def axes_of(figure: Figure | None) -> Axes:
    return panels_of(figure)[0]


def values(data: Any) -> list[float]:
    return [float(value) for value in np.asarray(data)]


def points(axes: Axes) -> list[list[list[float]]]:
    return [np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()]


def words(texts: Sequence[Any]) -> list[str]:
    return [text.get_text() for text in texts]


def labels_of(figure: Figure | None) -> list[str]:
    assert figure is not None
    return words(figure.legends[0].get_texts())


def bars_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]
