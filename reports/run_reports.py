"""The reports of one run and of several runs: their sections, verdicts, and first figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Column, Table
from parbench.reports.analysis.comparisons import describe_settings
from parbench.reports.analysis.footnotes import list_footnotes
from parbench.reports.analysis.labels import group_by_text, list_environment_facts
from parbench.reports.analysis.overview import describe_setup, list_tiles
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
from parbench.reports.report import Report, make_problem_table, make_sections
from parbench.reports.run_data import RunData
from parbench.reports.run_set import RunSet
from parbench.reports.tables.communication import group_operations, list_communication_tables
from parbench.reports.tables.context import list_context_tables
from parbench.reports.tables.experts import list_expert_tables
from parbench.reports.tables.groups import list_group_tables, list_link_tables
from parbench.reports.tables.hosts import (
    list_arrival_tables,
    list_node_tables,
    list_repetition_tables,
)
from parbench.reports.tables.scaling import list_scaling_tables
from parbench.reports.tables.side_by_side import (
    list_contention_tables,
    list_setting_tables,
    make_environment_table,
    make_run_table,
)
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
    ("repetitions-section", "Repetitions"): list_repetition_tables,
}
"""The function that returns the tables of a section, keyed by (id, title) of the section.

The order is that of the sections in the report.
"""

RUN_COLUMNS = (
    Column("run", help="its name in the tables below"),
    Column("point", help="the point of the sweep that it measured"),
    Column("id", help="the folder of the run"),
    Column("distribution", help="how ranks lie on nodes"),
    Column("hosts", help="host names of the nodes"),
    Column("verdicts", help="correctness, completeness and noise"),
    Column("setup", help="host, hardware, ranks, preset, start and duration"),
)
DIFFERENCE_COLUMNS = (
    Column("fact", help="a recorded fact or a parameter"),
    Column("values", is_result=True, help="each value with its runs"),
)


def make_report(data: RunData, extra_verdicts: Sequence[ReportVerdict] = ()) -> Report:
    """Build the report of a run from its data.

    ``extra_verdicts`` are appended to the verdicts on correctness, completeness and noise.
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
        heading=describe_setup(data),
        tiles=list_tiles(data),
        figures=partial(chart_first_screen, data),
        problems=list_problems(data),
        findings=apply_rules(collect_evidence(data)),
        comparisons=tuple(describe_settings(data)),
        not_measured=list_unmeasured(data),
        environment=tuple(list_environment_facts(run.info.environment or {})),
        footnotes=list_footnotes(data),
    )


def make_report_of_runs(run_set: RunSet) -> Report:
    """Build the report that compares several runs, or the runs of a sweep, side by side."""
    tables: dict[tuple[str, str], Iterable[Table]] = {
        ("runs", "Runs"): [_make_run_table(run_set)],
        ("problems", "Wrong, hung or failed"): [_make_problem_table(run_set)],
        ("differences", "Differences"): [_make_difference_table(run_set)],
    }
    if any(data.measured for data in run_set.runs.values()):
        tables |= {
            ("scaling", "Scaling"): list_scaling_tables(run_set),
            ("environments", "Environments side by side"): [make_environment_table(run_set)],
            ("side-by-side", "Side by side"): [make_run_table(run_set)],
        }
    return Report(
        name=f"{len(run_set.runs)} runs",
        verdicts=(run_set.verdict,),
        code=run_set.exit_code,
        runs=tuple(run_set.runs.values()),
        sections=make_sections(tables),
        emulated=_merge_notes(run_set, describe_emulations),
        heading=run_set.describe_differences(),
    )


def chart_first_screen(data: RunData) -> list[Chart]:
    """Return the charts above the sections: bus bandwidth over size, and the first profiled step.

    The bandwidth is that of the first mode and data type. A chart without data is left out.
    """
    groups = group_operations(data)
    bandwidth = chart_bandwidth(1, *groups[0], data.ceiling) if groups else None
    return list_charts(bandwidth, _chart_first_step(data, is_wide=bandwidth is None))


def _chart_first_step(data: RunData, *, is_wide: bool) -> Chart | None:
    """Return the Gantt chart of the first profiled step, None if no step was profiled.

    A pipeline step has a row per rank with its forward and backward actions. Any other step has a
    row per stream of a rank, such as compute. The chart takes the full page width if ``is_wide``.
    """
    timelines = {step.result.case.id: step for step in data.timelines}
    for result in data.steps:
        label = data.labels[result.case.id]
        repetition, details = find_details(result, PipelineDetails)
        if details and details.measured:
            return chart_pipeline(
                "step",
                f"Pipeline: {label}",
                f"Measured in repetition {repetition + 1}.",
                replace(details, predicted=None),
                is_wide=is_wide,
            )
        step = timelines.get(result.case.id)
        if step and step.timeline:
            return chart_timeline(
                "step",
                f"Profiled step: {label}",
                f"Repetition {step.repetition + 1}. Waiting is hatched or grey.",
                step.timeline,
                is_wide=is_wide,
            )
    return None


def _make_run_table(run_set: RunSet) -> Table:
    """Return the table of runs with their ids, verdicts and setups, a row per run.

    A setup is the host, hardware, ranks, preset and start as text (``describe_setup``). If a run
    has several nodes, the table has their host names and the distribution of ranks over them.
    """
    rows = []
    for number, data in run_set.runs.items():
        row: dict[str, object] = {
            "run": f"run {number}",
            "point": data.point.name if data.point else None,
            "id": data.run.info.id,
            "verdicts": ", ".join(verdict.word for verdict in judge_run(data)),
            "setup": describe_setup(data),
        }
        if data.nodes:
            row["distribution"] = data.nodes.distribution
            row["hosts"] = ", ".join(data.nodes.nodes)
        rows.append(row)
    return Table(
        "runs-table",
        "Runs",
        caption="in the order of the arguments, and in a sweep of its points",
        columns=RUN_COLUMNS,
        rows=rows,
        notes=[*run_set.missing, *_merge_notes(run_set, lambda run: run.info.plan.notes)],
    )


def _make_problem_table(run_set: RunSet) -> Table:
    """Return the table of the cases of all runs that failed, hung or were wrong."""
    problems = {}
    for number, data in run_set.runs.items():
        suffix = f": {data.point.name}" if data.point else ""
        problems[f"run {number}{suffix}"] = list_problems(data)
    return make_problem_table("problems-table", "Wrong, hung or failed", problems)


def _make_difference_table(run_set: RunSet) -> Table:
    """Return the table of facts that differ between runs: each value with the runs that have it."""
    rows = []
    for fact, texts in run_set.differences.items():
        runs_by_text = group_by_text({number: [text] for number, text in enumerate(texts, start=1)})
        values = [f"{text} (run {format_cpus(runs)})" for text, runs in runs_by_text.items()]
        rows.append({"fact": fact, "values": "; ".join(values)})
    return Table(
        "differences-table",
        "Differences",
        caption="recorded facts and parameters that differ between runs",
        columns=DIFFERENCE_COLUMNS,
        rows=rows,
    )


def _merge_notes(run_set: RunSet, list_notes: Callable[[Run], tuple[str, ...]]) -> tuple[str, ...]:
    """Return each distinct note of the runs as ``Run 1-3: NOTE``, with the runs that have the note.

    ``list_notes`` returns the notes of one run.
    """
    notes = {number: list_notes(data.run) for number, data in run_set.runs.items()}
    numbers_by_note = group_by_text(notes)
    return tuple(f"Run {format_cpus(runs)}: {note}" for note, runs in numbers_by_note.items())
