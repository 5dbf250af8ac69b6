"""Several runs as sections: the runs, in what they differ, scaling over world sizes, and cases side by side. Pure."""

from collections.abc import Sequence

from bench.results.metrics import MetricValue
from reports import cells
from reports.analysis.attention import Sizes, contexts, crossover, sizes
from reports.analysis.problems import other_claims, told_of_runs
from reports.analysis.rank_hosts import ranks_words
from reports.analysis.several import Beside, Difference, One, Scaled, Several, beside, scaled, worlds
from reports.sections.columns import Column, figure, measurement, words
from reports.sections.doubts import heading, verdict_words
from reports.sections.node_comparison import (
    environment_section,
    far_section,
    over_nodes,
    over_nodes_section,
    problem_section,
    row_names,
)
from reports.sections.panels import Panel, Section, terms
from reports.sections.parallel_columns import context_columns

MOST_LINES, MOST_COLUMNS = 12, 8
_WHAT = "what was run, where and on what"


def several_sections(several: Several) -> tuple[Section, ...]:
    """Return what there is to show of several runs."""
    made = (
        _runs(several),
        problem_section(several),
        _differences(several),
        over_nodes_section(several),
        far_section(several),
        _scaling(several),
        environment_section(several),
        _context(several),
        _beside(several),
    )
    return tuple(section for section in made if section is not None)


def terminal_sections(several: Several) -> tuple[Section, ...]:
    """Return those of them that fit a terminal whatever the number of runs."""
    made = (_runs(several), problem_section(several), over_nodes_section(several), far_section(several))
    others = (_scaling(several), environment_section(several))
    return tuple(section for section in (*made, *others) if section is not None)


def scaling_lines(several: Several) -> list[tuple[str, dict[int, float]]]:
    """Return the efficiency by ranks of the first cases that scale, under their names, for the figure."""
    cases = () if over_nodes(several) else _scaled(several)[:MOST_LINES]
    name = row_names([one.first for one in cases])
    return [
        (name(one.first), {n: known for n in one.rows if (known := one.efficiency(n)) is not None}) for one in cases
    ]


def _runs(several: Several) -> Section:
    has_points = any(one.point for one in several.runs)
    has_nodes = any(one.num_nodes > 1 for one in several.runs)
    columns: tuple[Column[One], ...] = (
        words("run", lambda one: one.name, "how the tables below call it"),
        *([words("point", _point, "the point of the sweep that it measured")] if has_points else []),
        words("id", lambda one: one.run.info.id, "the run's folder"),
        *(_node_columns() if has_nodes else ()),
        words("verdict", lambda one: verdict_words(one.summary.verdict), "what became of its cases"),
        *([] if has_points else [words("what", lambda one: heading(one.run, one.summary), _WHAT, 5)]),
    )
    notes = (*several.lacking, *told_of_runs([one.run for one in several.runs], other_claims), *_first(several))
    panel = Panel(id="runs-table", title="Runs", caption="in the order given", columns=columns, rows=several.runs)
    return Section(id="runs", title="Runs", panels=(panel,), notes=notes)


def _node_columns() -> tuple[Column[One], ...]:
    return (
        figure("nodes", lambda one: one.num_nodes, lambda count: f"{count:.0f}" if count else "-", "on how many nodes"),
        words("placement", lambda one: one.nodes.placement if one.nodes else cells.UNKNOWN, "how ranks lie on nodes"),
        words("hosts", lambda one: ", ".join(one.nodes.names) if one.nodes else one.run.info.host, "the nodes", 4),
    )


def _first(several: Several) -> tuple[str, ...]:
    """Return what was run of a sweep's first point that ran: its other points differ in what their labels say."""
    one = next((one for one in several.runs if one.shown), several.runs[0])
    again = [run.number for run in several.runs if run not in several.counting]
    told = (f"Run again later, so not counted in the verdict: run {ranks_words(again)}.",) if again else ()
    return (*told, f"Run {one.number}: {heading(one.run, one.summary)}.") if one.point else told


def _point(one: One) -> str:
    return one.point.name if one.point else cells.UNKNOWN


def _differences(several: Several) -> Section:
    columns: tuple[Column[Difference], ...] = (
        words("what", lambda one: one.name, "what was recorded of the run"),
        *([_text(place, one) for place, one in enumerate(several.runs)] if _are_few(several) else [_texts()]),
    )
    rows = several.differences
    panel = Panel(id="differences-table", title="Differences", caption="run by run", columns=columns, rows=rows)
    return Section(
        id="differences", title="In what they differ", panels=(panel,) if rows else (), notes=(several.words,)
    )


