"""Step times launch by launch, the parts of steps and of their memory, and an area of that over time."""

import re

import pytest

from parbench.bench.results.details import MemoryOverTime
from parbench.reports import cells
from parbench.reports.figures.bars import (
    draw_breakdown,
    draw_memory,
    draw_memory_over_time,
    draw_stacks,
    draw_steps,
)
from parbench.reports.figures.palette import MEMORY
from parbench.reports.figures.svg import HATCHED, Drawing
from tests.support.figure_parts import Box, parts_of
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import ok_record, step_case, training_metrics

LEFT, LENGTH = 10.0, 490.0


def bars(drawing: Drawing | None) -> list[Box]:
    """Return the boxes of bars, that say what they are, without the legend's."""
    return [box for box in parts_of(drawing).boxes if box.told]


def test_steps_show_repetitions_and_their_mean() -> None:
    records = [
        ok_record(step_case("ddp"), i, seconds) for i, seconds in enumerate((0.010, 0.011, 0.013))
    ]
    parts = parts_of(
        draw_steps(summarize_rows(*records, ok_record(step_case("fsdp"), 0, 0.02), launches=3))
    )
    scale = LENGTH / (0.02 * 1.1 * 1.02)
    launches = [(box.x + 1.5 - LEFT) / scale for box in parts.boxes]
    assert launches == pytest.approx([0.010, 0.011, 0.013], rel=0.01)
    whole = [(path.points[0][0] + 5 - LEFT) / scale for path in parts.paths if "l5 -5" in path.d]
    assert whole == pytest.approx([(0.010 * 0.011 * 0.013) ** (1 / 3), 0.02], rel=0.01)
    assert parts.words[:2] == ["ddp", "fsdp"]
    many = parts_of(
        draw_steps(
            summarize_rows(*(ok_record(step_case(), launch) for launch in range(60)), launches=60)
        )
    )
    assert len(many.boxes) == 20


def test_breakdown_stacks_parts_of_a_step() -> None:
    drawing = draw_breakdown(
        summarize_rows(ok_record(step_case(), metrics=training_metrics(1.0, ("dp", "tp"))))
    )
    assert parts_of(drawing).words[:4] == ["compute", "exposed communication", "copy", "idle"]
    shown, scale = bars(drawing), LENGTH / 0.98
    assert [one.told.split(":")[0] for one in shown] == [
        "compute",
        "exposed dp",
        "exposed tp",
        "copy",
        "idle",
    ]
    assert [(one.x - LEFT) / scale for one in shown] == pytest.approx(
        [0, 0.6, 0.75, 0.9, 0.92], abs=1e-3
    )
    assert [one.width / scale for one in shown] == pytest.approx(
        [0.6, 0.15, 0.15, 0.02, 0.06], abs=1e-3
    )
    assert [HATCHED in one.style for one in shown] == [False, True, True, False, False]
    assert [words for words in parts_of(drawing).words if "%" in words] == [
        "61 %",
        "dp 15 %",
        "tp 15 %",
        "6 %",
    ]
    assert shown[0].told == "compute: 600 ms, 61 %"


def test_memory_stacks_components() -> None:
    rows = summarize_rows(
        ok_record(step_case("ddp"), metrics=training_metrics()), ok_record(step_case("tp"))
    )
    drawing = draw_memory(rows)
    assert parts_of(drawing).words[:4] == ["parameters", "gradients", "optimizer", "activations"]
    widths = [box.width * 7 / LENGTH for box in bars(drawing)]
    assert widths == pytest.approx([1, 1, 2, 3], abs=0.01)
    assert len({box.hue for box in bars(drawing)}) == 4
    assert {"0", "2 MiB", "4 MiB"} <= set(parts_of(drawing).words)
    assert draw_memory(rows[1:]) is None


def test_memory_over_time_rises_to_its_peak() -> None:
    held = MemoryOverTime(
        rank=0,
        points=((0, 0), (1000, 4 << 20), (3000, 2 << 20), (4000, -(1 << 20))),
        phases=(("forward", 0, 2000), ("backward", 2000, 3990), ("update", 3990, 4000)),
    )
    parts = parts_of(draw_memory_over_time(held))
    assert {"forward", "backward", "4 MiB", "time since the step began"} <= set(parts.words)
    assert "update" not in parts.words, "there is no room for it"
    [area] = [path for path in parts.paths if path.told]
    assert area.told == "4.00 MiB at 1.00 ms"
    heights = [float(y) for y in re.findall(r"V([\d.]+)", area.d)]
    zero = heights[-1]
    assert [round((zero - y) / (zero - min(heights)), 2) for y in heights] == [0, 1, 0.5, -0.25, 0]
    places = [float(x) for x in re.findall(r"H([\d.]+)", area.d)]
    assert [round((x - places[0]) / (places[-1] - places[0]), 2) for x in places] == [
        0,
        0.25,
        0.75,
        1,
    ]
    assert draw_memory_over_time(MemoryOverTime(rank=0, points=((0, 0), (5, -3)))) is None


def test_stacks_cross_the_limit_line() -> None:
    stacks = [("a", {"parameters": 30.0, "activations": 70.0}), ("b", {"parameters": 10.0})]
    parts = parts_of(
        draw_stacks(
            stacks,
            MEMORY,
            "memory",
            lambda value: cells.quantity(value, "GB"),
            (50.0, "50 GB usable"),
        )
    )
    (line,) = [path for path in parts.paths if "stroke-dasharray" in path.style]
    bars = [box for box in parts.boxes if box.told]
    assert [box.told for box in bars] == [
        "parameters: 30.0 GB, 30 %",
        "activations: 70.0 GB, 70 %",
        "parameters: 10.0 GB, 100 %",
    ]
    assert line.points[0][0] == pytest.approx(bars[0].x + bars[0].width * 50 / 30, abs=0.2)
    assert "50 GB usable" in parts.words
