"""Figures of comparisons."""

from matplotlib.patches import Rectangle

from parbench.reports.figures.changes import chart_effects
from parbench.reports.figures.primitives import IntervalRow


def test_threshold_is_shaded_next_to_intervals_only() -> None:
    """The labels between the rows stay free."""
    rows = [IntervalRow(label=name, interval=(0.1, 0.05, 0.15)) for name in "ab"]
    chart = chart_effects(rows, 0.03)
    assert chart is not None
    shades = chart.draw().axes[0].patches
    rectangles = [shade for shade in shades if isinstance(shade, Rectangle)]
    assert len(rectangles) == len(shades)
    assert {round(shade.get_width(), 2) for shade in rectangles} == {0.06, 0.0}
    assert all(shade.get_height() < 0.4 for shade in rectangles)