def _are_few(several: Several) -> bool:
    """Say whether each run can have columns of its own."""
    return len(several.runs) <= MOST_COLUMNS


def _texts() -> Column[Difference]:
    def text(one: Difference) -> str:
        runs: dict[str, list[int]] = {}
        for number, value in enumerate(one.texts, start=1):
            runs.setdefault(value, []).append(number)
        return "; ".join(f"{value} (run {ranks_words(numbers)})" for value, numbers in runs.items())

    return words("values", text, "each value with the runs that have it")


def _scaling(several: Several) -> Section | None:
    cases = _scaled(several)
    if not cases or over_nodes(several):  # of one size it takes the first run's, whatever the placement
        return None
    panel = Panel(
        id="scaling-table",
        title="Scaling over world sizes",
        caption="rates at each number of ranks, and efficiency against the smallest",
        columns=_scaling_columns(cases),
        rows=cases,
        notes=(f"The first {MOST_LINES} of {len(cases)} cases are drawn.",) if len(cases) > MOST_LINES else (),
    )
    return Section(id="scaling", title="Scaling", panels=(panel,), terms=terms(("speed-up, efficiency", "busbw")))


def context_sizes(several: Several) -> tuple[Sizes, ...]:
    """Return the context-parallel steps of all runs that can be held against their ranks."""
    return sizes([one for run in several.runs for one in contexts(run.shown)])


def _context(several: Several) -> Section | None:
    found = context_sizes(several)
    panels = [
        Panel(
            id=f"context-sizes-{i}",
            title=one.title,
            caption="each method at each number of ranks",
            columns=context_columns(one.contexts),
            rows=one.contexts,
            notes=(crossover(one.contexts),) if crossover(one.contexts) else (),
            is_wide=True,
        )
        for i, one in enumerate(found, start=1)
    ]
    return Section(id="context-sizes", title="Context parallelism", panels=tuple(panels)) if panels else None


def _beside(several: Several) -> Section | None:
    rows = beside(several) if _are_few(several) else ()
    if not rows:
        return None
    panel = Panel(
        id="beside-table",
        title="Side by side",
        caption="times of the cases that several runs measured, and their ratio to the first such run's",
        columns=_beside_columns(several, rows),
        rows=rows,
    )
    return Section(id="beside", title="Side by side", panels=(panel,), terms=terms(("ratio", "interval")))


def _scaled(several: Several) -> tuple[Scaled, ...]:
    return scaled([row for one in several.runs for row in one.shown])


def _text(place: int, one: One) -> Column[Difference]:
    return words(one.name, lambda difference: difference.texts[place], f"of {one.run.info.id}")


def _scaling_columns(cases: Sequence[Scaled]) -> tuple[Column[Scaled], ...]:
    name = row_names([one.first for one in cases])
    first, *others = worlds(cases)
    return (
        words("case", lambda one: name(one.first), "what ran"),
        words("rate", lambda one: "busbw" if one.first.is_communication else "tokens/s", "what should grow or stay"),
        *(_rate(n) for n in (first, *others)),
        *(_efficiency(n) for n in others),
    )


def _rate(ranks: int) -> Column[Scaled]:
    def text(one: Scaled) -> str:
        rate = one.rate(ranks)
        return cells.quantity(rate, "B/s") if one.first.is_communication else cells.significant(rate)

    return Column(
        title=f"{ranks} ranks", text=text, sort=lambda one: one.rate(ranks), help=f"the rate on {ranks} ranks"
    )


def _efficiency(ranks: int) -> Column[Scaled]:
    help_text = f"the speed-up from the smallest world to {ranks} ranks over what they let hope for"
    return figure(f"efficiency {ranks}", lambda one: one.efficiency(ranks), cells.percent, help_text)


def _beside_columns(several: Several, rows: Sequence[Beside]) -> tuple[Column[Beside], ...]:
    name = row_names([one.first for one in rows])
    return (
        words("case", lambda one: name(one.first), "what ran"),
        *(_time(one) for one in several.runs),
        *(_ratio(one) for one in several.runs[1:]),
    )


def _time(run: One) -> Column[Beside]:
    def time(one: Beside) -> MetricValue | None:
        found = one.rows.get(run.number)
        return found.metrics.get(found.headline) if found else None

    return measurement(run.name, time, f"time in {run.run.info.id}, with its 95 % interval")


def _ratio(run: One) -> Column[Beside]:
    def ratio(one: Beside) -> MetricValue | None:
        return one.ratio(run.number) if run.number in one.rows else None

    return measurement(f"{run.name} / first", ratio, "time over that of the first run that has it")
