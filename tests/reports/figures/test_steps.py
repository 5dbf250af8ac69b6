"""Figures of steps: their times, their parts, and the rates from rank to rank."""

import pytest

from parbench.reports.figures.steps import chart_breakdown, chart_step_times
from tests.support.reports.figure_parts import find_boxes, find_markers, find_texts
from tests.support.reports.report_rows import summarize_rows
from tests.support.reports.reports_fixtures import (
    ok_record,
    step_case,
)


def test_steps_show_repetitions_and_their_mean() -> None:
    times = [0.010, 0.011, 0.013]
    records = [ok_record(step_case("ddp"), i, seconds) for i, seconds in enumerate(times)]
    records.append(ok_record(step_case("fsdp"), 0, 0.02))
    ddp, fsdp = summarize_rows(*records, repetitions=3)
    chart = chart_step_times({"ddp": ddp, "fsdp": fsdp})
    assert chart is not None
    figure = chart.draw()
    axes = figure.axes[0]
    assert find_markers(axes, "D") == pytest.approx([0.011267, 0.02], abs=1e-5)
    assert find_markers(axes, "s") == pytest.approx(times)
    assert {"ddp", "fsdp"} <= set(find_texts(figure))


def test_breakdown_stacks_parts_of_a_step() -> None:
    parts = {"compute": 0.6, "exposed dp": 0.15, "exposed tp": 0.15, "copy": 0.02, "idle": 0.06}
    chart = chart_breakdown({"ddp": parts})
    assert chart is not None
    figure = chart.draw()
    axes = figure.axes[0]
    boxes = find_boxes(axes)
    names = [name.partition(":")[0] for name in boxes]
    assert names == ["compute", "exposed dp", "exposed tp", "copy", "idle"]
    widths = [stop - start for [(start, stop)] in boxes.values()]
    assert widths == pytest.approx([0.6, 0.15, 0.15, 0.02, 0.06], abs=1e-3)
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert {"61 %", "15 %"} <= set(find_texts(figure))
