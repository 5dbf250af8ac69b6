"""Colors stand out from the page, and from each other for people who see no red or green."""

import math
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from parbench.reports.figures.style import HUES, PAGE

BACKGROUNDS = PAGE["back"]
# What eyes without red (protan) or green (deutan) cones see of linear RGB:
# Machado, Oliveira, Fernandes 2009.
VISION = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
# White is (1, 1, 1).
RGB_TO_XYZ = np.array(
    [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8729]]
)
Color = NDArray[np.float64]


def parse_color(text: str) -> Color:
    """Return the linear RGB of a color such as `#0a5fff`."""
    srgb = np.array([int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear: Color = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return linear


def compute_contrast(text: str, background: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    luminances = [(RGB_TO_XYZ @ parse_color(color))[1] for color in (text, background)]
    return float((max(luminances) + 0.05) / (min(luminances) + 0.05))


def compute_lab(text: str, vision: Color) -> tuple[float, float, float]:
    """Return a color in CIELAB, as seen by such eyes."""
    xyz = np.maximum(RGB_TO_XYZ @ np.maximum(vision @ parse_color(text), 0.0), 0.0)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", [0, 1])
def test_colors_stand_out_from_the_background(theme: int) -> None:
    for hue, colors in HUES.items():
        assert compute_contrast(colors[theme], BACKGROUNDS[theme]) >= 3, hue


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("vision", VISION)
def test_colors_differ_from_each_other(vision: str, theme: int) -> None:
    colors = {hue: compute_lab(pair[theme], VISION[vision]) for hue, pair in HUES.items()}
    for first, second in combinations(colors, 2):
        assert math.dist(colors[first], colors[second]) >= 15, (first, second)
