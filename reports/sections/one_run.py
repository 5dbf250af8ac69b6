"""The report of one run as it is read: what was run, the first screen, what stands out, and its sections."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from markupsafe import Markup

from parbench.bench.results.runs import Run
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.text import format_duration, pluralize
from parbench.reports.analysis.analysis import Analysis, analyse, front_of
from parbench.reports.analysis.contrasts import settings_words
from parbench.reports.analysis.findings import look_at_first
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.labels import environment_facts, short_labels
from parbench.reports.analysis.ranks import measuring_words
from parbench.reports.analysis.steps import broken_down, calls_of
from parbench.reports.analysis.summary import Row, Summary, summarize
from parbench.reports.analysis.verdicts import (
    Verdict,
    bad_rows,
    emulations,
    not_measured,
    other_claims,
    warnings_of,
)
from parbench.reports.figures.gantt import detail_of, draw_pipeline, last_of
from parbench.reports.figures.lines import RATE, Line, curve_lines, draw_sizes
from parbench.reports.figures.palette import OPERATIONS
from parbench.reports.figures.svg import NARROW, WIDE, figure
from parbench.reports.figures.timeline import draw_first, view_of
from parbench.reports.report import Report, Section
from parbench.reports.sections.attention import attention_section
from parbench.reports.sections.communication import (
    communication_section,
    contrast_section,
    group_section,
)
from parbench.reports.sections.experts import experts_section
from parbench.reports.sections.nodes import (
    arrival_section,
    node_section,
    pair_section,
    repetition_section,
)
from parbench.reports.sections.predictions import predicted_section
from parbench.reports.sections.steps import step_section

_MOST_LINES, _MOST_BOXES = 6, 1500  # of the first screen
SECTIONS: tuple[Callable[[Analysis], Section | None], ...] = (
    node_section,
    communication_section,
    contrast_section,
    group_section,
    pair_section,
    step_section,
    attention_section,
    experts_section,
    arrival_section,
    predicted_section,
    repetition_section,
)


def report_of(run: Run, *more: Verdict) -> Report:
    """Analyse a run once, and return all that is to be said of it, with verdicts from elsewhere after its own."""
    summary = summarize(run)
    found = analyse(run, summary)
    front = front_of(found, more)
    return Report(
        name=run.info.id,
        verdicts=front.verdicts,
        code=summary.tally.code,
        runs=((run, summary),),
        sections=tuple(section for make in SECTIONS if (section := make(found))),
        emulated=emulations(run),
        claims=other_claims(run),
        heading=heading(run, summary),
        front=front,
        figures=partial(draw_first_screen, found),
        warnings=warnings_of(run),
        problems=bad_rows(summary),
        findings=look_at_first(found),
        comparisons=settings_words([*found.steps, *found.communication]),
        not_measured=not_measured(summary),
        environment=tuple(environment_facts(run.info.environment or {})),
        footnotes=_footnotes(run, summary),
    )


def heading(run: Run, summary: Summary) -> str:
    plan = run.info.plan
    nodes = sorted({row.world.nodes for row in summary.rows})
    where = f" on {'/'.join(map(str, nodes))} node{'s' * (nodes != [1])}" if nodes else ""
    parts = [
        f"preset {plan.preset}: {pluralize(plan.nproc, 'rank')}{where}, {plan.backend}, {plan.device}",
        pluralize(plan.repetitions, "repetition"),
        f"host {run.info.host}",
    ]
    # each where it is the same for all ranks and known
    for group, name, word in (
        ("host", "cpu_model", ""),
        ("torch", "gpu", ""),
        ("torch", "version", "torch "),
    ):
        values = (run.info.environment or {}).get(group) or {}
        if values.get(name):
            parts.append(f"{word}{values[name]}")
    return "; ".join([*parts, f"started {run.info.started}", measuring_words(run)])


def draw_first_screen(found: Analysis) -> list[Markup]:
    """Return the figures of the first screen; one alone is as wide as the page."""
    lines = first_lines(found.communication)
    timeline = next((one for one in found.timelines if one.timeline), None)
    pipeline = next((one for one in found.pipelines if one.facts.measured), None)
    is_pipelined = pipeline and (not timeline or timeline.row.case.id == pipeline.row.case.id)
    width = NARROW if lines and (timeline or pipeline) else WIDE
    bandwidth = draw_sizes(lines, RATE, found.ceiling, width)
    shown = figure(
        bandwidth, "first-bandwidth", "Bus bandwidth over size", "Bands are 95 % intervals."
    )
    labels = short_labels(found.steps)
    if is_pipelined and pipeline and pipeline.facts.measured:
        detail, span = detail_of(pipeline, _MOST_BOXES), last_of(pipeline.facts.measured)
        step = draw_pipeline(pipeline, detail, span, width=width, is_alone=True)
        told = f"Repetition {pipeline.repetition + 1}, each gap in the colour of its cause."
        shown += figure(step, "first-step", f"Pipeline: {labels[pipeline.row.case.id]}", told)
    elif timeline and timeline.timeline:
        step = draw_first(timeline.timeline, view_of(timeline.timeline, _MOST_BOXES), width)
        told = f"Repetition {timeline.repetition + 1}; what a step waits for is hatched or grey."
        shown += figure(step, "first-step", f"Traced step: {labels[timeline.row.case.id]}", told)
    return shown


def first_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return a line for each of six operations at most, of the mode and type in which most were measured."""
    series = group_by(rows, lambda row: (row.case.params.get("mode"), row.case.params.get("dtype")))
    lines = max((curve_lines(of, "busbw") for of in series.values()), key=len, default=())
    known = [*OPERATIONS]

    def place(line: Line) -> tuple[bool, int]:
        [name, *params] = line.label.split(" ")
        return bool(params), known.index(name) if name in known else len(known)

    plainest = {
        line.label.partition(" ")[0]: line for line in sorted(lines, key=place, reverse=True)
    }
    return tuple(sorted(plainest.values(), key=place)[:_MOST_LINES])


