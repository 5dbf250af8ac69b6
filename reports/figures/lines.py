"""Lines and points named on their right: bandwidth and time against size, by nodes or ranks, methods beside each other,
and points by two quantities with the front of those that no other beats in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.metrics import MetricValue
from parbench.bench.text import format_size
from parbench.reports import cells
from parbench.reports.analysis.attention import Context
from parbench.reports.analysis.contrasts import Kinds
from parbench.reports.analysis.fits import Ceiling, Curve, size_of
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.labels import operation
from parbench.reports.analysis.summary import Row, estimate_of
from parbench.reports.figures.palette import HUES, OPERATIONS, css_of
from parbench.reports.figures.svg import (
    NARROW,
    WIDE,
    Drawing,
    Scale,
    elided,
    even_ticks,
    log_ticks,
    spread,
    width_of,
)

Point = tuple[float, float, float, float]
"""A place, a value there, and its interval: thrice the value without one."""
Axis = tuple[str, Callable[[float], str]]
_DASHES = (
    "",
    "stroke-dasharray:6 3",
    "stroke-dasharray:2 2",
    "stroke-dasharray:8 2 2 2",
    "stroke-dasharray:1 3",
)
_TOP, _HEIGHT, _LINE, _MOST_LETTERS, _MOST_PLACES = 22.0, 230.0, 14.0, 26, 8
_FIT_STEPS, _LOG_FROM_RATIO = 24, 10.0
_POINTS_HEIGHT, _POINTS_LINE = 270.0, 15.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series with the name at its end; its fit is of other points, in pieces."""

    label: str
    points: tuple[Point, ...]
    fit: tuple[tuple[tuple[float, float], ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Level:
    """What heights are: on a log axis, or from zero on; ``at`` is a line across with its name."""

    words: str
    text: Callable[[float], str]
    is_log: bool = True
    at: tuple[float, str] | None = None


RATE = Level(words="bus bandwidth (GB/s)", text=cells.significant)
TIME = Level(words="time", text=cells.duration)
EFFICIENCY = Level(
    words="efficiency", text=lambda one: f"{100 * one:.0f} %", is_log=False, at=(1.0, "perfect")
)


def extent(metric: MetricValue | None) -> tuple[float, float, float] | None:
    """Return value, low and high, the value thrice without an interval above zero; None if it is not above zero."""
    found = estimate_of(metric)
    return (found.value, found.low or found.value, found.high or found.value) if found else None


def draw_lines(
    lines: Sequence[Line],
    level: Level,
    along: str,
    *,
    place_text: Callable[[float], str] = cells.whole,
    width: float = NARROW,
) -> Drawing | None:
    """Return lines over places on a log axis, named at their right ends; None without two places.

    Long names make it wide. A level across is named like a line.
    """
    # nothing but what is above zero is on a log axis
    on_axes = [
        [one for one in line.points if one[0] > 0 and (one[1] > 0 or not level.is_log)]
        for line in lines
    ]
    shown = [
        replace(line, points=tuple(sorted(of)))
        for line, of in zip(lines, on_axes, strict=True)
        if of
    ]
    places = sorted({point[0] for one in shown for point in one.points})
    if len(places) < 2:
        return None
    heights = [height for one in shown for point in one.points for height in point[1:]]
    heights += [height for one in shown for piece in one.fit for _, height in piece if height > 0]
    heights += [level.at[0]] if level.at else []
    names = [elided(one.label, _MOST_LETTERS) for one in shown]
    if len(set(names)) < len(names):
        names, width = [elided(one.label, 2 * _MOST_LETTERS) for one in shown], WIDE
    names += [level.at[1]] if level.at else []
    bottom = _TOP + max(_HEIGHT, _LINE * len(names))
    right = width - max(map(width_of, names)) - 24
    top = max(heights) * (1 if level.is_log else 1.04)
    low = min(heights) if level.is_log else 0.0
    low, top = (low / 1.1, top * 1.1) if level.is_log and top == low else (low, top)
    ticks = log_ticks(low, top, level.text) if level.is_log else even_ticks(top, level.text)
    y = Scale(low=low, high=top, first=bottom, last=_TOP, is_log=level.is_log)
    chart = Drawing(width)
    left = chart.axis_left(y, ticks, f"{level.words}{', log axis' * level.is_log}", right)
    x = Scale(low=places[0], high=places[-1], first=left + 6, last=right, is_log=True)
    if level.at:
        chart.rule(
            f"M{left:.1f} {y(level.at[0]):.1f}H{right:.1f}",
            "stroke:currentColor;stroke-dasharray:8 3",
        )
    ends = [y(one.points[-1][1]) for one in shown] + ([y(level.at[0])] if level.at else [])
    tops = spread(ends, _LINE, _TOP, bottom)
    hues = _hues(shown)
    for i, (name, end, at) in enumerate(zip(names, ends, tops, strict=True)):
        look, start = "stroke:currentColor", right
        if i < len(shown):
            values = ", ".join(
                f"{place_text(place)}: {level.text(value)}" for place, value, *_ in shown[i].points
            )
            told, start = f"{shown[i].label}: {values}", x(shown[i].points[-1][0])
            look = _draw_line(chart, shown[i], x, y, hues[i], told, hues[:i].count(hues[i]))
        # from the last point, wherever it is, to the name
        chart.rule(
            f"M{start:.1f} {end:.1f}L{right + 4:.1f} {end:.1f}L{right + 14:.1f} {at:.1f}", look
        )
        chart.text(right + 17, at, name, css="end")
    chart.top = bottom
    every = -(-len(places) // _MOST_PLACES)
    chart.axis_below(x, [(place, place_text(place)) for place in places[::every]], along)
    return chart


def _draw_line(
    chart: Drawing, one: Line, x: Scale, y: Scale, hue: str, told: str, alike: int
) -> str:
    """Draw a line after so many others of its hue, with its interval and its fit, and return its look."""
    look = f"stroke:{css_of(hue)};{_DASHES[alike % len(_DASHES)]}"
    around = [(x(place), y(low)) for place, _, low, _ in one.points]
    around += [(x(place), y(high)) for place, *_, high in reversed(one.points)]
    chart.path(f"M{_joined(around)}z", f"fill:{css_of(hue)};fill-opacity:.1")
    for piece in one.fit:
        path = _joined([(x(place), y(height)) for place, height in piece if height > 0])
        chart.rule(f"M{path}", f"stroke:{css_of(hue)};stroke-dasharray:4 2")
    points = [(x(place), y(value)) for place, value, *_ in one.points]
    chart.path(f"M{_joined(points)}", f"fill:none;stroke-width:2;{look}", told)
    dots = "".join(f"M{a - 2.5:.1f} {b:.1f}a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0" for a, b in points)
    chart.path(dots, f"fill:{css_of(hue)}")
    return look


def _hues(lines: Sequence[Line]) -> list[str]:
    """Return the hue of each line's operation, one of the rest of what is none; all apart where they are of one."""
    known = [OPERATIONS.get(one.label.partition(" ")[0], "") for one in lines]
    rest = [hue for hue in HUES if hue not in known] or [*HUES]
    if len(set(known)) == 1 < len(known):
        return [[*HUES][i % len(HUES)] for i in range(len(known))]
    return [hue or rest[known[:i].count("") % len(rest)] for i, hue in enumerate(known)]


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def curve_lines(
    rows: Sequence[Row], quantity: Literal["busbw", "time"], curves: Sequence[Curve] = ()
) -> tuple[Line, ...]:
    """Return a line for each operation of more than one size, its interval above zero; what has one size is no line."""
    fits = {
        operation(curve.rows[0].case): _pieces(curve.fit) for curve in curves if quantity == "time"
    }
    scale = cells.GIGA if quantity == "busbw" else 1.0
    found = []
    for label, of in group_by(rows, lambda row: operation(row.case)).items():
        known = [(size_of(row), extent(row.metrics.get(quantity))) for row in of]
        points = tuple(
            (size, told[0] / scale, told[1] / scale, told[2] / scale)
            for size, told in known
            if told and size > 0
        )
        if len({size for size, *_ in points}) > 1:
            found.append(Line(label=label, points=points, fit=fits.get(label, ())))
    return tuple(found)


def _pieces(fit: CurveFit) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return a fit broken at its knees, in points so close that a straight line reads as a curve on log axes."""
    ends = (fit.segments[0].first_bytes, *fit.breakpoints, fit.segments[-1].last_bytes)
    steps = [i / _FIT_STEPS for i in range(_FIT_STEPS + 1)]
    return tuple(
        tuple(
            (low * (high / low) ** step, segment.predict(low * (high / low) ** step))
            for step in steps
        )
        for segment, (low, high) in zip(fit.segments, pairwise(ends), strict=True)
    )


def draw_sizes(
    lines: Sequence[Line], level: Level, ceiling: Ceiling | None = None, width: float = NARROW
) -> Drawing | None:
    if ceiling:
        rate = ceiling.bytes_per_second
        level = replace(
            level, at=(rate / cells.GIGA, f"{ceiling.name}, {cells.quantity(rate, 'B/s')}")
        )
    words = "size (bytes, 1024-based)"
    return draw_lines(
        lines, level, words, place_text=lambda size: format_size(round(size)), width=width
    )


def draw_kinds(series: Sequence[Kinds]) -> Drawing | None:
    lines: dict[str, list[Point]] = {}
    for one in series:
        for kind in one.rows:
            if one.first.size_bytes and (rate := one.rate(kind)):
                lines.setdefault(kind.label, []).append(
                    (one.first.size_bytes, *3 * (rate / cells.GIGA,))
                )
    return draw_sizes(
        [Line(label=label, points=tuple(points)) for label, points in lines.items()], RATE
    )


def draw_against(
    lines: Mapping[str, Mapping[int, float]], level: Level, against: str = "nodes"
) -> Drawing | None:
    """Return a quantity against the number of nodes, or of ranks, a line for each series; None if none has two."""
    known = [
        Line(label=label, points=tuple((n, one, one, one) for n, one in points.items()))
        for label, points in lines.items()
        if len(points) > 1
    ]
    return draw_lines(known, level, against)


_METHODS: tuple[
    tuple[str, Callable[[Context], tuple[float, float, float] | None], Callable[[float], str]], ...
] = (
    ("step time", lambda one: extent(one.row.metrics.get(one.row.headline)), cells.duration),
    (
        "attention's bytes a rank sends in a step",
        lambda one: _alone(one.sent_bytes()),
        cells.num_bytes,
    ),
    (
        "exposed cp communication, of the traced step",
        lambda one: _alone(one.exposed_share),
        cells.percent,
    ),
)


def _alone(value: float | None) -> tuple[float, float, float] | None:
    return None if value is None else (value, value, value)


def draw_methods(lines: Mapping[str, Sequence[Context]]) -> dict[str, Drawing]:
    """Return a chart of each quantity that is known of two steps of a method, over the sequence length."""
    found = {}
    for title, value, words in _METHODS:
        series = [
            Line(
                label=label,
                points=tuple(
                    (one.facts.sequence, *told) for one in of if (told := value(one)) is not None
                ),
            )
            for label, of in lines.items()
        ]
        heights = [point[1] for one in series for point in one.points]
        # heights compare from zero on, unless the lowest could not be seen
        is_log = (
            bool(heights) and min(heights) > 0 and max(heights) / min(heights) > _LOG_FROM_RATIO
        )
        if max(heights, default=0.0) > 0:
            level = Level(words=title, text=words, is_log=is_log)
            if chart := draw_lines(series, level, "sequence (tokens)"):
                found[title] = chart
    return found


def draw_points(
    points: Mapping[str, tuple[float, float]], front: Sequence[str], across: Axis, up: Axis
) -> Drawing | None:
    """Return points on log axes, the front joined and named at the right; None without two places."""
    if len({*points.values()}) < 2:
        return None
    ends = [
        (min(values) / 1.05, max(values) * 1.05) for values in zip(*points.values(), strict=True)
    ]
    chart = Drawing(WIDE)
    ticks = [log_ticks(*each, words) for each, (_, words) in zip(ends, (across, up), strict=True)]
    names = [elided(name) for name in front]
    right = chart.width - max(map(width_of, names), default=0.0) - 30
    bottom = _TOP + max(_POINTS_HEIGHT, _POINTS_LINE * len(front))
    y = Scale(low=ends[1][0], high=ends[1][1], first=bottom, last=_TOP, is_log=True)
    left = chart.axis_left(y, ticks[1], f"{up[0]}, log axis", right)
    x = Scale(low=ends[0][0], high=ends[0][1], first=left + 6, last=right, is_log=True)
    hue, places = css_of("blue"), [(x(points[name][0]), y(points[name][1])) for name in front]
    for name, (first, second) in points.items():
        size, opacity = (5.0, 1.0) if name in front else (3.0, 0.35)
        told = f"{name}: {across[1](first)}, {up[1](second)}"
        arc = f"a{size} {size} 0 1 0 "
        circle = f"M{x(first) - size:.1f} {y(second):.1f}{arc}{2 * size} 0{arc}-{2 * size} 0z"
        chart.path(circle, f"fill:{hue};fill-opacity:{opacity}", told)
    if len(places) > 1:
        chart.rule(f"M{_joined(places)}", f"stroke:{hue};stroke-width:1.5")
    tops = spread([b for _, b in places], _POINTS_LINE, _TOP, bottom)
    for name, (one, other), at in zip(names, places, tops, strict=True):
        chart.rule(
            f"M{one + 6:.1f} {other:.1f}L{right + 6:.1f} {at:.1f}",
            "stroke:var(--muted);stroke-dasharray:1 3",
        )
        chart.text(right + 10, at, name, css="end")
    chart.top = bottom
    chart.axis_below(x, ticks[0], f"{across[0]}, log axis")
    return chart
