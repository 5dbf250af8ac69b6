"""Points by two quantities, and the front of those that no other beats in both."""

from collections.abc import Callable, Mapping, Sequence

from reports.figures.palette import css_of
from reports.figures.svg import WIDE, Drawing, Scale, elided, log_ticks, spread, width_of

Axis = tuple[str, Callable[[float], str]]
_TOP, _BOTTOM, _LINE, _MOST_LETTERS = 22.0, 292.0, 15.0, 48


def draw_points(
    points: Mapping[str, tuple[float, float]], front: Sequence[str], across: Axis, up: Axis
) -> Drawing | None:
    """Return points on log axes, the front joined and named at the right; None without two places."""
    if len({*points.values()}) < 2:
        return None
    ends = [(min(values) / 1.05, max(values) * 1.05) for values in zip(*points.values(), strict=True)]
    chart = Drawing(WIDE)
    ticks = [log_ticks(*each, words) for each, (_, words) in zip(ends, (across, up), strict=True)]
    names = [elided(name, _MOST_LETTERS) for name in front]
    left = 16 + max((width_of(told) for _, told in ticks[1]), default=0.0)
    right = chart.width - max(map(width_of, names), default=0.0) - 30
    bottom = max(_BOTTOM, _TOP + _LINE * len(front))
    x = Scale(low=ends[0][0], high=ends[0][1], first=left + 6, last=right, is_log=True)
    y = Scale(low=ends[1][0], high=ends[1][1], first=bottom, last=_TOP, is_log=True)
    chart.text(4, 10, f"{up[0]}, log axis")
    for value, told in ticks[1]:
        chart.rule(f"M{left:.1f} {y(value):.1f}H{right:.1f}")
        chart.text(left - 6, y(value), told, "end")
    hue, places = css_of("blue"), [(x(points[name][0]), y(points[name][1])) for name in front]
    for name, (first, second) in points.items():
        size, opacity = (5.0, 1.0) if name in front else (3.0, 0.35)
        told = f"{name}: {across[1](first)}, {up[1](second)}"
        arc = f"a{size} {size} 0 1 0 "
        circle = f"M{x(first) - size:.1f} {y(second):.1f}{arc}{2 * size} 0{arc}-{2 * size} 0z"
        chart.path(circle, f"fill:{hue};fill-opacity:{opacity}", told)
    if len(places) > 1:
        chart.rule("M" + "L".join(f"{one:.1f} {other:.1f}" for one, other in places), f"stroke:{hue};stroke-width:1.5")
    for name, (one, other), at in zip(names, places, spread([b for _, b in places], _LINE, _TOP, bottom), strict=True):
        chart.rule(f"M{one + 6:.1f} {other:.1f}L{right + 6:.1f} {at:.1f}", "stroke:var(--muted);stroke-dasharray:1 3")
        chart.text(right + 10, at, name, css="end")
    chart.top = bottom
    chart.axis_below(x, ticks[0], f"{across[0]}, log axis")
    return chart
