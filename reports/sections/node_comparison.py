"""Several runs over nodes as sections: what went wrong, scaling, within and across nodes, environments. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.results.metrics import MetricValue
from bench.results.stats import median
from reports import cells
from reports.analysis.group_kinds import ACROSS, OVER, Kinds, kinds, largest
from reports.analysis.labels import operation_without, short_labels
from reports.analysis.problems import Problem, bad_rows
from reports.analysis.rank_hosts import ONE_EACH, WITHIN
from reports.analysis.several import Beside, One, Scaled, Several
from reports.analysis.summary import Row
from reports.sections.columns import Column, T, figure, measurement, words
from reports.sections.communication_section import late_label
from reports.sections.panels import Panel, Section, terms

_UNKNOWN = "placement unknown"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What parts series beside their case; ``placement`` is empty where there is nothing to place."""

    ranks_per_node: float
    placement: str
    environment: str


@dataclass(frozen=True, kw_only=True)
class OverNodes:
    """A case in one layout at several numbers of nodes; ``label`` tells it apart, ``repeats`` is the most of any."""

    label: str
    layout: Layout
    scaled: Scaled
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Environments:
    """A case on as many nodes, in one layout, in several environments; ``beside`` holds their rows by ``names``."""

    label: str
    nodes: int
    names: tuple[str, ...]
    beside: Beside


MOST_LINES = 12
Lines = list[tuple[str, dict[int, float]]]


@dataclass(frozen=True, kw_only=True)
class Bad:
    """What went wrong in a run."""

    one: One
    problem: Problem


@dataclass(frozen=True, kw_only=True)
class Far:
    """An operation of a run within and across nodes, at the largest size of both."""

    one: One
    kinds: Kinds


def problem_section(several: Several) -> Section | None:
    """Return every case of every run that is wrong, hung or failed, with the reason, which names ranks and hosts."""
    rows = tuple(Bad(one=one, problem=problem) for one in several.runs for problem in bad_rows(one.summary))
    if not rows:
        return None
    columns: tuple[Column[Bad], ...] = (
        words("run", lambda bad: run_words(bad.one), "the run, and the point of a sweep that it measured"),
        words("case", lambda bad: bad.problem.case, "what ran"),
        words("status", lambda bad: bad.problem.status, "what became of it"),
        words("launches", lambda bad: bad.problem.launches, "in how many launches, of those planned"),
        words("reason", lambda bad: bad.problem.reason, "why, with the ranks and their hosts"),
    )
    title = "Wrong, hung or failed"
    panel = Panel(id="problems-table", title=title, caption="run by run", columns=columns, rows=rows)
    return Section(id="problems", title=title, panels=(panel,))


def over_nodes_section(several: Several) -> Section | None:
    """Return rates or times at each number of nodes, and the efficiency against the smallest."""
    found = over_nodes(several)
    if not found:
        return None
    notes = (f"The first {MOST_LINES} of each kind are drawn.",) if len(found) > MOST_LINES else ()
    repeats = max(one.repeats for one in found)
    if repeats > 1:
        notes = (*notes, f"Up to {repeats} repeats: the one with the median time is shown.")
    panel = Panel(
        id="over-nodes-table",
        title="Over nodes",
        caption="bus bandwidth of operations and time of steps on as many nodes, and efficiency against the fewest",
        columns=_over_nodes_columns(found),
        rows=found,
        notes=notes,
    )
    return Section(id="over-nodes", title="Over nodes", panels=(panel,), terms=terms(("speed-up, efficiency", "busbw")))


def rate_lines(several: Several) -> Lines:
    """Return the bus bandwidth in GB/s by nodes of the first operations, under their names."""
    found = [one for one in over_nodes(several) if one.scaled.first.is_communication][:MOST_LINES]
    return [(one.label, {n: rate / cells.GIGA for n in one.scaled.rows if (rate := _shown(one, n))}) for one in found]


def time_lines(several: Several) -> Lines:
    """Return the step time in seconds by nodes of the first steps, under their names."""
    found = [one for one in over_nodes(several) if not one.scaled.first.is_communication][:MOST_LINES]
    return [(one.label, {n: time for n in one.scaled.rows if (time := _shown(one, n))}) for one in found]


def efficiency_lines(several: Several) -> Lines:
    """Return the efficiency by nodes of the first series, under their names."""
    found = over_nodes(several)[:MOST_LINES]
    return [
        (one.label, {n: share for n in one.scaled.rows if (share := one.scaled.efficiency(n)) is not None})
        for one in found
    ]


