"""Drawings as inline SVG, which take the page's colours and letters: text, boxes, legends, scales and their ticks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean as mean
from typing import Literal
from xml.sax.saxutils import escape

from markupsafe import Markup

from parbench.reports import cells

NARROW, WIDE = 520.0, 1000.0
FONT = 12.0
_LETTER, _MOST_TICKS = 0.6, 5  # of the size of the font
HATCHED = "url(#hatched)"
"""A pattern that the page declares once: communication that nothing hides, in more than its colour."""
Anchor = Literal["start", "middle", "end"]


def width_of(words: str, size: float = FONT) -> float:
    return _LETTER * size * len(words)


class Drawing:
    """What is drawn from the top down; ``top`` is where the next thing stands, and in the end the height."""

    def __init__(self, width: float = NARROW) -> None:
        self.width, self.top = width, 8.0
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: Anchor = "start",
        style: str = "",
        css: str = "",
    ) -> None:
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        given = f' class="{css}"' if css else ""
        look = f' style="{style}"' if style else ""
        shown = escape(cells.visible(words))
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" dy=".35em"{place}{given}{look}>{shown}</text>'
        )

    def path(self, path: str, style: str, told: str = "") -> None:
        title = f"<title>{escape(cells.visible(told))}</title>" if told else ""
        self._parts.append(f'<path d="{path}" style="{style}">{title}</path>')

    def rule(self, path: str, style: str = "stroke:var(--faint)") -> None:
        self.path(path, f"fill:none;{style}")

    def box(
        self, x: float, y: float, width: float, height: float, style: str, told: str = ""
    ) -> None:
        self.path(f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z", style, told)

    def legend(self, items: Iterable[tuple[str, float, str]], left: float = 8.0) -> None:
        """Draw words, each after a swatch of a share of the line's height, in as many lines as they need."""
        x, line = left, 1.5 * FONT
        for words, share, style in items:
            width = 34 + width_of(words)
            if x + width > self.width and x > left:
                x, self.top = left, self.top + line
            self.box(x, self.top + 6 - share * FONT / 2, 20, share * FONT, style)
            self.text(x + 26, self.top + 6, words)
            x += width
        self.top += line

    def axis_left(
        self, scale: "Scale", ticks: Sequence[tuple[float, str]], words: str, right: float
    ) -> float:
        """Draw what an axis is, and a rule for each tick with its words on the left; return where rules begin."""
        left = 16 + max((width_of(told) for _, told in ticks), default=0.0)
        self.text(4, 10, words)
        for value, told in ticks:
            self.rule(f"M{left:.1f} {scale(value):.1f}H{right:.1f}")
            self.text(left - 6, scale(value), told, "end")
        return left

    def axis_below(self, scale: "Scale", ticks: Sequence[tuple[float, str]], words: str) -> None:
        """Draw an axis at the top of what is next, with ticks no closer than their words allow."""
        y, end = self.top, -math.inf
        self.rule(f"M{scale.first:.1f} {y:.1f}H{scale.last:.1f}", "stroke:currentColor")
        for value, told in ticks:
            x, half = scale(value), width_of(told) / 2
            self.rule(f"M{x:.1f} {y:.1f}v4", "stroke:currentColor")
            if x - half > end + 4:
                self.text(x, y + 4 + 0.8 * FONT, told, "middle")
                end = x + half
        self.text((scale.first + scale.last) / 2, y + 6 + 2 * FONT, words, "middle")
        self.top += 8 + 2.6 * FONT

    def svg(self, name: str, title: str, told: str) -> str:
        """Return all as an element; ``name`` begins its ids, which must be the page's only ones."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.top:.0f}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" font-size="{FONT:g}">'
            f'<title id="{name}-title">{escape(cells.visible(title))}</title>'
            f'<desc id="{name}-desc">{escape(cells.visible(told))}</desc>{"".join(self._parts)}</svg>'
        )


def figure(drawing: Drawing | None, name: str, title: str, told: str = "") -> list[Markup]:
    """Return a drawing under its caption, as figures are that follow each other; nothing for None."""
    if drawing is None:
        return []
    caption = Markup("<figcaption><strong>{}</strong> {}</figcaption>").format(
        cells.visible(title), told
    )
    chart = Markup(
        drawing.svg(name, title, f"{told} The table beside it holds the same numbers.".lstrip())
    )
    if drawing.width == WIDE:
        # a small window scrolls it, by keys too
        around = Markup('<div class="chart" role="group" tabindex="0" aria-label="{}">').format(
            cells.visible(title)
        )
        chart = around + chart + Markup("</div>")
    return [caption + chart]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where values from ``low`` to ``high`` stand between two places, by their logarithms if asked."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            math.log(one) if self.is_log else one for one in (self.low, self.high, value)
        )
        return self.first + (self.last - self.first) * (value - low) / (high - low)


def even_ticks(
    longest: float, words: Callable[[float], str], most: int = _MOST_TICKS
) -> list[tuple[float, str]]:
    """Return a few ticks from zero on: of bytes at powers of two, else at 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if longest / (factor * power) <= most)
    if words is cells.num_bytes:
        step = 2.0 ** math.ceil(math.log2(longest / most))
    return [
        (i * step, _brief(words(i * step))) for i in range(math.floor(longest / step + 1e-9) + 1)
    ]


def log_ticks(low: float, high: float, words: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return ticks at powers of ten, and between them where there are few."""
    exponents, shown = (
        range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1),
        list[float](),
    )
    for factors in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)):
        if len(shown) < 3:
            every = [factor * 10.0**exponent for exponent in exponents for factor in factors]
            shown = [tick for tick in every if low <= tick * 1.0001 and tick <= high * 1.0001]
    return [(tick, _brief(words(tick))) for tick in shown[:: -(-len(shown) // 8) or 1]]


def time_ticks(seconds: float) -> tuple[str, list[tuple[float, str]]]:
    """Return the unit of an axis of time, and its ticks in that unit."""
    ticks = even_ticks(seconds, str, 8)
    units = ((1.0, "s"), (1e-3, "ms"))
    factor, unit = next((one for one in units if ticks[1][0] >= one[0]), (1e-6, "us"))
    return unit, [(tick, f"{tick / factor:.6g}") for tick, _ in ticks]


def elided(label: str, most: int = 48) -> str:
    """Return a label that fits: its first word and its last ones, which tell it apart."""
    if len(label) <= most:
        return label
    [head, *rest] = label.split(" ")
    while rest and len(f"{head} ... {' '.join(rest)}") > most:
        rest.pop(0)
    return f"{head} ... {' '.join(rest)}" if rest else f"{label[: most - 3]}..."


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places as near as can be to those given, in their order, a gap apart; within bounds if there is room."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    # those that would meet stand together around their mean
    blocks: list[list[float]] = []
    for rank, i in enumerate(order):
        blocks.append([places[i] - rank * gap])
        while len(blocks) > 1 and mean(blocks[-2]) > mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    found = [0.0] * len(places)
    least, most = low, max(low, high - (len(places) - 1) * gap)
    for rank, (i, at) in enumerate(
        zip(order, (mean(of) for of in blocks for _ in of), strict=True)
    ):
        found[i] = min(max(at, least), most) + rank * gap
    return found


def _brief(text: str) -> str:
    number, _, unit = text.partition(" ")
    return f"{float(number):.12g} {unit}".rstrip() if float(number) else "0"
