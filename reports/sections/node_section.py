"""The columns of a run's nodes, and of a rank-by-rank matrix whose ranks have hosts; and what distance costs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.results.stats import median
from reports import cells
from reports.analysis.findings import Findings
from reports.analysis.interference import Pairs
from reports.analysis.rank_hosts import NEAREST_FIRST, ONE_EACH, Nodes, ranks_words
from reports.sections.columns import Column, figure, words
from reports.sections.panels import Panel, Section


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host, its ranks, the switches above it and the cores of its ranks, ``-`` where they are unknown."""

    host: str
    ranks: tuple[int, ...]
    switch: str
    cores: str


@dataclass(frozen=True, kw_only=True)
class Near:
    """The pairs of ranks that are as far from each other: how many are known, and their median rate in B/s."""

    distance: str
    num_pairs: int
    bytes_per_second: float


def node_rows(nodes: Nodes) -> tuple[Node, ...]:
    """Return a line for each host."""
    return tuple(
        Node(
            host=host,
            ranks=nodes.ranks_on(host),
            switch=nodes.switches.get(host, cells.UNKNOWN),
            cores=_cores(nodes, nodes.ranks_on(host)),
        )
        for host in nodes.names
    )


def node_columns() -> tuple[Column[Node], ...]:
    """Return the columns of the hosts."""
    return (
        words("host", lambda one: one.host, "the node, as it calls itself"),
        words("ranks", lambda one: ranks_words(one.ranks), "the ranks that run on it"),
        figure("ranks a node", lambda one: len(one.ranks), cells.whole, "how many ranks run on it", 3),
        words("switches", lambda one: one.switch, "the path of switches above it, where Slurm's topology tells", 2),
        words("cores", lambda one: one.cores, "the cores that each of its ranks may use", 1),
    )


def node_notes(nodes: Nodes) -> tuple[str, ...]:
    """Return how ranks were placed, and in which job."""
    is_other = nodes.asked and nodes.placement not in (nodes.asked, ONE_EACH)
    asked = f"; {nodes.asked} was asked for" if is_other else ""
    job = (f"Slurm's job {nodes.job}.",) if nodes.job else ()
    return (f"Placement of {len(nodes.hosts)} ranks on {len(nodes.names)} nodes: {nodes.placement}{asked}.", *job)


def matrix_ranks(matrix: Pairs, nodes: Nodes) -> tuple[int, ...]:
    """Return the ranks of a matrix node by node; ranks without a host, which no run should have, last."""
    known = [rank for rank in nodes.by_node if rank in set(matrix.ranks)]
    return (*known, *(rank for rank in matrix.ranks if rank not in set(known)))


def matrix_columns(matrix: Pairs, nodes: Nodes) -> tuple[Column[int], ...]:
    """Return the sender with its host, then each receiver, node by node, with the bus bandwidth to it."""
    return (
        Column(
            title="from \\ to",
            text=lambda rank: _with_host(rank, nodes),
            sort=float,
            help="the rank that sends with its host, and those that receive",
            number=False,
        ),
        *(_receiver(matrix, nodes, target) for target in matrix_ranks(matrix, nodes)),
    )


def distances(matrix: Pairs, nodes: Nodes) -> tuple[Near, ...]:
    """Return the median rate of the pairs at each distance, the nearest first."""
    rates: dict[str, list[float]] = {}
    for a, b in matrix.rows:
        rate = matrix.rate(a, b)
        if rate and max(a, b) < len(nodes.hosts):
            rates.setdefault(nodes.distance(a, b), []).append(rate)
    return tuple(
        Near(distance=name, num_pairs=len(rates[name]), bytes_per_second=median(rates[name]))
        for name in NEAREST_FIRST
        if name in rates
    )


def distance_words(found: Sequence[Near]) -> tuple[str, ...]:
    """Return the medians in a sentence, and what each farther one is of the nearest."""
    if not found:
        return ()
    told = [f"{one.distance} {cells.quantity(one.bytes_per_second, 'B/s')} ({_pairs(one)})" for one in found]
    nearest, *others = found
    ratios = [
        f"{one.distance} runs at {cells.significant(one.bytes_per_second / nearest.bytes_per_second)} "
        f"of {nearest.distance}"
        for one in others
    ]
    return (f"Medians: {', '.join(told)}.", *([f"{', '.join(ratios)}."] if ratios else []))


def _pairs(one: Near) -> str:
    return f"{one.num_pairs} pair{'s' * (one.num_pairs != 1)}"


def _cores(nodes: Nodes, ranks: Sequence[int]) -> str:
    """Return the cores of a node's ranks: once if they share them."""
    own = {rank: nodes.affinities.get(rank, cells.UNKNOWN) for rank in ranks}
    if len(set(own.values())) == 1:
        return next(iter(own.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in own.items())


def _with_host(rank: int, nodes: Nodes) -> str:
    return f"{rank} {nodes.hosts[rank]}" if rank < len(nodes.hosts) else str(rank)


def _receiver(matrix: Pairs, nodes: Nodes, target: int) -> Column[int]:
    help_text = f"bus bandwidth to rank {target} in 1e9 B/s"
    return figure(_with_host(target, nodes), lambda source: matrix.rate(source, target), cells.gigabytes, help_text)


def node_section(found: Findings) -> Section | None:
    """Return the table of the run's nodes; None where all ranks are on one, or the run does not tell."""
    if found.nodes is None:
        return None
    panel = Panel(
        id="nodes-table",
        title="Nodes",
        caption="where each rank ran, hosts under one switch side by side",
        columns=node_columns(),
        rows=node_rows(found.nodes),
        notes=node_notes(found.nodes),
    )
    return Section(id="nodes", title="Nodes", panels=(panel,))
