"""Heat maps: rates from rank to rank, and grids of a plan."""

from collections.abc import Sequence
from itertools import pairwise

from parbench.reports import cells
from parbench.reports.analysis.contrasts import Pairs
from parbench.reports.analysis.ranks import Nodes
from parbench.reports.figures.palette import css_of
from parbench.reports.figures.svg import NARROW, Drawing, elided, width_of

Square = tuple[float | None, str]
_MAX_NUMBERED_RANKS = 10
_HOST_LETTERS, _MOST_LETTERS, _MAX_TICKS = 12, 36, 16
_PALEST, _FULLEST, _WORDS_SIZE = 0.06, 0.7, 11.0


class _Map(Drawing):
    """Rows of squares with names on the left and below, each so full of its colour as its share says."""

    def __init__(self, names: Sequence[str], columns: int, height: float) -> None:
        super().__init__(NARROW)
        self._names, self._columns, self._height = (
            [elided(one, _MOST_LETTERS) for one in names],
            columns,
            height,
        )
        self.left = 12 + max(map(width_of, self._names), default=0.0)

    @property
    def square(self) -> float:
        return (self.width - self.left - 24) / self._columns

    def x(self, place: float) -> float:
        return self.left + place * self.square

    def draw(
        self, rows: Sequence[Sequence[Square]], columns: Sequence[str], below: str = ""
    ) -> None:
        """Draw squares from the top, None as none, with their words; then the columns' names and what they are."""
        for name, row in zip(self._names, rows, strict=True):
            middle = self.top + self._height / 2
            self.text(self.left - 6, middle, name, "end")
            for j, (share, words) in enumerate(row):
                if share is not None:
                    style = f"fill:{css_of('blue')};fill-opacity:{_PALEST + (_FULLEST - _PALEST) * share:.3f}"
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
    words = cells.gigabytes if len(ranks) <= _MAX_NUMBERED_RANKS else lambda _: ""
    squares = [
        [(rate / fastest, words(rate)) if rate else (None, "") for rate in row] for row in rates
    ]
    every = -(-len(ranks) // _MAX_TICKS)
    hosts = [nodes.hosts[rank] if nodes and rank < len(nodes.hosts) else "" for rank in ranks]
    names = [f"{_short(host)} {rank}".strip() for host, rank in zip(hosts, ranks, strict=True)]
    shown = [name if i % every == 0 else "" for i, name in enumerate(names)]
    height = max(8.0, min(48.0, 400 / len(ranks)))
    chart = _Map(shown, len(ranks), height)
    top = chart.top
    chart.draw(squares, [str(rank) for rank in ranks], "to rank; from rank on the left")
    if nodes is not None:
        for place, (one, other) in enumerate(pairwise(hosts), start=1):
            if one != other:
                # a thick line between switches
                wide = 1.0 if nodes.switches.get(one) == nodes.switches.get(other) else 2.5
                style = f"stroke:currentColor;stroke-width:{wide:g}"
                chart.rule(f"M{chart.x(place):.1f} {top:.1f}v{height * len(ranks):.1f}", style)
                chart.rule(
                    f"M{chart.left:.1f} {top + height * place:.1f}H{chart.x(len(ranks)):.1f}", style
                )
    return chart


def _short(host: str) -> str:
    return host if len(host) <= _HOST_LETTERS else f"{host[: _HOST_LETTERS - 1]}…"
