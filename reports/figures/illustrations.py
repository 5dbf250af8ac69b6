"""The page's figures, by the panel that they illustrate."""

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from reports import cells
from reports.analysis.experts import atlases, distinct
from reports.analysis.findings import Findings
from reports.analysis.group_kinds import series_of_kinds
from reports.analysis.interference import matrix_title
from reports.analysis.labels import short_labels
from reports.analysis.pipelines import Pipeline, schedule_labels
from reports.analysis.several import Several
from reports.analysis.timelines import Traced
from reports.figures import svg
from reports.figures.figures import (
    draw_arrivals,
    draw_breakdown,
    draw_curves,
    draw_memory,
    draw_scaling,
    draw_steps,
)
from reports.figures.gantt import detail_of, gantt_svg, gantt_words
from reports.figures.node_figures import (
    EFFICIENCY,
    RATE,
    TIME,
    Line,
    Scale,
    draw_against_nodes,
    draw_kinds,
    draw_pairs,
)
from reports.figures.parallel_figures import against_ranks, draw_atlas, draw_loads, draw_methods
from reports.figures.timeline_svg import timeline_svg, timeline_words, view_of
from reports.sections.communication_section import late_label, series_of, series_words
from reports.sections.node_comparison import efficiency_lines, rate_lines, time_lines
from reports.sections.several_sections import context_sizes, scaling_lines

Figures = Mapping[str, Sequence[Markup]]
# of all charts of a kind together, so that the page stays under a megabyte
_MOST_BOXES = 5000
_MOST_SPANS = 12000
_MOST_OPERATIONS = 6
_INTERVALS = "Bands and bars are 95 % intervals."


def illustrations(found: Findings) -> dict[str, tuple[Markup, ...]]:
    """Return the figures of each panel that has any, by its id."""
    return {name: tuple(figures) for draw in FIGURES for name, figures in draw(found).items() if figures}


def scaling_figures(several: Several) -> dict[str, tuple[Markup, ...]]:
    """Return the figure of several runs' scaling, under its panel's id."""
    what = "A level line at 100 % is perfect scaling."
    drawn = svg.drawn(draw_scaling(scaling_lines(several)), "scaling-efficiency", "Efficiency against ranks", what)
    figures = {"scaling-table": tuple(drawn)} if drawn else {}
    if over := _over_nodes(several):
        figures["over-nodes-table"] = tuple(over)
    for i, one in enumerate(context_sizes(several), start=1):
        told = "The dotted line is where a ring and Ulysses send as much forward." if one.crossover_ranks else ""
        figure = draw_methods(one.lines, against_ranks(one.crossover_ranks))
        figures[f"context-sizes-{i}"] = tuple(svg.drawn(figure, f"context-sizes-{i}-methods", one.title, told))
    return figures


def _over_nodes(several: Several) -> list[Markup]:
    perfect = "A level line at 100 % is perfect scaling."
    asked: tuple[tuple[Sequence[Line], Scale, str, str], ...] = (
        (rate_lines(several), RATE, "Bus bandwidth against nodes", "A line for each operation, size and placement."),
        (time_lines(several), TIME, "Step time against nodes", "A line for each step and placement."),
        (efficiency_lines(several), EFFICIENCY, "Efficiency against nodes", perfect),
    )
    return [
        drawn + Markup("<figcaption>{}</figcaption>").format(title)
        for i, (lines, scale, title, what) in enumerate(asked, start=1)
        for drawn in svg.drawn(draw_against_nodes(lines, scale), f"over-nodes-{i}", title, what)
    ]


def _curves(found: Findings) -> Figures:
    drawn = {}
    for i, (series, rows) in enumerate(series_of(found.communication).items(), start=1):
        name, title = f"communication-{i}", series_words(series)
        curves = [curve for curve in found.curves if [*series_of(curve.rows)] == [series]]
        bandwidth, time = draw_curves(rows, "busbw", ceiling=found.ceiling), draw_curves(rows, "time", curves)
        both = (
            svg.drawn(bandwidth, f"{name}-busbw", f"Bus bandwidth against size: {title}", _INTERVALS),
            svg.drawn(time, f"{name}-time", f"Time against size: {title}", _INTERVALS),
        )
        drawn[name] = [figure for one in both for figure in one]
    return drawn


def _kinds(found: Findings) -> Figures:
    drawn: list[Markup] = []
    for i, (series, rows) in enumerate(list(series_of_kinds(found.kinds).items())[:_MOST_OPERATIONS], start=1):
        title = f"Within and across nodes: {', '.join(word for word in series if word != cells.UNKNOWN)}"
        figures = svg.drawn(draw_kinds(rows), f"group-kinds-{i}", title, "A line for each kind of group.")
        drawn += [figure + Markup("<figcaption>{}</figcaption>").format(title) for figure in figures]
    return {"group-kinds": drawn}