def far_section(several: Several) -> Section | None:
    """Return what of each operation's bus bandwidth is left across nodes, run by run."""
    rows = tuple(Far(one=one, kinds=found) for one in several.runs for found in largest(kinds(one.shown, one.nodes)))
    if not rows:
        return None
    columns: tuple[Column[Far], ...] = (
        words("run", lambda far: run_words(far.one), "the run, and the point of a sweep that it measured"),
        words("operation", lambda far: _operation(far), "what is done, at the largest size that both have"),
        _reach("within", (WITHIN,)),
        _reach("across", (ACROSS, OVER)),
        figure("across / within", lambda far: far.kinds.ratio(), cells.significant, "what is left across nodes"),
    )
    title = "Within and across nodes"
    caption = "bus bandwidth in GB/s by kind of group, the median of its groups, each alone"
    panel = Panel(id="far-table", title=title, caption=caption, columns=columns, rows=rows)
    return Section(id="far", title=title, panels=(panel,), terms=terms(("busbw",)))


def environment_section(several: Several) -> Section | None:
    """Return the times in each environment of a sweep, side by side."""
    found = environments(several)
    if not found:
        return None
    names = found[0].names
    columns: tuple[Column[Environments], ...] = (
        words("case", lambda one: one.label, "what ran"),
        _count("nodes", lambda one: one.nodes, "on how many nodes"),
        *(_time(i, name) for i, name in enumerate(names)),
        *(_ratio(i, name) for i, name in enumerate(names) if i),
    )
    title = "Environments side by side"
    caption = "times in each environment, and their ratio to the first that has one"
    panel = Panel(id="environments-table", title=title, caption=caption, columns=columns, rows=found)
    return Section(id="environments", title=title, panels=(panel,), terms=terms(("ratio", "interval")))


def run_words(one: One) -> str:
    """Return what a line on a run calls it: its number, and the point that it measured."""
    return f"{one.name}: {one.point.name}" if one.point else one.name


def _over_nodes_columns(found: Sequence[OverNodes]) -> tuple[Column[OverNodes], ...]:
    counts = node_counts(found)
    return (
        words("case", lambda one: one.label, "what ran, and how its ranks were placed where that differs"),
        _count("ranks a node", lambda one: one.layout.ranks_per_node, "how many ranks each node had", drop=2),
        words("placement", lambda one: one.layout.placement or cells.UNKNOWN, "how ranks lie on nodes, as found", 3),
        words("what", lambda one: "busbw" if one.scaled.first.is_communication else "step time", "what is shown", 1),
        *(_at(n) for n in counts),
        *(_efficiency(n) for n in counts[1:]),
    )


def _shown(one: OverNodes, nodes: int) -> float | None:
    """Return the bus bandwidth of an operation, the time of a step."""
    row = one.scaled.rows.get(nodes)
    return row.value("busbw" if row.is_communication else row.headline) if row else None


def _at(nodes: int) -> Column[OverNodes]:
    def text(one: OverNodes) -> str:
        unit = "B/s" if one.scaled.first.is_communication else "s"
        return cells.quantity(_shown(one, nodes), unit)

    title = _nodes(nodes)
    return Column(title=title, text=text, sort=lambda one: _shown(one, nodes), help=f"the rate or time on {title}")


def _efficiency(nodes: int) -> Column[OverNodes]:
    def share(one: OverNodes) -> float | None:
        return one.scaled.efficiency(nodes) if nodes > min(one.scaled.rows) else None

    told = f"the speed-up from the fewest nodes of the series to {_nodes(nodes)} over what they let hope for"
    return figure(f"efficiency {_nodes(nodes)}", share, cells.percent, told)


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _count(title: str, value: Callable[[T], float | None], told: str, drop: int = 0) -> Column[T]:
    return figure(title, value, cells.formatted("{:g}"), told, drop)


def _operation(far: Far) -> str:
    params = far.kinds.first.case.params
    name = operation_without(far.kinds.first.case, ("group", "group_index", "concurrent"))
    told = (str(params.get(key, "")) for key in ("mode", "dtype"))
    return " ".join(word for word in (name, cells.size(far.kinds.size_bytes), *told) if word)


def _reach(title: str, reaches: tuple[str, ...]) -> Column[Far]:
    def rate(far: Far) -> float | None:
        kind = far.kinds.standing_for(*reaches)
        return far.kinds.rate(kind) if kind else None

    return figure(title, rate, cells.gigabytes, f"bus bandwidth {' or '.join(reaches)}, in 1e9 B/s")


def _time(index: int, name: str) -> Column[Environments]:
    def time(one: Environments) -> MetricValue | None:
        row = one.beside.rows.get(index)
        return row.metrics.get(row.headline) if row else None

    return measurement(name, time, f"time in {name}, with its 95 % interval")


def _ratio(index: int, name: str) -> Column[Environments]:
    def ratio(one: Environments) -> MetricValue | None:
        return one.beside.ratio(index) if index in one.beside.rows else None

    return measurement(f"{name} / first", ratio, f"time in {name} over that in the first")


@dataclass(frozen=True, kw_only=True)
class _Place:
    case_id: str
    layout: Layout
    nodes: int


