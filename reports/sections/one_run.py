"""The report of one run as it is read: what was run, the first screen, what stands out, and its sections."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from parbench.bench.results.runs import Run
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.text import format_duration, pluralize
from parbench.reports.analysis.analysis import Analysis, front_of
from parbench.reports.analysis.labels import environment_facts
from parbench.reports.analysis.summary import Summary
from parbench.reports.comparisons import describe_settings
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_bandwidth_overview
from parbench.reports.figures.pipeline import chart_pipeline
from parbench.reports.figures.timeline import chart_timeline
from parbench.reports.findings.engine import find
from parbench.reports.findings.record_evidence import collect_evidence
from parbench.reports.operations import select_operations
from parbench.reports.repetitions import describe_measuring_time
from parbench.reports.report import Report, Section
from parbench.reports.tables.communication import make_communication_section
from parbench.reports.tables.contention import make_contention_section
from parbench.reports.tables.context import make_context_section
from parbench.reports.tables.experts import make_expert_section
from parbench.reports.tables.groups import make_group_section
from parbench.reports.tables.nodes import make_node_section
from parbench.reports.tables.pipelines import RecordedPipeline, read_pipeline
from parbench.reports.tables.predictions import make_prediction_section
from parbench.reports.tables.ranks import make_link_section
from parbench.reports.tables.repetitions import make_repetition_section
from parbench.reports.tables.step_communication import get_calls
from parbench.reports.tables.step_parts import select_profiled
from parbench.reports.tables.steps import make_step_section
from parbench.reports.tables.stragglers import make_arrival_section
from parbench.reports.verdicts import (
    Verdict,
    describe_emulations,
    list_problems,
    list_unmeasured,
    list_warnings,
)

_MAX_BOXES = 1500
"""Of the first screen."""
SECTIONS: tuple[Callable[[Analysis], Section | None], ...] = (
    make_node_section,
    make_communication_section,
    make_contention_section,
    make_group_section,
    make_link_section,
    make_step_section,
    make_context_section,
    make_expert_section,
    make_arrival_section,
    make_prediction_section,
    make_repetition_section,
)


def report_of(run: Run, *more: Verdict) -> Report:
    """Analyse a run once, and return all that is to be said of it, with verdicts from elsewhere after its own."""
    found = Analysis(run)
    summary = found.summary
    front = front_of(found, more)
    return Report(
        name=run.info.id,
        verdicts=front.verdicts,
        code=summary.tally.code,
        runs=(found,),
        sections=tuple(section for make in SECTIONS if (section := make(found))),
        emulated=describe_emulations(run),
        claims=run.info.plan.notes,
        heading=heading(run, summary),
        tiles=front.tiles,
        front=front,
        figures=partial(chart_first_screen, found),
        warnings=list_warnings(run),
        problems=list_problems(found),
        findings=find(collect_evidence(found)),
        comparisons=tuple(describe_settings(found)),
        not_measured=list_unmeasured(found),
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
    return "; ".join([*parts, f"started {run.info.started}", describe_measuring_time(run)])


def chart_first_screen(found: Analysis) -> list[Chart]:
    """Return bandwidth and a step next to each other, or a single figure."""
    bandwidth = chart_bandwidth_overview(select_operations(found), found.ceiling)
    return list_charts(bandwidth, _chart_first_step(found, is_wide=bandwidth is None))


def _chart_first_step(found: Analysis, *, is_wide: bool) -> Chart | None:
    """Return the first profiled step, as a pipeline if it is one."""
    step = next((step for step in found.timelines if step.timeline), None)
    pipelines = {row.case.id: read_pipeline(row) for row in found.steps}
    for case_id, pipeline in pipelines.items():
        is_first = step is None or step.result.case.id == case_id
        if is_first and isinstance(pipeline, RecordedPipeline) and pipeline.details.measured:
            title = f"Pipeline: {found.labels[case_id]}"
            caption = f"Measured in repetition {pipeline.repetition + 1}."
            details = msgspec.structs.replace(pipeline.details, predicted=None)
            return chart_pipeline(
                "step", title, caption, details, is_wide=is_wide, max_boxes=_MAX_BOXES
            )
    if step is None or step.timeline is None:
        return None
    title = f"Profiled step: {found.labels[step.result.case.id]}"
    caption = f"Repetition {step.repetition + 1}. Waiting is hatched or grey."
    return chart_timeline(
        "step", title, caption, step.timeline, is_wide=is_wide, max_boxes=_MAX_BOXES
    )


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
    if any(get_calls(row) is not None for row in shown):
        sentences.append(
            "Predicted comm: the calls of a step one after another, each predicted from this run's "
            "blocking fit of the same operation on as many ranks."
        )
    if select_profiled(shown):
        sentences.append(
            "Where the time goes: the parts and the residual of a step add up to the wall time of the "
            "profiled step. Differences such as ect are means over paired measurements: without an "
            "interval, or if it includes zero, they may be noise."
        )
    if run.info.repetitions:
        told = "cases prepared, warmed up, timed and checked; the rest started and ended ranks"
        sentences.append(f"{describe_measuring_time(run).capitalize()}: {told}.")
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
