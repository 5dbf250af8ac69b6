"""The heat map of bandwidth from rank to rank."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_gigabytes
from parbench.reports.analysis.contrasts import Pairs
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.primitives import draw_heat_map
from parbench.reports.figures.style import color, new_figure
from parbench.reports.topology import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NUMBERED_RANKS = 10
_MAX_TICKS = 16


def chart_pairs(number: int, title: str, matrix: Pairs, nodes: Topology | None) -> Chart | None:
    """Return the bandwidth from rank to rank, node by node where nodes are known."""
    ranks = nodes.order_by_node(matrix.ranks) if nodes else matrix.ranks
    if not any(matrix.rate(source, target) for source in ranks for target in ranks):
        return None
    caption = "Thin lines separate nodes, thick ones switches." if nodes else ""
    return Chart(
        name=number_name("pairs", number),
        title=title,
        caption=caption,
        draw=partial(_draw_pairs, matrix, ranks, nodes),
    )


def _draw_pairs(matrix: Pairs, ranks: Sequence[int], nodes: Topology | None) -> "Figure":
    rates = [[matrix.rate(source, target) or 0.0 for target in ranks] for source in ranks]
    fastest = max(map(max, rates))
    is_numbered = len(ranks) <= MAX_NUMBERED_RANKS
    texts = [
        [format_gigabytes(rate) if rate and is_numbered else "" for rate in row] for row in rates
    ]
    shares = [[rate / fastest if rate else None for rate in row] for row in rates]
    figure, [axes] = new_figure(min(3.3, 0.6 + 0.35 * len(ranks)))
    draw_heat_map(axes, shares, texts)
    hosts = [nodes.hosts[rank] if nodes and rank < len(nodes.hosts) else "" for rank in ranks]
    places = range(0, len(ranks), -(-len(ranks) // _MAX_TICKS))
    middles = [place + 0.5 for place in places]
    axes.set_xticks(middles, [str(ranks[place]) for place in places])
    names = [f"{_shorten_host(hosts[place])} {ranks[place]}".strip() for place in places]
    axes.set_yticks(middles, names)
    axes.set_xlabel("to rank")
    axes.set_title("from rank")
    for place, (host, next_host) in enumerate(pairwise(hosts), start=1):
        if nodes and host != next_host:
            is_one_switch = nodes.switches.get(host) == nodes.switches.get(next_host)
            width = 0.6 if is_one_switch else 1.6
            axes.axhline(place, color=color("text"), linewidth=width)
            axes.axvline(place, color=color("text"), linewidth=width)
    return figure


def _shorten_host(host: str, max_letters: int = 12) -> str:
    return host if len(host) <= max_letters else f"{host[: max_letters - 1]}…"
