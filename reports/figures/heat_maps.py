"""Heat maps: rates from rank to rank, who comes late, routings by capacity, and experts' loads."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from parbench.reports import cells
from parbench.reports.analysis.contrasts import Pairs
from parbench.reports.analysis.experts import Atlas, Mixture, Place
from parbench.reports.analysis.labels import short_labels
from parbench.reports.analysis.ranks import Nodes
from parbench.reports.figures.palette import SHADES, css_of
from parbench.reports.figures.svg import NARROW, WIDE, Drawing, elided, width_of

Square = tuple[float | None, str]
_MOST_PAIRS, _MOST_LATE, _MOST_EXPERTS, _MOST_STRIPS = 10, 8, 16, 40  # that are drawn, but for strips with numbers
_HOST_LETTERS, _MOST_LETTERS, _MAX_TICKS = 12, 36, 16
_PALEST, _FULLEST, _WORDS_SIZE = 0.06, 0.7, 11.0


class _Map(Drawing):
    """Rows of squares with names on the left and below, each so full of its colour as its share says."""

    def __init__(self, names: Sequence[str], columns: int, shade: str, height: float, width: float = NARROW) -> None:
        super().__init__(width)
        self._names, self._columns, self._height = [elided(one, _MOST_LETTERS) for one in names], columns, height
        self._fill = f"fill:{css_of(SHADES[shade])}"
        self.left = 12 + max(map(width_of, self._names), default=0.0)

    @property
    def square(self) -> float:
        return (self.width - self.left - 24) / self._columns

    def x(self, place: float) -> float:
        return self.left + place * self.square

    def draw(self, rows: Sequence[Sequence[Square]], columns: Sequence[str], below: str = "") -> None:
        """Draw squares from the top, None as none, with their words; then the columns' names and what they are."""
        for name, row in zip(self._names, rows, strict=True):
            middle = self.top + self._height / 2
            self.text(self.left - 6, middle, name, "end")
            for j, (share, words) in enumerate(row):
                if share is not None:
                    style = f"{self._fill};fill-opacity:{_PALEST + (_FULLEST - _PALEST) * share:.3f}"
                    self.box(self.x(j), self.top, self.square, self._height - 1, style)
                for i, line in enumerate(lines := words.split("\n") if words else []):
                    y = middle + (i - (len(lines) - 1) / 2) * 13
                    self.text(self.x(j + 0.5), y, line, "middle", f"font-size:{_WORDS_SIZE:g}px")
            self.top += self._height
        below_each = [name.split("\n") for name in columns]
        for j in range(0, len(columns), -(-len(columns) // _MAX_TICKS)):
            for i, line in enumerate(below_each[j]):
                self.text(self.x(j + 0.5), self.top + 10 + 14 * i, line, "middle")
        self.top += 14 * max(map(len, below_each)) + 4
        if below:
            self.text((self.left + self.x(self._columns)) / 2, self.top + 8, below, "middle")
            self.top += 20


def draw_pairs(matrix: Pairs, nodes: Nodes | None = None) -> Drawing | None:
    """Return bus bandwidth from rank to rank, with ``nodes`` host by host; None if all is unknown."""
    ranks = nodes.ordered(matrix.ranks) if nodes else matrix.ranks
    rates = [[matrix.rate(source, target) for target in ranks] for source in ranks]
    fastest = max((rate or 0.0 for row in rates for rate in row), default=0.0)
    if not fastest:
        return None
    words = cells.gigabytes if len(ranks) <= _MOST_PAIRS else lambda _: ""
    squares = [[(rate / fastest, words(rate)) if rate else (None, "") for rate in row] for row in rates]
    every = -(-len(ranks) // _MAX_TICKS)
    hosts = [nodes.hosts[rank] if nodes and rank < len(nodes.hosts) else "" for rank in ranks]
    names = [f"{_short(host)} {rank}".strip() for host, rank in zip(hosts, ranks, strict=True)]
    shown = [name if i % every == 0 else "" for i, name in enumerate(names)]
    height = max(8.0, min(48.0, 400 / len(ranks)))
    chart = _Map(shown, len(ranks), "rate", height)
    top = chart.top
    chart.draw(squares, [str(rank) for rank in ranks], "to rank; from rank on the left")
    if nodes is not None:
        for place, (one, other) in enumerate(pairwise(hosts), start=1):
            if one != other:
                # a thick line between switches
                wide = 1.0 if nodes.switches.get(one) == nodes.switches.get(other) else 2.5
                style = f"stroke:currentColor;stroke-width:{wide:g}"
                chart.rule(f"M{chart.x(place):.1f} {top:.1f}v{height * len(ranks):.1f}", style)
                chart.rule(f"M{chart.left:.1f} {top + height * place:.1f}H{chart.x(len(ranks)):.1f}", style)
    return chart


def _short(host: str) -> str:
    return host if len(host) <= _HOST_LETTERS else f"{host[: _HOST_LETTERS - 1]}…"


def draw_arrivals(strips: Sequence[tuple[str, Mapping[int, float]]]) -> Drawing | None:
    """Return a strip for each case, all on one scale of colour up to the latest rank; None if no rank is known."""
    known = [(label, late) for label, late in strips if late]
    if not known:
        return None
    ranks = sorted({rank for _, late in known for rank in late})
    words: Callable[[float], str] = cells.duration if len(ranks) <= _MOST_LATE else lambda _: ""
    latest = max(seconds for _, late in known for seconds in late.values()) or 1.0
    rows: list[list[Square]] = [
        [(late[rank] / latest, words(late[rank])) if rank in late else (None, "") for rank in ranks]
        for _, late in known
    ]
    chart = _Map([label for label, _ in known], len(ranks), "late", 20.0)
    chart.draw(rows, [str(rank) for rank in ranks], f"rank; full colour is {cells.duration(latest)} late")
    return chart


def draw_atlas(atlas: Atlas) -> dict[str, Drawing]:
    """Return step times and drop rates by routing and capacity, the fuller of colour the more; none without times."""
    panels = (
        ("step time; over that of balanced routes, taken in turns", "time", "time"),
        ("pairs dropped", "drop_rate", "dropped"),
    )
    found: dict[str, Drawing] = {}
    for title, name, shade in panels if any(atlas.value(*cell, "time") for cell in atlas.cells) else ():
        most = max((atlas.value(*cell, name) or 0.0 for cell in atlas.cells), default=0.0) or 1.0
        rows = [[_cell(atlas, (one, place), name, most) for place in atlas.places] for one in atlas.routings]
        names = [textwrap.shorten(one, 24) for one in atlas.routings]
        chart = found[title] = _Map(names, len(atlas.places), shade, 36.0)
        chart.draw(rows, [atlas.name_of(place).replace(", ", "\n") for place in atlas.places])
    return found


def _cell(atlas: Atlas, cell: tuple[str, Place], name: str, most: float) -> Square:
    value = atlas.value(*cell, name)
    words = cells.duration(value) if name == "time" else cells.percent(value)
    factor = atlas.metric(*cell, "imbalance_slowdown") if name == "time" else None
    if factor and factor.low is not None and factor.high is not None and not factor.low <= 1 <= factor.high:
        words += f"\n{factor.value:.2f}x in turns"  # not where it may be nothing
    return None if value is None else value / most, words


def draw_loads(found: Sequence[Mixture]) -> Drawing | None:
    """Return a strip of experts for each step and layer, rank by rank: three times the mean share is full."""
    labels = short_labels([one.row for one in found])
    strips = [
        (f"{labels[one.row.case.id]}{f' layer {layer}' if len(one.layers) > 1 else ''}", one.ep, load)
        for one in found
        for layer in one.layers
        if sum(load := one.facts.expert_load[layer])
    ][:_MOST_STRIPS]
    if not strips:
        return None
    experts, height = max(len(load) for *_, load in strips), 22.0
    chart = _Map([label for label, *_ in strips], experts, "load", height, WIDE)
    top, rows = chart.top, []
    for _, _, load in strips:
        full = 3 * sum(load) / len(load)
        rows.append([(min(1.0, n / full), str(n) if len(load) <= _MOST_EXPERTS else "") for n in load])
    chart.draw(rows, [str(expert) for expert in range(experts)], "expert")
    for place, (_, ranks, load) in enumerate(strips):
        for rank in range(1, ranks):
            edge = chart.x(rank * (len(load) // ranks))
            chart.rule(f"M{edge:.1f} {top + place * height:.1f}v{height - 1:g}", "stroke:currentColor;stroke-width:2")
    return chart
