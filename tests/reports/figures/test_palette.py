"""Colours: seen on both backgrounds, told apart by those who see no red or green, and one for each meaning."""

import math
import re
from itertools import combinations
from pathlib import Path

import pytest

import parbench.reports.render.page
from parbench.reports.figures.palette import HUES, style_sheet

CSS = Path(parbench.reports.render.page.__file__).with_name("page.css").read_text()
BACKGROUNDS = re.findall(r"--back: (#\w+); --raised: (#\w+)", CSS)
# linear RGB as seen without red (protan) or green (deutan) cones: Machado, Oliveira, Fernandes 2009
SEEN = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
TO_XYZ = (
    (0.4339, 0.3762, 0.1899),
    (0.2126, 0.7152, 0.0722),
    (0.0177, 0.1095, 0.8729),
)  # white is (1, 1, 1)
Triple = tuple[float, float, float]


def times(matrix: tuple[Triple, ...], color: Triple) -> Triple:
    x, y, z = (sum(a * b for a, b in zip(row, color, strict=True)) for row in matrix)
    return max(0.0, x), max(0.0, y), max(0.0, z)


def linear(color: str) -> Triple:
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return red, green, blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(times(TO_XYZ, linear(color))[1] for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(color: str, seen: str) -> Triple:
    xyz = times(TO_XYZ, times(SEEN[seen], linear(color)))
    x, y, z = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("dark", [0, 1])
def test_colours_stand_out_from_the_background_and_from_each_other(dark: int) -> None:
    assert len(BACKGROUNDS) == 2
    for name, pair in HUES.items():
        assert contrast(pair[dark], BACKGROUNDS[dark][0]) >= 3, name
    for seen in SEEN:
        for one, other in combinations(HUES, 2):
            distance = math.dist(*(lab(HUES[name][dark], seen) for name in (one, other)))
            assert distance >= 15, (seen, one, other, distance)


def test_the_page_declares_each_colour_once_for_light_and_once_for_dark() -> None:
    for name, (light, dark) in HUES.items():
        assert re.findall(rf"--{name}:(#\w+)", style_sheet()) == [light, dark]
    assert not re.findall(
        r"#[0-9a-f]{6}",
        "".join(path.read_text() for path in Path("reports/figures").glob("[!p]*.py")),
    )
