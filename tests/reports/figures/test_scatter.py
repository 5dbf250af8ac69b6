"""Points by two quantities, bars up to a limit, and squares: what a plan's page draws beside lines."""

import pytest
from figure_parts import parts_of

from reports import cells
from reports.figures.bars import draw_stacks
from reports.figures.heat_maps import draw_grid
from reports.figures.palette import MEMORY
from reports.figures.scatter import draw_points

TIME, SIZE = ("step time", cells.duration), ("memory", lambda value: cells.quantity(value, "GB"))


def test_points_stand_where_their_logarithms_do_and_the_front_is_joined_and_named() -> None:
    points = {"fast": (1.0, 80.0), "small": (4.0, 20.0), "beaten": (4.0, 80.0)}
    chart = draw_points(points, ["fast", "small"], TIME, SIZE)
    parts = parts_of(chart)
    assert [path.told for path in parts.paths if path.told] == [
        f"{name}: {seconds:.2f} s, {size:.1f} GB" for name, (seconds, size) in points.items()
    ]
    (joined,) = [path for path in parts.paths if "stroke-width:1.5" in path.style]
    (left, high), (right, low) = joined.points
    assert left < right
    assert high < low  # from the top down
    assert {"fast", "small", "memory, log axis", "step time, log axis"} <= {*parts.words}
    assert "beaten" not in parts.words
    assert draw_points({"one": (1.0, 2.0)}, ["one"], TIME, SIZE) is None


def test_a_bar_that_exceeds_the_limit_crosses_its_line() -> None:
    stacks = [("a", {"parameters": 30.0, "activations": 70.0}), ("b", {"parameters": 10.0})]
    parts = parts_of(draw_stacks(stacks, MEMORY, "memory", SIZE[1], (50.0, "50 GB usable")))
    (line,) = [path for path in parts.paths if "stroke-dasharray" in path.style]
    bars = [box for box in parts.boxes if box.told]
    assert [box.told for box in bars] == [
        "parameters: 30.0 GB, 30 %",
        "activations: 70.0 GB, 70 %",
        "parameters: 10.0 GB, 100 %",
    ]
    assert line.points[0][0] == pytest.approx(bars[0].x + bars[0].width * 50 / 30, abs=0.2)
    assert "50 GB usable" in parts.words


def test_squares_say_what_they_hold_or_why_they_hold_nothing() -> None:
    parts = parts_of(
        draw_grid(
            ["pp 1", "pp 2"], [[(0.5, "20 %"), (None, "too large")], [(1.0, "40 %"), (None, "-")]], ["1", "2"], "tp"
        )
    )
    assert len(parts.boxes) == 2
    assert {"20 %", "too large", "40 %", "-", "pp 1", "pp 2", "tp"} <= {*parts.words}