def _footnotes(run: Run, summary: Summary) -> tuple[str, ...]:
    plan = run.info.plan
    shown = [row for row in summary.rows if row.metrics]
    sentences = []
    if any(row.is_communication for row in shown):
        told = "GB/s is 1e9 bytes per second; 64K is 65536 bytes"
        sentences.append(f"Sizes and bus bandwidth follow nccl-tests; {told}.")
    headlines = (row.metrics.get(row.headline) for row in shown)
    methods = Counter(metric.method for metric in headlines if metric and metric.method)
    # the number of iterations differs from row to row and has a column, that of visits is what there was time for
    kinds = dict.fromkeys(
        re.sub(r"\d+ (?=iterations|visits)", "", method) for method, _ in methods.most_common()
    )
    sentences += [
        *(f"Times: {kind}." for kind in kinds),
        *(["[low, high] is a 95 % interval."] if kinds else []),
    ]
    if any(calls_of(row) is not None for row in shown):
        sentences.append(
            "Predicted comm: the step's calls one after another, predicted from this run's blocking fits of the same "
            "operation on as many ranks; unknown where there is no such fit."
        )
    if broken_down(shown):
        sentences.append(
            "Where the time went: compute + exposed communication + copy + idle = the wall time of a traced "
            "step; residual: the remainder; tracing: what the traced step takes longer than a timed one. "
            "A difference, such as ect, is the mean of paired turns; without an interval, or with one that holds "
            "zero, it may be noise."
        )
    if run.info.repetitions:
        told = "cases prepared, warmed up, timed and checked; the rest started and ended ranks"
        sentences.append(f"{measuring_words(run).capitalize()}: {told}.")
    if plan.repetitions == 1 and shown:
        sentences.append(
            f"One repetition: intervals and noise are {WITHIN_REPETITION}, not between repetitions; a comparison "
            f"needs five."
        )
    by_case = Counter(record.case.id for record in run.records if record.is_out_of_budget)
    left_out = [
        f"{repetitions} of {plan.repetitions} repetitions of {pluralize(cases, 'case')}"
        for repetitions, cases in Counter(by_case.values()).items()
    ]
    if left_out:
        budget = format_duration(plan.budget_seconds)
        sentences.append(f"Skipped, out of time (budget {budget}): {', '.join(left_out)}.")
    sentences += [f"Note (all cases): {note}" for note in plan.notes]
    others = [
        row for row in summary.rows if row.is_communication or not row.metrics
    ]  # steps' stand below their table
    counts = Counter(note for row in others for note in row.notes if note not in plan.notes)
    return (
        *sentences,
        *(f"Note ({count} of {len(summary.rows)} cases): {note}" for note, count in counts.items()),
    )
