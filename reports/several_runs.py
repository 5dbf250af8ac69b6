"""The report of several runs: the runs, their failures, their differences, and their times."""

from collections.abc import Callable

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.runs import Run
from parbench.bench.results.tables import Column, Table, keep_known_columns
from parbench.reports.analysis.labels import group_by_text
from parbench.reports.analysis.verdicts import describe_emulations, judge_run, list_problems
from parbench.reports.one_run import describe_run
from parbench.reports.report import Report, make_problem_table, make_sections
from parbench.reports.run_data import RunData
from parbench.reports.run_set import RunSet
from parbench.reports.tables.scaling import list_scaling_tables
from parbench.reports.tables.side_by_side import make_environment_table, make_run_table

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
    """Build the report of several runs, or of the runs of a sweep."""
    tables = {
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


def _make_run_table(run_set: RunSet) -> Table:
    """Return the table of runs with their verdicts, and with their nodes if a run has several."""
    runs = run_set.runs
    has_points = any(data.point for data in runs.values())
    num_nodes = {number: _count_nodes(data) for number, data in runs.items()}
    rows = []
    for number, data in runs.items():
        info = data.run.info
        row: dict[str, object] = {
            "run": f"run {number}",
            "point": data.point.name if data.point else None,
            "id": info.id,
            "verdicts": ", ".join(verdict.word for verdict in judge_run(data)),
            "setup": None if has_points else describe_run(data),
        }
        if max(num_nodes.values()) > 1:
            topology = data.nodes
            row["nodes"] = num_nodes[number]
            row["distribution"] = topology.distribution if topology else None
            row["hosts"] = ", ".join(topology.nodes) if topology else info.host
        rows.append(row)
    notes = [*run_set.missing, *_merge_notes(run_set, lambda run: run.info.plan.notes)]
    superseded = [number for number in runs if number not in run_set.current_runs]
    if superseded:
        notes.append(
            f"The verdict ignores run {format_cpus(superseded)}: their points ran again later."
        )
    if has_points:
        first = next((number for number, data in runs.items() if data.measured), 1)
        notes.append(f"Run {first}: {describe_run(runs[first])}.")
    return Table(
        "runs-table",
        "Runs",
        caption="in the order given",
        columns=keep_known_columns(_RUN_COLUMNS, rows),
        rows=rows,
        notes=notes,
    )


def _count_nodes(data: RunData) -> int:
    """Return the number of nodes of a run, from its plan if no case has a record."""
    spread = data.plan.spread
    planned = spread.nodes if spread else 1
    return max([planned, *(result.world.nodes for result in data.results)])


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
        columns=_DIFFERENCE_COLUMNS,
        rows=rows,
        notes=[run_set.describe_differences()],
        where="page",
    )


def _merge_notes(run_set: RunSet, list_notes: Callable[[Run], tuple[str, ...]]) -> tuple[str, ...]:
    """Return each note once, after the numbers of the runs that have it.

    ``list_notes`` returns the notes of one run.
    """
    notes_by_run = {number: list_notes(data.run) for number, data in run_set.runs.items()}
    notes = []
    for note, numbers in group_by_text(notes_by_run).items():
        noun = "Run" if len(numbers) == 1 else "Runs"
        is_common = len(numbers) == len(run_set.runs)
        prefix = "All runs" if is_common else f"{noun} {format_cpus(numbers)}"
        notes.append(f"{prefix}: {note}")
    return tuple(notes)
