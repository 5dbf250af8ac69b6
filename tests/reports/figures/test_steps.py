"""Figures of steps: their times, their parts, and the rates from rank to rank."""

import pytest

from parbench.reports.figures.steps import chart_breakdown, chart_pareto
from tests.support.reports.figure_parts import find_boxes, find_lines, find_texts


def test_breakdown_stacks_parts_of_a_step() -> None:
    parts = {"compute": 0.6, "exposed dp": 0.15, "exposed tp": 0.15, "copy": 0.02, "idle": 0.06}
    chart = chart_breakdown({"ddp": parts})
    assert chart is not None
    figure = chart.draw()
    axes = figure.axes[0]
    boxes = find_boxes(axes)
    widths = {
        name.partition(":")[0]: pytest.approx(stop - start, abs=1e-3)
        for name, [(start, stop)] in boxes.items()
    }
    assert widths == parts
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [0, 1, 1, 0, 0]
    assert {"61 %", "15 %"} <= set(find_texts(figure))


def test_pareto_front_is_the_fastest_step_for_each_memory() -> None:
    points = [
        (10.0, 4.0, "fsdp=8"),
        (20.0, 4.5, "tp=8"),
        (30.0, 2.0, "dp=8"),
        (30.0, 3.0, "pp=8"),
    ]
    chart = chart_pareto("meshes", "Meshes", "", points)
    figure = chart.draw()
    front = find_lines(figure.axes[0])["Pareto front"]
    assert front == [(10.0, 4.0), (30.0, 2.0)]
