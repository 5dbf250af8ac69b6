"""The report of several runs: the runs, in what they differ, scaling over ranks and nodes, and cases side by side."""

from collections.abc import Callable, Iterator, Sequence

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.formatting import (
    GIGA,
    format_count,
    format_number,
    format_percent,
    format_quantity,
    make_formatter,
)
from parbench.bench.results.metrics import MetricValue
from parbench.bench.text import pluralize
from parbench.reports.analysis.over_nodes import (
    Environments,
    OverNodes,
    environments,
    over_nodes,
    row_names,
)
from parbench.reports.analysis.several import (
    Difference,
    MatchedCase,
    NumberedRun,
    RunSet,
    Scaled,
    beside,
    scaled,
)
from parbench.reports.analysis.verdicts import (
    Problem,
    bad_rows,
    emulations,
    other_claims,
    told_of_runs,
    verdict_words,
)
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.lines import chart_scaling
from parbench.reports.report import (
    PROBLEM_COLUMNS,
    Column,
    Report,
    Section,
    Table,
    measurement,
    number,
    words,
)
from parbench.reports.sections.one_run import heading

MAX_LINES, MOST_COLUMNS = 12, 8
_RUN_HELP = "the run, and the point of a sweep that it measured"
_PERFECT = "A level line at 100 % is perfect scaling."


def report_of_several(several: RunSet) -> Report:
    """Return all that is to be said of several runs that have been summarised."""
    over = over_nodes(several)
    made = (
        _runs(several),
        _problems(several),
        _differences(several),
        _over_nodes(over),
        None
        if over
        else _scaling(several),  # of one size it takes the first run's, whatever the distribution
        _environments(environments(several)),
        _beside(several),
    )
    runs = [one.run for one in several.runs]
    return Report(
        name=f"{len(runs)} runs",
        verdicts=(several.verdict,),
        code=several.code,
        runs=tuple((one.run, one.summary) for one in several.runs),
        sections=tuple(section for section in made if section),
        emulated=told_of_runs(runs, emulations),
        heading=several.words,
    )


def _runs(several: RunSet) -> Section:
    has_points = any(one.point for one in several.runs)
    point: Column[NumberedRun] = words(
        "point",
        lambda one: one.point.name if one.point else "-",
        "the point of the sweep that it measured",
    )
    what_help = "what was run, where and on what"
    columns: list[Column[NumberedRun]] = [
        words("run", lambda one: one.name, "how the tables below call it"),
        *([point] if has_points else []),
        words("id", lambda one: one.run.info.id, "the run's folder"),
    ]
    if any(one.num_nodes > 1 for one in several.runs):
        columns += [
            number("nodes", lambda one: one.num_nodes or None, format_count, "on how many nodes"),
            words(
                "distribution",
                lambda one: one.nodes.distribution if one.nodes else "-",
                "how ranks lie on nodes",
            ),
            words(
                "hosts",
                lambda one: ", ".join(one.nodes.nodes) if one.nodes else one.run.info.host,
                "the nodes",
            ),
        ]
    columns.append(
        words("verdicts", lambda one: verdict_words(one.run, one.summary), "right, complete, quiet")
    )
    if not has_points:
        columns.append(words("what", lambda one: heading(one.run, one.summary), what_help))
    notes = [*several.lacking, *told_of_runs([one.run for one in several.runs], other_claims)]
    if again := [one.number for one in several.runs if one not in several.counting]:
        notes.append(f"Run again later, so not counted in the verdict: run {format_cpus(again)}.")
    # a sweep's other points differ in what their labels say
    first = next((one for one in several.runs if one.shown), several.runs[0])
    if first.point:
        notes.append(f"Run {first.number}: {heading(first.run, first.summary)}.")
    table = Table(
        id="runs-table",
        title="Runs",
        caption="in the order given",
        columns=tuple(columns),
        rows=several.runs,
    )
    return Section(id="runs", title="Runs", tables=(table,), notes=tuple(notes))


def _run_words(one: NumberedRun) -> str:
    return f"{one.name}: {one.point.name}" if one.point else one.name


def _problems(several: RunSet) -> Section | None:
    rows = tuple((one, problem) for one in several.runs for problem in bad_rows(one.summary))
    if not rows:
        return None
    columns: tuple[Column[tuple[NumberedRun, Problem]], ...] = (
        words("run", lambda row: _run_words(row[0]), _RUN_HELP),
        *(column.of(lambda row: row[1]) for column in PROBLEM_COLUMNS),
    )
    title = "Wrong, hung or failed"
    table = Table(
        id="problems-table", title=title, caption="run by run", columns=columns, rows=rows
    )
    return Section(id="problems", title=title, tables=(table,))


