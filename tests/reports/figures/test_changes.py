"""Figures of comparisons."""

from matplotlib.patches import Rectangle

from parbench.reports.figures.changes import chart_effects
from parbench.reports.figures.primitives import IntervalRow
from tests.support.reports.figure_parts import find_markers


def test_effects_have_intervals_and_a_threshold() -> None:
    rows = [IntervalRow(label=name, interval=(0.1, 0.05, 0.15)) for name in "ab"]
    chart = chart_effects(rows, 0.03)
    assert chart is not None
    axes = chart.draw().axes[0]
    [shade] = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert (shade.get_x(), shade.get_width()) == (-0.03, 0.06)
    assert find_markers(axes, "D") == [0.1, 0.1]
