"""The command ``parbench history`` with its subcommands."""

import fnmatch
import sys
from pathlib import Path

import click

from parbench.bench.command_line import CountRange, RunPath, format_option
from parbench.reports.options import (
    figure_option,
    history_option,
    min_effect_option,
    undecided_option,
)

_EXAMPLES = """\b
Examples:
  parbench history add runs/20260102T030405Z-node1-1a2b3c --branch main --commit 1a2b3c4
  parbench history check --branch main --format markdown >> $GITHUB_STEP_SUMMARY
  parbench history check latest --branch main          a pull request's run, which is not added
  parbench history annotate 20260102T030405Z-node1-1a2b3c --series '*all_reduce*' --note 'new ring'
  parbench compare main~1 runs/20260109T030405Z-node1-4d5e6f

\b
Exit codes: 0 fine; 1 slower, wrong or a changed count; 2 bad input; 3 a series is
undecided (with --fail-on-undecided); 4 failed or missing.
"""
_file_option = history_option("file", help="The history file.")
_branch_option = click.option("--branch", help="Only runs of this branch.")


@click.group(epilog=_EXAMPLES)
def history() -> None:
    """Store runs in one file, and find when a series became slower.

    A series is a case on a number of ranks in one environment: class of hosts, versions,
    variables. The file contains the metrics of the runs and the paths of their folders, which
    parbench compare reads.
    """


@history.command(epilog="Example: parbench history add runs/20260102T030405Z-node1-1a2b3c")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "--branch",
    envvar=["GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH"],
    default="main",
    show_default=True,
    help="Branch of the runs. Default: from GitHub or GitLab CI variables, otherwise main.",
)
@click.option(
    "--commit",
    envvar=["GITHUB_SHA", "CI_COMMIT_SHA"],
    default="",
    help="Commit of the runs. Default: from GitHub or GitLab CI variables.",
)
@_file_option
def add(runs: tuple[Path, ...], branch: str, commit: str, file: Path) -> None:
    """Add runs, or all runs of a folder, to the history.

    A run that was added before is updated. It keeps its branch and commit.
    """
    from parbench.reports.history.runs import add_folders

    for run_id, outcome in add_folders(file, runs, branch=branch, commit=commit):
        click.echo(f"{outcome} {run_id}")
    click.echo(f"The history is {file.absolute()}", err=True)


@history.command("list", epilog="Example: parbench history list --branch main")
@_branch_option
@format_option(type=click.Choice(("tables", "json")), default="tables")
@_file_option
def list_runs(branch: str | None, form: str, file: Path) -> None:
    """List the runs in the history, newest first."""
    import msgspec

    from parbench.bench.text import format_table, pluralize
    from parbench.reports.history.database import open_history

    with open_history(file) as opened:
        runs = opened.list_runs(branch)
        annotations = opened.list_annotations()
    if form == "json":
        click.echo(msgspec.json.encode({"runs": runs[::-1], "annotations": annotations}))
        return
    click.echo(pluralize(len(runs), "run"))
    rows = [("run", "started", "branch", "commit", "preset")]
    for run in reversed(runs):
        rows.append((run.id, run.started, run.branch, run.commit[:12], run.preset))
    click.echo(format_table(rows))
    for annotation in annotations:
        click.echo(f"Annotation at {annotation.run_id}, {annotation.series}: {annotation.note}")


@history.command(epilog="Example: parbench history show '*all_reduce*' --figure trend.svg")
@click.argument("pattern", default="*")
@_branch_option
@figure_option(help="Draw the trend of the first six series to this file: .png, .svg or .pdf.")
@_file_option
def show(pattern: str, branch: str | None, figure: Path | None, file: Path) -> None:
    """Show the levels of series, and the runs that began them.

    PATTERN is a part of the names of cases, or a glob.
    """
    from parbench.reports.history.database import open_history
    from parbench.reports.history.trends import (
        build_time_table,
        draw_trends,
        find_trends,
        render_trends,
    )

    with open_history(file) as opened:
        times = build_time_table(opened, branch)
    trends = find_trends(times, pattern)
    if figure is not None:
        draw_trends(trends, times, figure)
    click.echo(render_trends(trends, times), nl=False)