def _differences(several: RunSet) -> Section:
    def own(place: int, one: NumberedRun) -> Column[Difference]:
        return words(one.name, lambda difference: difference.texts[place], f"of {one.run.info.id}")

    def values(one: Difference) -> str:
        runs: dict[str, list[int]] = {}
        for run, value in enumerate(one.texts, start=1):
            runs.setdefault(value, []).append(run)
        return "; ".join(f"{value} (run {format_cpus(numbers)})" for value, numbers in runs.items())

    together: Column[Difference] = words("values", values, "each value with the runs that have it")
    columns: tuple[Column[Difference], ...] = (
        words("what", lambda one: one.name, "what was recorded of the run"),
        *(
            [own(*each) for each in enumerate(several.runs)]
            if len(several.runs) <= MOST_COLUMNS
            else [together]
        ),
    )
    rows, title = several.differences, "Differences"
    table = Table(
        id="differences-table",
        title="Differences",
        caption="run by run",
        columns=columns,
        rows=rows,
        where="page",
    )
    return Section(
        id="differences", title=title, tables=(table,) if rows else (), notes=(several.words,)
    )


def _over_nodes(found: Sequence[OverNodes]) -> Section | None:
    if not found:
        return None
    notes = [f"The first {MAX_LINES} of each kind are drawn."] if len(found) > MAX_LINES else []
    if (repeats := max(one.repeats for one in found)) > 1:
        notes.append(f"Up to {repeats} repeats: the one with the median time is shown.")
    table = Table(
        id="over-nodes-table",
        title="Over nodes",
        caption="bus bandwidth of operations and time of steps on as many nodes, and efficiency against the fewest",
        columns=_over_nodes_columns(found),
        rows=tuple(found),
        notes=tuple(notes),
        figures=lambda: _draw_over_nodes(found),
    )
    return Section(
        id="over-nodes",
        title="Over nodes",
        tables=(table,),
        terms=("speed-up, efficiency", "busbw"),
    )


def _over_nodes_columns(found: Sequence[OverNodes]) -> tuple[Column[OverNodes], ...]:
    def at(nodes: int) -> Column[OverNodes]:
        def text(one: OverNodes) -> str:
            return format_quantity(
                one.shown(nodes), "B/s" if one.scaled.first.is_communication else "s"
            )

        title = pluralize(nodes, "node")
        told = f"the rate or time on {title}"
        return Column(title, text, lambda one: one.shown(nodes), told)

    def efficiency(nodes: int) -> Column[OverNodes]:
        def share(one: OverNodes) -> float | None:
            return one.scaled.efficiency(nodes) if nodes > min(one.scaled.rows) else None

        title = pluralize(nodes, "node")
        told = f"the speed-up from the fewest nodes of the series to {title} over what they let hope for"
        return number(f"efficiency {title}", share, format_percent, told)

    counts = sorted({nodes for one in found for nodes in one.scaled.rows})
    each, each_help = make_formatter("{:g}"), "how many ranks each node had"
    return (
        words(
            "case",
            lambda one: one.label,
            "what ran, and how its ranks were placed where that differs",
        ),
        number("ranks a node", lambda one: one.layout.ranks_per_node, each, each_help),
        words(
            "distribution",
            lambda one: one.layout.distribution or "-",
            "how ranks lie on nodes, as found",
        ),
        words(
            "what",
            lambda one: "busbw" if one.scaled.first.is_communication else "step time",
            "what is shown",
        ),
        *map(at, counts),
        *map(efficiency, counts[1:]),
    )


def _draw_over_nodes(found: Sequence[OverNodes]) -> Iterator[Chart]:
    def lines(
        series: Sequence[OverNodes], value: Callable[[OverNodes, int], float | None]
    ) -> dict[str, dict[int, float]]:
        lines = {}
        for one in series[:MAX_LINES]:
            values = {nodes: value(one, nodes) for nodes in one.scaled.rows}
            lines[one.label] = {
                nodes: known for nodes, known in values.items() if known is not None
            }
        return lines

    def rate(one: OverNodes, nodes: int) -> float | None:
        bytes_per_second = one.shown(nodes)
        return None if bytes_per_second is None else bytes_per_second / GIGA

    operations = [one for one in found if one.scaled.first.is_communication]
    steps = [one for one in found if not one.scaled.first.is_communication]
    charts = (
        (
            "Bus bandwidth against nodes",
            "A line for each operation, size and distribution.",
            lines(operations, rate),
            quantities.BANDWIDTH,
        ),
        (
            "Step time against nodes",
            "A line for each step and distribution.",
            lines(steps, OverNodes.shown),
            quantities.TIME,
        ),
        (
            "Efficiency against nodes",
            _PERFECT,
            lines(found, lambda one, nodes: one.scaled.efficiency(nodes)),
            quantities.EFFICIENCY,
        ),
    )
    for index, (title, caption, values, quantity) in enumerate(charts, start=1):
        name = number_name("over_nodes", index)
        chart = chart_scaling(name, title, caption, values, "nodes", quantity)
        yield from list_charts(chart)