def _pairs(found: Findings) -> Figures:
    what = "Ranks stand node by node; thin lines part nodes, thick ones switches." if found.nodes else ""
    return {
        f"pairs-{i}": svg.drawn(draw_pairs(matrix, found.nodes), f"pairs-{i}-rates", matrix_title(matrix), what)
        for i, matrix in enumerate(found.matrices, start=1)
    }


def _arrivals(found: Findings) -> Figures:
    title = "How long after the first each rank arrives"
    what = "Each cell is a rank's median lateness, the fuller of colour the later."
    figure = draw_arrivals([(late_label(one.row), one.seconds_by_rank) for one in found.late])
    return {"arrivals-table": svg.drawn(figure, "arrivals-strips", title, what)}


def _steps(found: Findings) -> Figures:
    times = "Step time, launch by launch (circles) and over all launches (diamonds)"
    parts = "Where the time went: the parts of each step"
    what = "Each bar is a traced step, its parts in the legend's order."
    held = "Each bar is what the fullest rank holds, its components in the legend's order."
    return {
        "steps-table": svg.drawn(draw_steps(found.steps), "steps-time", times, _INTERVALS),
        "step-time": svg.drawn(draw_breakdown(found.steps), "steps-breakdown", parts, what),
        "step-memory": svg.drawn(draw_memory(found.steps), "steps-memory", "Memory by component, measured", held),
    }


def _timelines(found: Findings) -> Figures:
    labels = short_labels(found.steps)
    shown = [one for one in found.timelines if one.timeline]
    return {
        "step-timelines": [
            chart
            for i, one in enumerate(shown, start=1)
            for chart in _timeline(one, f"timeline-{i}", labels[one.row.case.id], _MOST_SPANS // len(shown))
        ]
    }


def _timeline(one: Traced, name: str, label: str, most_boxes: int) -> list[Markup]:
    if one.timeline is None:
        return []
    view = view_of(one.timeline, most_boxes)
    drawn = timeline_svg(one.timeline, view, name=name, title=f"Timeline of a traced step: {label}")
    told = f"Launch {one.launch + 1}. {timeline_words(one.timeline, view)}"
    return [svg.captioned(drawn, label, told)]


def _pipelines(found: Findings) -> Figures:
    labels = schedule_labels(found.pipelines)
    return {
        "pipelines": [
            chart
            for i, one in enumerate(found.pipelines, start=1)
            for chart in _chart(one, f"pipelines-{i}", labels[one.row.case.id], _MOST_BOXES // len(found.pipelines))
        ]
    }


def _chart(one: Pipeline, name: str, label: str, most_boxes: int) -> list[Markup]:
    """Return a pipeline's Gantt chart with its caption; nothing without a timeline."""
    if one.facts.measured is None:
        return []
    detail = detail_of(one, most_boxes)
    drawn = gantt_svg(one, detail, name=name, title=f"Pipeline, predicted and measured: {label}")
    return [svg.captioned(drawn, label, gantt_words(one, detail))]


def _contexts(found: Findings) -> Figures:
    what = "A line for each method; bars are 95 % intervals."
    return {
        "context-table": [
            Markup(drawn) + Markup("<figcaption>{}</figcaption>").format(one.title)
            for i, one in enumerate(found.context_comparisons, start=1)
            for drawn in svg.drawn(draw_methods(one.lines), f"context-{i}", one.title, what)
        ]
    }


def _mixtures(found: Findings) -> Figures:
    what = "Each cell is a routing under a capacity, the fuller of colour the longer its step and the more it drops."
    drawn = {
        f"experts-atlas-{i}": svg.drawn(draw_atlas(atlas), f"experts-atlas-{i}-map", atlas.title, what)
        for i, atlas in enumerate(atlases(found.mixtures), start=1)
    }
    strips = "Each strip is a step's experts, rank by rank, the fuller of colour the more tokens chose them."
    loads = draw_loads(distinct(found.mixtures))
    return {**drawn, "experts-load": svg.drawn(loads, "experts-load-map", "Tokens by rank and expert", strips)}


FIGURES: tuple[Callable[[Findings], Figures], ...] = (
    _curves,
    _kinds,
    _pairs,
    _arrivals,
    _steps,
    _timelines,
    _pipelines,
    _contexts,
    _mixtures,
)
