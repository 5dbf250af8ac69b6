"""The report of several runs: the runs, their problems, their differences, and their times."""

from collections.abc import Callable, Sequence

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Column, Section, Table, keep_known_columns
from parbench.reports.analysis.labels import group_by_text
from parbench.reports.analysis.verdicts import describe_emulations, judge_run, list_problems
from parbench.reports.one_run import describe_run
from parbench.reports.report import Report, make_problem_table
from parbench.reports.run_set import RunSet
from parbench.reports.tables.scaling import make_node_scaling_section, make_rank_scaling_section
from parbench.reports.tables.side_by_side import (
    make_environment_section,
    make_side_by_side_section,
)

_RUN_COLUMNS = (
    Column("run", help="its name in the tables below"),
    Column("point", help="the point of the sweep that it measured"),
    Column("id", help="the folder of the run"),
    Column("nodes", kind="count", help="number of nodes"),
    Column("distribution", help="how ranks lie on nodes"),
    Column("hosts", help="host names of the nodes"),
    Column("verdicts", help="correctness, completeness and noise"),
    Column("setup", help="what ran, where and on what"),
)
_DIFFERENCE_COLUMNS = (
    Column("fact", help="a recorded fact or a parameter"),
    Column("values", is_result=True, help="each value with its runs"),
)


def make_report_of_runs(run_set: RunSet) -> Report:
    """Return the report of several runs, or of a sweep."""
    sections = [
        _make_runs_section(run_set),
        _make_problem_section(run_set),
        _make_difference_section(run_set),
    ]
    if any(run.data.measured for run in run_set.runs):
        sections += [
            make_node_scaling_section(run_set) or make_rank_scaling_section(run_set),
            make_environment_section(run_set),
            make_side_by_side_section(run_set),
        ]
    runs = [run.data.run for run in run_set.runs]
    return Report(
        name=f"{len(runs)} runs",
        verdicts=(run_set.verdict,),
        code=run_set.exit_code,
        runs=tuple(run.data for run in run_set.runs),
        sections=tuple(section for section in sections if section),
        emulated=_merge_notes(runs, describe_emulations),
        heading=run_set.describe_differences(),
    )


def _make_runs_section(run_set: RunSet) -> Section:
    has_points = any(run.point for run in run_set.runs)
    has_nodes = any(run.num_nodes > 1 for run in run_set.runs)
    rows = []
    for run in run_set.runs:
        info = run.data.run.info
        row: dict[str, object] = {
            "run": run.name,
            "point": run.point.name if run.point else None,
            "id": info.id,
            "verdicts": ", ".join(verdict.word for verdict in judge_run(run.data)),
            "setup": None if has_points else describe_run(run.data),
        }
        if has_nodes:
            topology = run.data.nodes
            row["nodes"] = run.num_nodes
            row["distribution"] = topology.distribution if topology else None
            row["hosts"] = ", ".join(topology.nodes) if topology else info.host
        rows.append(row)
    runs = [run.data.run for run in run_set.runs]
    notes = [*run_set.missing, *_merge_notes(runs, lambda run: run.info.plan.notes)]
    superseded = [run.number for run in run_set.runs if run not in run_set.current_runs]
    if superseded:
        notes.append(
            f"The verdict ignores run {format_cpus(superseded)}: their points ran again later."
        )
    if has_points:
        first = next((run for run in run_set.runs if run.data.measured), run_set.runs[0])
        notes.append(f"Run {first.number}: {describe_run(first.data)}.")
    table = Table(
        "runs-table",
        "Runs",
        caption="in the order given",
        columns=keep_known_columns(_RUN_COLUMNS, rows),
        rows=rows,
    )
    return Section("runs", "Runs", tables=[table], notes=notes)


def _make_problem_section(run_set: RunSet) -> Section | None:
    table = make_problem_table(
        "problems-table",
        "Wrong, hung or failed",
        {
            f"{run.name}: {run.point.name}" if run.point else run.name: list_problems(run.data)
            for run in run_set.runs
        },
    )
    return Section("problems", table.title, tables=[table]) if table.rows else None


def _make_difference_section(run_set: RunSet) -> Section:
    """Return the facts that differ, each value with its runs."""
    rows = []
    for fact, texts in run_set.differences.items():
        runs_by_text = group_by_text({number: [text] for number, text in enumerate(texts, start=1)})
        values = [f"{text} (run {format_cpus(runs)})" for text, runs in runs_by_text.items()]
        rows.append({"fact": fact, "values": "; ".join(values)})
    table = Table(
        "differences-table",
        "Differences",
        caption="recorded facts and parameters that differ between runs",
        columns=_DIFFERENCE_COLUMNS,
        rows=rows,
        where="page",
    )
    return Section(
        "differences",
        "Differences",
        tables=[table] if rows else [],
        notes=[run_set.describe_differences()],
    )


def _merge_notes(
    runs: Sequence[Run], list_notes: Callable[[Run], tuple[str, ...]]
) -> tuple[str, ...]:
    """Return each note of several runs once, with the numbers of the runs that have it."""
    notes_by_run = {number: list_notes(run) for number, run in enumerate(runs, start=1)}
    notes = []
    for note, numbers in group_by_text(notes_by_run).items():
        noun = "Run" if len(numbers) == 1 else "Runs"
        prefix = "All runs" if len(numbers) == len(runs) else f"{noun} {format_cpus(numbers)}"
        notes.append(f"{prefix}: {note}")
    return tuple(notes)