def _scaling(several: RunSet) -> Section | None:
    cases = scaled([row for one in several.runs for row in one.shown])
    if not cases:
        return None
    name = row_names([one.first for one in cases])

    def rate(ranks: int) -> Column[Scaled]:
        def text(one: Scaled) -> str:
            found = one.rate(ranks)
            return (
                format_quantity(found, "B/s")
                if one.first.is_communication
                else format_number(found)
            )

        told = f"the rate on {ranks} ranks"
        return Column(f"{ranks} ranks", text, lambda one: one.rate(ranks), told)

    def efficiency(ranks: int) -> Column[Scaled]:
        told = f"the speed-up from the smallest world to {ranks} ranks over what they let hope for"
        return number(
            f"efficiency {ranks}", lambda one: one.efficiency(ranks), format_percent, told
        )

    def draw() -> list[Chart]:
        lines = {}
        for one in cases[:MAX_LINES]:
            values = {ranks: one.efficiency(ranks) for ranks in one.rows}
            lines[name(one.first)] = {
                ranks: known for ranks, known in values.items() if known is not None
            }
        title = "Efficiency against ranks"
        quantity = quantities.EFFICIENCY
        chart = chart_scaling("scaling", title, _PERFECT, lines, "ranks", quantity)
        return list_charts(chart)

    counts = sorted({ranks for one in cases for ranks in one.rows})
    columns: tuple[Column[Scaled], ...] = (
        words("case", lambda one: name(one.first), "what ran"),
        words(
            "rate",
            lambda one: "busbw" if one.first.is_communication else "tokens/s",
            "what should grow or stay",
        ),
        *map(rate, counts),
        *map(efficiency, counts[1:]),
    )
    table = Table(
        id="scaling-table",
        title="Scaling over world sizes",
        caption="rates at each number of ranks, and efficiency against the smallest",
        columns=columns,
        rows=cases,
        notes=(f"The first {MAX_LINES} of {len(cases)} cases are drawn.",)
        if len(cases) > MAX_LINES
        else (),
        figures=draw,
    )
    return Section(
        id="scaling", title="Scaling", tables=(table,), terms=("speed-up, efficiency", "busbw")
    )


def _side_by_side(
    names: Sequence[tuple[int, str]], rows: Sequence[MatchedCase]
) -> tuple[Column[MatchedCase], ...]:
    def time(at: int, name: str) -> Column[MatchedCase]:
        def metric(one: MatchedCase) -> MetricValue | None:
            return one.rows[at].metrics.get(one.rows[at].headline) if at in one.rows else None

        return measurement(name, metric, f"time in {name}, with its 95 % interval", rows)

    def ratio(at: int, name: str) -> Column[MatchedCase]:
        told = f"time in {name} over that in the first that has it"
        return measurement(
            f"{name} / first", lambda one: one.ratio(at) if at in one.rows else None, told, rows
        )

    return (*(time(*each) for each in names), *(ratio(*each) for each in names[1:]))


def _environments(found: Sequence[Environments]) -> Section | None:
    if not found:
        return None
    columns: tuple[Column[Environments], ...] = (
        words("case", lambda one: one.label, "what ran"),
        number("nodes", lambda one: one.nodes, make_formatter("{:g}"), "on how many nodes"),
        *(
            column.of(lambda one: one.beside)
            for column in _side_by_side([*enumerate(found[0].names)], [one.beside for one in found])
        ),
    )
    title = "Environments side by side"
    caption = "times in each environment, and their ratio to the first that has one"
    table = Table(
        id="environments-table", title=title, caption=caption, columns=columns, rows=tuple(found)
    )
    return Section(id="environments", title=title, tables=(table,), terms=("ratio", "interval"))


def _beside(several: RunSet) -> Section | None:
    rows = beside(several) if len(several.runs) <= MOST_COLUMNS else ()
    if not rows:
        return None
    name = row_names([one.first for one in rows])
    columns: tuple[Column[MatchedCase], ...] = (
        words("case", lambda one: name(one.first), "what ran"),
        *_side_by_side([(one.number, one.name) for one in several.runs], rows),
    )
    title = "Side by side"
    table = Table(
        id="beside-table",
        title=title,
        caption="times of the cases that several runs measured, and their ratio to the first such run's",
        columns=columns,
        rows=rows,
        where="page",
    )
    return Section(id="beside", title=title, tables=(table,), terms=("ratio", "interval"))
