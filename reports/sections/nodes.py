"""The report on ranks: where they ran, rates from one to another, what distance costs, who comes late, each
repetition."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from parbench.bench.machine.environment import format_cpus
from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_case_size,
    format_count,
    format_gigabytes,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.bench.results.stats import median
from parbench.bench.text import pluralize
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.contrasts import Pairs
from parbench.reports.analysis.labels import operation, short_labels
from parbench.reports.analysis.ranks import (
    NEAREST_FIRST,
    ONE_EACH,
    Late,
    Nodes,
    RepetitionLoad,
    repetitions_of,
)
from parbench.reports.figures.chart import list_charts
from parbench.reports.figures.pairs import chart_pairs
from parbench.reports.report import Column, Section, Table, known, number, words
from parbench.reports.sections.communication import PLOTTED
from parbench.reports.sections.row_columns import (
    case_columns,
    communication_columns,
    headline,
    metric_column,
)

MOST_RANKS = 16


def node_section(found: Analysis) -> Section | None:
    """Return the run's nodes; None where all ranks are on one, or the run does not tell."""
    return (
        Section(id="nodes", title="Nodes", tables=(node_table(found.nodes),))
        if found.nodes
        else None
    )


def node_table(nodes: Nodes) -> Table[str]:
    is_other = nodes.asked and nodes.distribution not in (nodes.asked, ONE_EACH)
    asked = f"; {nodes.asked} was asked for" if is_other else ""
    placed = f"Distribution of {len(nodes.hosts)} ranks on {len(nodes.names)} nodes: {nodes.distribution}{asked}."
    ranks, switches_help = (
        nodes.ranks_on,
        "the path of switches above it, where Slurm's topology tells",
    )
    columns: tuple[Column[str], ...] = (
        words("host", str, "the node, as it calls itself"),
        words("ranks", lambda host: format_cpus(ranks(host)), "the ranks that run on it"),
        number(
            "ranks a node", lambda host: len(ranks(host)), format_count, "how many ranks run on it"
        ),
        words("switches", lambda host: nodes.switches.get(host, UNKNOWN), switches_help),
        words(
            "cores",
            lambda host: _cores(nodes, ranks(host)),
            "the cores that each of its ranks may use",
        ),
    )
    return Table(
        id="nodes-table",
        title="Nodes",
        caption="where each rank ran, hosts under one switch side by side",
        columns=columns,
        rows=tuple(nodes.names),
        notes=(placed, *([f"Slurm's job {nodes.job}."] if nodes.job else [])),
    )


