"""The heat map of bus bandwidth from each rank to each other rank."""

from itertools import pairwise
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_gigabytes
from parbench.reports.analysis.topology import Topology
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.primitives import draw_heat_map
from parbench.reports.figures.style import color, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MAX_TICKS = 16
"""The largest number of rank numbers on an axis."""


def chart_links(
    number: int, title: str, bandwidths: "pd.DataFrame", topology: Topology | None
) -> Chart | None:
    """Return a heat map of bus bandwidth with a row per sender and a column per receiver.

    ``bandwidths`` is a frame in B/s, indexed by sending rank, with a column per receiving rank.
    ``topology`` has the hosts of the ranks, None for a single host. ``number`` is a number from 1
    that makes the name of the chart unique. None if all bandwidths are unknown.
    """
    if bandwidths.isna().all().all():
        return None
    ranks = list(bandwidths.index)
    hosts = [topology.get_host(rank) if topology else "" for rank in ranks]

    def draw() -> "Figure":
        """Draw the cells, the ranks as ticks, and lines between nodes."""
        figure, [axes] = new_figure(min(3.3, 0.6 + 0.35 * len(ranks)))
        draw_heat_map(axes, bandwidths.to_numpy(), format_gigabytes)
        step = -(-len(ranks) // MAX_TICKS)
        centers = [index + 0.5 for index in range(len(ranks))][::step]
        axes.set_xticks(centers, ranks[::step])
        axes.set_yticks(centers, ranks[::step])
        axes.set_xlabel("to rank")
        axes.set_title("from rank")
        for border, (host, next_host) in enumerate(pairwise(hosts), start=1):
            if host != next_host:
                axes.axhline(border, color=color("text"), linewidth=0.6)
                axes.axvline(border, color=color("text"), linewidth=0.6)
        return figure

    return Chart(
        name=number_name("pairs", number),
        title=title,
        caption="Darker is faster. Lines separate nodes.",
        draw=draw,
    )