def over_nodes(several: Several) -> tuple[OverNodes, ...]:
    """Return the cases that ran on two numbers of nodes or more; of repeats, the one with the median rate counts."""
    series: dict[tuple[str, Layout], dict[int, tuple[Row, ...]]] = {}
    for place, rows in _rows(several).items():
        series.setdefault((place.case_id, place.layout), {})[place.nodes] = rows
    cases = list(dict.fromkeys(case_id for case_id, _ in series))
    known = sorted(_with_bases(series).items(), key=lambda one: cases.index(one[0][0]))
    found = {key: of for key, of in known if len(of) > 1}
    labels = _labels([(next(iter(of.values()))[0], layout) for (_, layout), of in found.items()])
    return tuple(
        OverNodes(
            label=label,
            layout=layout,
            scaled=Scaled(rows={nodes: _median_row(rows) for nodes, rows in sorted(of.items())}),
            repeats=max(map(len, of.values())),
        )
        for label, ((_, layout), of) in zip(labels, found.items(), strict=True)
    )


def node_counts(found: Sequence[OverNodes]) -> tuple[int, ...]:
    """Return every number of nodes of any series, the smallest first."""
    return tuple(sorted({nodes for one in found for nodes in one.scaled.rows}))


def environments(several: Several) -> tuple[Environments, ...]:
    """Return the cases that ran in two environments of a sweep or more, all else alike."""
    names = tuple(dict.fromkeys(one.point.environment for one in several.runs if one.point and one.point.environment))
    found: dict[_Place, dict[int, Row]] = {}
    for place, rows in _rows(several).items():
        if place.layout.environment in names:
            alike = replace(place, layout=replace(place.layout, environment=""))
            found.setdefault(alike, {})[names.index(place.layout.environment)] = _median_row(rows)
    cases = list(dict.fromkeys(place.case_id for place in found))
    known = sorted(found.items(), key=lambda one: (cases.index(one[0].case_id), one[0].nodes))
    kept = {place: rows for place, rows in known if len(rows) > 1}
    labels = _labels([(next(iter(rows.values())), place.layout) for place, rows in kept.items()])
    return tuple(
        Environments(label=label, nodes=place.nodes, names=names, beside=Beside(rows=rows))
        for label, (place, rows) in zip(labels, kept.items(), strict=True)
    )


def row_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what tables call a row: a communication by its size, a step by what tells it apart."""
    labels = short_labels([row for row in rows if not row.is_communication])
    return lambda row: late_label(row) if row.is_communication else labels[row.case.id]


def layout_of(one: One, row: Row) -> Layout:
    """Return in what layout a run measured a row."""
    found = one.nodes.placement if one.nodes else one.point.placement if one.point else ""
    each = row.world.size / row.world.nodes
    is_placed = row.world.nodes > 1 and each > 1 and found != ONE_EACH
    environment = one.point.environment if one.point else ""
    return Layout(ranks_per_node=each, placement=(found or _UNKNOWN) if is_placed else "", environment=environment)


def _rows(several: Several) -> dict[_Place, tuple[Row, ...]]:
    """Return the rows of each place, one for each repeat: of a point that ran twice, its last run counts.

    Rows of an unknown number of nodes, 0, which an imported file may not tell, have no place.
    """
    found: dict[_Place, dict[object, Row]] = {}
    for one in several.runs:
        for row in one.shown:
            if "group" not in row.case.params and row.world.nodes:
                place = _Place(case_id=row.case.id, layout=layout_of(one, row), nodes=row.world.nodes)
                found.setdefault(place, {})[one.point.id if one.point else one.number] = row
    return {place: tuple(of.values()) for place, of in found.items()}


def _with_bases(
    series: Mapping[tuple[str, Layout], Mapping[int, tuple[Row, ...]]],
) -> dict[tuple[str, Layout], dict[int, tuple[Row, ...]]]:
    """Give every placement's series the rows of what needs none, such as a single node."""
    return {
        (case, layout): {**series.get((case, replace(layout, placement="")), {}), **of}
        for (case, layout), of in series.items()
    }


def _median_row(rows: Sequence[Row]) -> Row:
    """Return the row whose time is the median, the upper one of two in the middle."""
    known = [row for row in rows if row.value(row.headline)]
    if not known:
        return rows[0]
    middle = median([_seconds(row) for row in known])
    return min((row for row in known if _seconds(row) >= middle), key=_seconds)


def _seconds(row: Row) -> float:
    return row.value(row.headline) or 0.0


def _labels(found: Sequence[tuple[Row, Layout]]) -> list[str]:
    """Return what tells series apart: their cases, then those parts of layouts in which any differ."""
    name = row_names([row for row, _ in found])
    parts = [(f"{layout.ranks_per_node:g} a node", layout.placement, layout.environment) for _, layout in found]
    differing = [len(set(texts)) > 1 for texts in zip(*parts, strict=True)]
    return [
        ", ".join([name(row), *(text for text, differs in zip(texts, differing, strict=True) if differs and text)])
        for (row, _), texts in zip(found, parts, strict=True)
    ]
