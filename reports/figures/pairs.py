"""The heat map of bus bandwidth from each rank to each other rank."""

from itertools import pairwise
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_gigabytes
from parbench.reports.analysis.topology import Topology
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.primitives import draw_heat_map, shorten
from parbench.reports.figures.style import color, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NUMBERED_RANKS = 10
"""The largest number of ranks at which cells contain their numbers."""
MAX_TICKS = 16
MAX_HOST_LETTERS = 12
_NODE_LINE_WIDTH = 0.6
_SWITCH_LINE_WIDTH = 1.6


def chart_links(
    number: int, title: str, bandwidths: "pd.DataFrame", topology: Topology | None
) -> Chart | None:
    """Return a heat map of bus bandwidth with a row per sender and a column per receiver.

    ``bandwidths`` is a frame in B/s, indexed by sending rank, with a column per receiving rank.
    ``number`` is a number from 1 that makes the name of the chart unique. None if all bandwidths
    are unknown.
    """
    if bandwidths.isna().all().all():
        return None
    caption = "Darker is faster."
    if topology:
        caption += " Thin lines separate nodes, thick lines switches."

    def draw() -> "Figure":
        """Draw the cells, the ranks as ticks, and borders between nodes if they are known."""
        ranks = list(bandwidths.index)
        figure, [axes] = new_figure(min(3.3, 0.6 + 0.35 * len(ranks)))
        is_numbered = len(ranks) <= MAX_NUMBERED_RANKS
        draw_heat_map(axes, bandwidths.to_numpy(), format_gigabytes if is_numbered else None)
        hosts = [topology.get_host(rank) if topology else "" for rank in ranks]
        indices = range(0, len(ranks), -(-len(ranks) // MAX_TICKS))
        centers = [index + 0.5 for index in indices]
        axes.set_xticks(centers, [str(ranks[index]) for index in indices])
        names = [
            f"{shorten(hosts[index], MAX_HOST_LETTERS)} {ranks[index]}".strip() for index in indices
        ]
        axes.set_yticks(centers, names)
        axes.set_xlabel("to rank")
        axes.set_title("from rank")
        if topology:
            _draw_node_borders(axes, hosts, topology)
        return figure

    return Chart(
        name=number_name("pairs", number),
        title=title,
        caption=caption,
        draw=draw,
    )


def _draw_node_borders(axes: "Axes", hosts: list[str], topology: Topology) -> None:
    """Draw lines between ranks of different nodes, thicker ones between different switches.

    ``hosts`` are the host names of the rows in order.
    """
    for index, (host, next_host) in enumerate(pairwise(hosts), start=1):
        if host != next_host:
            is_one_switch = topology.switches.get(host) == topology.switches.get(next_host)
            width = _NODE_LINE_WIDTH if is_one_switch else _SWITCH_LINE_WIDTH
            axes.axhline(index, color=color("text"), linewidth=width)
            axes.axvline(index, color=color("text"), linewidth=width)
