"""What the page's first screen draws of a run: bandwidth over size, and a traced step over time, side by side."""

from collections.abc import Sequence

from markupsafe import Markup

from reports.analysis.analysis import Analysis
from reports.analysis.labels import short_labels
from reports.analysis.summary import Row
from reports.figures.gantt import detail_of, draw_pipeline, last_of
from reports.figures.lines import RATE, Line, curve_lines, draw_sizes
from reports.figures.palette import OPERATIONS
from reports.figures.svg import NARROW, WIDE, figure
from reports.figures.timeline import draw_first, view_of

MOST_LINES = 6
_MOST_BOXES = 1500


def draw_first_screen(found: Analysis) -> list[Markup]:
    """Return the figures of the first screen; one alone is as wide as the page."""
    lines = first_lines(found.communication)
    timeline = next((one for one in found.timelines if one.timeline), None)
    pipeline = next((one for one in found.pipelines if one.facts.measured), None)
    is_pipelined = pipeline and (not timeline or timeline.row.case.id == pipeline.row.case.id)
    width = NARROW if lines and (timeline or pipeline) else WIDE
    bandwidth = draw_sizes(lines, RATE, found.ceiling, width)
    shown = figure(bandwidth, "first-bandwidth", "Bus bandwidth over size", "Bands are 95 % intervals.")
    labels = short_labels(found.steps)
    if is_pipelined and pipeline and pipeline.facts.measured:
        detail, span = detail_of(pipeline, _MOST_BOXES), last_of(pipeline.facts.measured)
        step = draw_pipeline(pipeline, detail, span, width=width, is_alone=True)
        told = f"Launch {pipeline.launch + 1}, each gap in the colour of its cause."
        shown += figure(step, "first-step", f"Pipeline: {labels[pipeline.row.case.id]}", told)
    elif timeline and timeline.timeline:
        step = draw_first(timeline.timeline, view_of(timeline.timeline, _MOST_BOXES), width)
        told = f"Launch {timeline.launch + 1}; what a step waits for is hatched or grey."
        shown += figure(step, "first-step", f"Traced step: {labels[timeline.row.case.id]}", told)
    return shown


def first_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return a line for each of six operations at most, of the mode and type in which most were measured."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        series.setdefault((str(row.case.params.get("mode")), str(row.case.params.get("dtype"))), []).append(row)
    lines = max((curve_lines(of, "busbw") for of in series.values()), key=len, default=())
    known = [*OPERATIONS]

    def place(line: Line) -> tuple[bool, int]:
        [name, *params] = line.label.split(" ")
        return bool(params), known.index(name) if name in known else len(known)

    plainest = {line.label.partition(" ")[0]: line for line in sorted(lines, key=place, reverse=True)}
    return tuple(sorted(plainest.values(), key=place)[:MOST_LINES])
