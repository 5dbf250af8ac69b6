"""The report of one run: its sections, its verdicts, and the figures of the first screen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.tables import Table
from parbench.bench.text import pluralize
from parbench.reports.analysis.comparisons import describe_settings
from parbench.reports.analysis.footnotes import list_footnotes
from parbench.reports.analysis.labels import list_environment_facts
from parbench.reports.analysis.overview import describe_measuring_time, describe_setup, list_tiles
from parbench.reports.analysis.steps import find_details
from parbench.reports.analysis.verdicts import (
    ReportVerdict,
    describe_emulations,
    judge_run,
    list_problems,
    list_unmeasured,
)
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_bandwidth
from parbench.reports.figures.pipeline import chart_pipeline
from parbench.reports.figures.timeline import chart_timeline
from parbench.reports.findings.rules import apply_rules
from parbench.reports.findings.run_evidence import collect_evidence
from parbench.reports.report import Report, make_sections
from parbench.reports.run_data import RunData
from parbench.reports.tables.communication import group_operations, list_communication_tables
from parbench.reports.tables.context import list_context_tables
from parbench.reports.tables.experts import list_expert_tables
from parbench.reports.tables.groups import list_group_tables, list_link_tables
from parbench.reports.tables.hosts import (
    list_arrival_tables,
    list_node_tables,
    list_repetition_tables,
)
from parbench.reports.tables.predictions import list_prediction_tables
from parbench.reports.tables.side_by_side import list_contention_tables, list_setting_tables
from parbench.reports.tables.steps import list_step_tables

SECTIONS: Mapping[tuple[str, str], Callable[[RunData], Iterable[Table]]] = {
    ("nodes", "Nodes"): list_node_tables,
    ("communication", "Communication"): list_communication_tables,
    ("settings", "Settings of the environment"): list_setting_tables,
    ("contention", "Contention and interference"): list_contention_tables,
    ("groups", "Groups"): list_group_tables,
    ("pairs", "Rank to rank"): list_link_tables,
    ("steps", "Training steps"): list_step_tables,
    ("context", "Context parallelism"): list_context_tables,
    ("experts", "Expert parallelism"): list_expert_tables,
    ("arrivals", "Arrival skew and stragglers"): list_arrival_tables,
    ("predicted", "Predictions"): list_prediction_tables,
    ("repetitions-section", "Repetitions"): list_repetition_tables,
}
"""The functions that return the tables of each section, keyed by id and title, in order."""

HARDWARE_FACTS = (("host", "cpu_model", ""), ("torch", "gpu", ""), ("torch", "version", "torch "))
"""Facts of the environment in the heading: group, name, and text before the value."""


def make_report(data: RunData, extra_verdicts: Sequence[ReportVerdict] = ()) -> Report:
    """Build the report of a run from its data.

    ``extra_verdicts`` follow the verdicts on correctness, completeness and noise.
    """
    run = data.run
    return Report(
        name=run.info.id,
        verdicts=(*judge_run(data), *extra_verdicts),
        code=data.exit_code,
        runs=(data,),
        sections=make_sections(
            {section: list_tables(data) for section, list_tables in SECTIONS.items()}
        ),
        emulated=describe_emulations(run),
        claims=run.info.plan.notes,
        heading=describe_run(data),
        tiles=list_tiles(data),
        setup=describe_setup(data),
        figures=partial(chart_first_screen, data),
        problems=list_problems(data),
        findings=apply_rules(collect_evidence(data)),
        comparisons=tuple(describe_settings(data)),
        not_measured=list_unmeasured(data),
        environment=tuple(list_environment_facts(run.info.environment or {})),
        footnotes=list_footnotes(data),
    )


def describe_run(data: RunData) -> str:
    """Return a line of text with the plan, ranks, hardware, start and duration of a run."""
    plan, info = data.plan, data.run.info
    ranks = pluralize(plan.nproc, "rank")
    node_counts = sorted({result.world.nodes for result in data.results})
    if node_counts:
        noun = "node" if node_counts == [1] else "nodes"
        ranks += f" on {'/'.join(map(str, node_counts))} {noun}"
    parts = [
        f"preset {plan.preset}: {ranks}, {plan.backend}, {plan.device}",
        pluralize(plan.repetitions, "repetition"),
        f"host {info.host}",
    ]
    for group, name, prefix in HARDWARE_FACTS:
        value = ((info.environment or {}).get(group) or {}).get(name)
        if value:
            parts.append(f"{prefix}{value}")
    return "; ".join([*parts, f"started {info.started}", describe_measuring_time(data.run)])


def chart_first_screen(data: RunData) -> list[Chart]:
    """Return the charts above the sections: bus bandwidth over size, and the first profiled step.

    The bandwidth is that of the first mode and data type. A chart without data is left out.
    """
    groups = group_operations(data)
    bandwidth = chart_bandwidth(1, *groups[0], data.ceiling) if groups else None
    return list_charts(bandwidth, _chart_first_step(data, is_wide=bandwidth is None))


def _chart_first_step(data: RunData, *, is_wide: bool) -> Chart | None:
    """Return the Gantt chart of the first profiled step, None if no step was profiled.

    A pipeline is drawn by its forward and backward actions, other steps by their streams.
    """
    step = next((step for step in data.timelines if step.timeline), None)
    for result in data.steps:
        repetition, details = find_details(result, PipelineDetails)
        is_first = step is None or step.result.case.id == result.case.id
        if is_first and isinstance(details, PipelineDetails) and details.measured:
            return chart_pipeline(
                "step",
                f"Pipeline: {data.labels[result.case.id]}",
                f"Measured in repetition {repetition + 1}.",
                replace(details, predicted=None),
                is_wide=is_wide,
            )
    if step is None or step.timeline is None:
        return None
    return chart_timeline(
        "step",
        f"Profiled step: {data.labels[step.result.case.id]}",
        f"Repetition {step.repetition + 1}. Waiting is hatched or grey.",
        step.timeline,
        is_wide=is_wide,
    )