def _cores(nodes: Nodes, ranks: Sequence[int]) -> str:
    own = {rank: nodes.affinities.get(rank, UNKNOWN) for rank in ranks}
    if len(set(own.values())) == 1:
        return next(iter(own.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in own.items())


def pair_section(found: Analysis) -> Section | None:
    """Return the rank-by-rank matrices, node by node where ranks are on several; on the page their rows too."""
    tables = [
        table
        for i, matrix in enumerate(found.matrices, start=1)
        for table in pair_tables(matrix, i, found.nodes)
    ]
    return Section(id="pairs", title="Rank to rank", tables=tuple(tables)) if tables else None


def pair_tables(matrix: Pairs, index: int, nodes: Nodes | None) -> Iterator[Table[Any]]:
    """Yield the page's table with a row for each pair and a heat map, and the terminal's matrix."""
    rows, params = tuple(matrix.rows.values()), matrix.first.case.params
    told = f"{format_case_size(matrix.first.size_bytes)} {params.get('dtype', '-')}, {params.get('mode', '-')}"
    title = f"Rank to rank: bus bandwidth in GB/s, {told}"
    ranks = nodes.ordered(matrix.ranks) if nodes else matrix.ranks
    notes = distance_words(matrix, nodes) if nodes else ()
    yield Table(
        id=f"pairs-{index}",
        title=title,
        caption=PLOTTED,
        columns=communication_columns(rows),
        rows=rows,
        notes=notes,
        figures=lambda: list_charts(chart_pairs(index, title, matrix, nodes)),
        where="page",
    )

    def name(rank: int) -> str:
        return f"{rank} {nodes.hosts[rank]}" if nodes and rank < len(nodes.hosts) else str(rank)

    def receiver(target: int) -> Column[int]:
        told = f"bus bandwidth to rank {target} in 1e9 B/s"
        return number(
            name(target), lambda source: matrix.rate(source, target), format_gigabytes, told
        )

    sender = Column(
        "from \\ to",
        name,
        float,
        "the rank that sends, and those that receive",
        number=nodes is None,
    )
    yield Table(
        id=f"pairs-{index}-matrix",
        title=title,
        caption="a line for each sender, a column for each receiver",
        columns=(sender, *map(receiver, ranks)),
        rows=ranks,
        notes=notes,
        where="terminal",
    )


def distance_words(matrix: Pairs, nodes: Nodes) -> tuple[str, ...]:
    """Return the median rate of the pairs at each distance in a sentence, and what the farther are of the nearest."""
    rates: dict[str, list[float]] = {}
    for a, b in matrix.rows:
        if max(a, b) < len(nodes.hosts) and (rate := matrix.rate(a, b)):
            rates.setdefault(nodes.distance(a, b), []).append(rate)
    medians = {name: median(rates[name]) for name in NEAREST_FIRST if name in rates}
    if not medians:
        return ()
    told = (
        f"{name} {format_quantity(rate, 'B/s')} ({pluralize(len(rates[name]), 'pair')})"
        for name, rate in medians.items()
    )
    (nearest, best), *others = medians.items()
    ratios = [f"{name} runs at {format_number(rate / best)} of {nearest}" for name, rate in others]
    return (f"Medians: {', '.join(told)}.", *([f"{', '.join(ratios)}."] if ratios else []))


def arrival_section(found: Analysis) -> Section | None:
    """Return who comes late to what, the operations and steps with the largest skew."""
    late = found.late
    if not late:
        return None
    clocks = dict.fromkeys((one.arrival.method, one.arrival.uncertainty) for one in late)
    table = Table(
        id="arrivals-table",
        title="Who comes late",
        caption=f"arrivals on one clock, the {len(late)} cases with the largest skew",
        columns=_late_columns(late),
        rows=late,
        notes=tuple(
            f"Clocks: {method}, right within {format_seconds(seconds)}."
            for method, seconds in clocks
        ),
    )
    return Section(id="arrivals", title="Arrivals", tables=(table,), terms=("late",))


def _late_columns(late: Sequence[Late]) -> tuple[Column[Late], ...]:
    def lateness(rank: int) -> Column[Late]:
        told = f"how long after the first rank {rank} arrives, the median"
        return number(
            f"rank {rank}", lambda one: one.seconds_by_rank.get(rank), format_seconds, told
        )

    rows = [one.row for one in late]
    steps = short_labels([row for row in rows if not row.is_communication])

    def case(one: Late) -> str:
        return steps.get(one.row.case.id) or operation(one.row.case)

    return (
        words("case", case, "what is done, or the step with the parameters in which steps differ"),
        *(
            column.of(lambda one: one.row)
            for column in (
                *case_columns(),
                headline("time", rows),
                metric_column("skew"),
                metric_column("transfer"),
            )
        ),
        number(
            "late rank",
            lambda one: one.arrival.late_rank,
            format_count,
            "the rank that most often arrives last",
        ),
        number(
            "in",
            lambda one: one.arrival.share,
            format_percent,
            "the share of iterations in which it does",
        ),
        number(
            "last out",
            lambda one: one.arrival.last_out_rank,
            format_count,
            "the rank that most often leaves last",
        ),
        *(
            lateness(rank)
            for rank in sorted({rank for one in late for rank in one.seconds_by_rank})[:MOST_RANKS]
        ),
    )


def _of_load(value: Callable[[HostLoad], float | None]) -> Callable[[RepetitionLoad], float | None]:
    return lambda one: None if one.load is None else value(one.load)


_REPETITION_COLUMNS: tuple[Column[RepetitionLoad], ...] = (
    number("repetition", lambda one: one.number, format_count, "ranks started anew"),
    number(
        "took",
        lambda one: one.seconds,
        format_seconds,
        "from the end of the repetition before, or the run's start",
    ),
    number(
        "measuring",
        lambda one: one.measuring_seconds / one.seconds if one.seconds else None,
        format_percent,
        "share of that in which cases were prepared, warmed up, timed and checked",
    ),
    number(
        "load average",
        _of_load(lambda load: load.one_minute),
        format_number,
        "of the minute before",
    ),
    number(
        "others",
        _of_load(lambda load: load.other_cores),
        format_number,
        "cores that others kept busy",
    ),
    number(
        "steal",
        _of_load(lambda load: None if load.steal_percent is None else load.steal_percent / 100),
        format_percent,
        "share of the cores' time that the hypervisor gave to others",
    ),
)


def repetition_section(found: Analysis) -> Section | None:
    rows = repetitions_of(found.run)
    if not rows:
        return None
    on = {one.load.cores for one in rows if one.load}
    where = f" on {'/'.join(map(str, sorted(on)))} cores" if on else ""
    caption = "how long each took, and what else its host did while it measured"
    columns = known(_REPETITION_COLUMNS, rows)
    table = Table(
        id="repetitions", title=f"Repetitions{where}", caption=caption, columns=columns, rows=rows
    )
    return Section(id="repetitions-section", title="Repetitions", tables=(table,))