@history.command(
    epilog="""\b
Examples:
  parbench history check --branch main --min-effect 5%
  parbench history check latest --branch main
"""
)
@click.argument("run", required=False)
@click.option(
    "--branch",
    default="main",
    show_default=True,
    help="The branch to check, or to compare RUN with.",
)
@min_effect_option
@format_option(type=click.Choice(("tables", "markdown", "json")), default="tables")
@undecided_option
@_file_option
def check(
    run: str | None,
    branch: str,
    min_effect: str | None,
    form: str,
    fail_on_undecided: bool,
    file: Path,
) -> None:
    """Check the newest run: which series became slower, since which run?

    RUN is the id of a run in the history. Default: the newest run of the branch. The folder of a
    run, or latest, is compared with the branch and not added, as for a pull request.

    Exact counts (calls, bytes, memory, schedule) are checked from the second run on. A changed
    count fails until it is annotated, also after a single repetition on a busy machine.

    Times are checked after 8 runs in the same environment. A rise in the newest run only is
    UNDECIDED, and a gradual increase is DRIFT.

    A case is MISSING if RUN did not measure it but the previous run of its preset did.
    """
    from parbench.bench.results.runs import load_run
    from parbench.reports.compare.rendering import render
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.history.check import check_candidate, check_run
    from parbench.reports.history.check_report import build_report
    from parbench.reports.history.database import open_history
    from parbench.reports.history.runs import select_runs
    from parbench.reports.run_data import RunData

    fraction, thresholds = find_thresholds(min_effect)
    folder = RunPath().convert(run, None, None) if run else None
    if folder is not None and folder.is_dir():
        data = RunData(load_run(folder))
        result = check_candidate(file, data, branch, fraction, thresholds)
    else:
        with open_history(file) as opened:
            stored = select_runs(opened.list_runs(), run or branch)[-1]
            points = list(opened.read_points(stored).values())
            result = check_run(opened, stored, points, fraction, thresholds)
    exit_code = result.compute_exit_code(fail_on_undecided=fail_on_undecided)
    click.echo(render(build_report(result, exit_code), form), nl=False)
    click.get_current_context().exit(exit_code)


@history.command(
    epilog="Example: parbench history annotate 20260102T030405Z-node1-1a2b3c --note 'new driver'"
)
@click.argument("run")
@click.option("--note", required=True, help="The reason of the change.")
@click.option(
    "--series",
    default="*",
    show_default=True,
    metavar="GLOB",
    help="Only series whose case and parameters match.",
)
@_file_option
def annotate(run: str, note: str, series: str, file: Path) -> None:
    """Mark a change as intended. Later runs are compared from RUN on."""
    from parbench.bench.text import UserError
    from parbench.reports.history.database import open_history
    from parbench.reports.history.runs import select_runs

    with open_history(file) as opened:
        stored = select_runs(opened.list_runs(), run)[-1]
        labels = [point.series.case.label for point in opened.read_points(stored).values()]
        matching = fnmatch.filter(labels, series)
        if not matching:
            problem = f"--series {series!r} matches no series of {stored.id}"
            raise UserError(problem, hint="parbench history show lists the series")
        opened.annotate(stored, series, note)
    click.echo(f"annotated {stored.id}: {len(matching)} series")


@history.command(epilog="Example: parbench history remove 20260102T030405Z-node1-1a2b3c")
@click.argument("run")
@_file_option
def remove(run: str, file: Path) -> None:
    """Delete RUN and its annotations from the history, but not its folder.

    To delete only the annotations, add the run again.
    """
    from parbench.reports.history.database import open_history
    from parbench.reports.history.runs import select_runs

    with open_history(file) as opened:
        stored = select_runs(opened.list_runs(), run)[-1]
        opened.remove([stored.id])
    click.echo(f"removed {stored.id}")


@history.command(epilog="Example: parbench history prune --keep 400")
@click.option(
    "--keep",
    type=CountRange(10**9),
    required=True,
    help="Number of runs of each branch and preset to keep.",
)
@_file_option
def prune(keep: int, file: Path) -> None:
    """Delete old runs from the history, and print their ids."""
    from parbench.reports.history.database import open_history

    with open_history(file) as opened:
        for run_id in opened.prune(keep):
            click.echo(run_id)


@history.command(epilog="Example: parbench history export times.csv --branch main")
@click.argument("target", type=click.Path(path_type=Path))
@_branch_option
@_file_option
def export(target: Path, branch: str | None, file: Path) -> None:
    """Write the times of all runs as CSV in seconds, a row per run and a column per series.

    With - as TARGET, the table is printed.
    """
    from parbench.bench.files import convert_write_errors
    from parbench.reports.history.database import open_history
    from parbench.reports.history.trends import build_time_table

    with open_history(file) as opened, convert_write_errors(target):
        output = sys.stdout if str(target) == "-" else target
        build_time_table(opened, branch).to_csv(output, index=False)
