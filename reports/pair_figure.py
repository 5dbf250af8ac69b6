"""The rank-by-rank heat map, node by node where ranks are on several."""

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from reports import cells
from reports.contrasts import Pairs
from reports.figures import MAX_RANK_TICKS
from reports.nodes.node_columns import matrix_ranks
from reports.nodes.rank_hosts import Nodes
from reports.svg import INK, SERIES, drawing

_MAX_NUMBERED = 10
_MAX_HOSTS, _HOST_LETTERS, _MAX_LEVEL = 16, 12, 4
_NODE_WIDTH, _SWITCH_WIDTH = 1.0, 2.2


def draw_pairs(matrix: Pairs, nodes: Nodes | None = None) -> Figure | None:
    """Return bus bandwidth from rank to rank as a heat map, with numbers if there is room; None if all is unknown.

    With ``nodes`` the ranks of a host stand side by side, with lines between hosts, and thick ones between switches.
    """
    ranks = matrix_ranks(matrix, nodes) if nodes else matrix.ranks
    rates = [[matrix.rate(source, target) for target in ranks] for source in ranks]
    known = [rate for row in rates for rate in row if rate]
    if not known:
        return None
    n = len(ranks)
    with drawing():
        figure = Figure(figsize=(5.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False)
        axes.set(xlabel="to rank", ylabel="from rank", xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), aspect="equal")
        places = range(0, n, -(-n // MAX_RANK_TICKS))
        axes.set_xticks(places, [str(ranks[place]) for place in places])
        axes.set_yticks(places, [str(ranks[place]) for place in places])
        for i, row in enumerate(rates):
            for j, rate in enumerate(row):
                if rate:
                    _draw_cell(axes, (i, j), rate, max(known), with_number=n <= _MAX_NUMBERED)
        if nodes is not None:
            _draw_borders(axes, ranks, nodes)
            _name_hosts(axes, ranks, nodes)
    return figure


def _draw_cell(axes: Axes, place: tuple[int, int], rate: float, fastest: float, *, with_number: bool) -> None:
    """Draw a square, the fuller of colour the faster: the slowest link stands out as the palest."""
    i, j = place
    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=SERIES[0], alpha=0.1 + 0.6 * rate / fastest, linewidth=0))
    if with_number:
        axes.text(j, i, cells.gigabytes(rate), ha="center", va="center")


def _draw_borders(axes: Axes, ranks: tuple[int, ...], nodes: Nodes) -> None:
    """Draw a line wherever neighbours are on two hosts, a thick one where they are under two switches."""
    hosts = _hosts(ranks, nodes)
    for place, (one, other) in enumerate(pairwise(hosts)):
        if one == other:
            continue
        is_switch = nodes.switches.get(one) != nodes.switches.get(other)
        width = _SWITCH_WIDTH if is_switch else _NODE_WIDTH
        axes.axvline(place + 0.5, color=INK, linewidth=width)
        axes.axhline(place + 0.5, color=INK, linewidth=width)


def _name_hosts(axes: Axes, ranks: tuple[int, ...], nodes: Nodes) -> None:
    """Write each host above and beside its ranks, where there is room for all."""
    hosts = _hosts(ranks, nodes)
    names = [host for host in nodes.names if host in hosts]
    if len(names) > _MAX_HOSTS:
        return
    places = [sum(i for i, host in enumerate(hosts) if host == name) / hosts.count(name) for name in names]
    short = [name if len(name) <= _HOST_LETTERS else f"{name[: _HOST_LETTERS - 1]}…" for name in names]
    above, beside = axes.secondary_xaxis("top"), axes.secondary_yaxis("right")
    above.set_xticks(places, short, rotation=0 if len(names) <= _MAX_LEVEL else 90)
    beside.set_yticks(places, short)
    for axis in (above, beside):
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)


def _hosts(ranks: tuple[int, ...], nodes: Nodes) -> list[str]:
    return [nodes.hosts[rank] if rank < len(nodes.hosts) else "" for rank in ranks]
