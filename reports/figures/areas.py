"""An area: what a step holds over its time."""

from bench.results.details import MemoryOverTime
from reports import cells
from reports.figures.palette import MEMORY, css_of
from reports.figures.svg import NARROW, Drawing, Scale, even_ticks, width_of

_TOP, _HEIGHT, _LETTER, _MICRO = 22.0, 130.0, 16.0, 1e6


def draw_memory_over_time(held: MemoryOverTime) -> Drawing | None:
    """Return the bytes above the step's start as an area over time, its phases named above; None where none rise."""
    (at, peak), end = held.peak, held.points[-1][0] / _MICRO
    if peak <= 0:
        return None
    low = min(0, *(num_bytes for _, num_bytes in held.points))
    ticks = even_ticks(peak, cells.num_bytes)
    left = 16 + max(width_of(told) for _, told in ticks)
    bottom = _TOP + _HEIGHT
    x = Scale(low=0.0, high=end, first=left, last=NARROW - 16)
    y = Scale(low=low, high=peak, first=bottom, last=_TOP + _LETTER)
    chart = Drawing()
    chart.text(4, 10, "above the step's start")
    for value, told in ticks:
        chart.rule(f"M{left:.1f} {y(value):.1f}H{x.last:.1f}")
        chart.text(left - 6, y(value), told, "end")
    named = ""
    for name, start, stop in held.phases:
        first, last = (x(min(max(0.0, edge / _MICRO), end)) for edge in (start, stop))
        chart.rule(f"M{first:.1f} {_TOP:.1f}V{bottom:.1f}", "stroke:currentColor;stroke-dasharray:1 3")
        if name != named and last - first > width_of(name) + 6:
            chart.text((first + last) / 2, _TOP + 4, name, "middle")
            named = name
    # held until the next change
    steps = "".join(f"H{x(time / _MICRO):.1f}V{y(num_bytes):.1f}" for time, num_bytes in held.points)
    hue = css_of(MEMORY["activations"])
    told = f"{cells.num_bytes(peak)} at {cells.duration(at / _MICRO)}"
    chart.path(f"M{left:.1f} {y(0):.1f}{steps}V{y(0):.1f}z", f"fill:{hue};fill-opacity:.35;stroke:{hue}", told)
    chart.top = bottom
    chart.axis_below(x, even_ticks(end, cells.duration), "time since the step began")
    return chart
