"""Areas: memory over a step's time."""

import re

from figure_parts import parts_of

from bench.results.details import MemoryOverTime
from reports.figures.areas import draw_memory_over_time


def test_memory_rises_to_its_peak_under_the_names_of_phases() -> None:
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
    assert [round((x - places[0]) / (places[-1] - places[0]), 2) for x in places] == [0, 0.25, 0.75, 1]
    assert draw_memory_over_time(MemoryOverTime(rank=0, points=((0, 0), (5, -3)))) is None
