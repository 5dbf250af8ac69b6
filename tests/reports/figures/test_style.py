"""Colors stand out from the page."""

import pytest

from parbench.reports.figures.style import HUES, PAGE


def compute_luminance(color: str) -> float:
    """Return the relative luminance of a color such as `#0a5fff`, by WCAG 2."""
    srgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in srgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("hue", HUES)
def test_color_stands_out_from_the_background(hue: str) -> None:
    for color, background in zip(HUES[hue], PAGE["back"], strict=True):
        darker, lighter = sorted(map(compute_luminance, (color, background)))
        assert (lighter + 0.05) / (darker + 0.05) >= 3
