"""``parbench history``: the command lines of the history."""

from pathlib import Path

import click
from click.core import ParameterSource

from parbench.bench.commands import RunPath
from parbench.bench.results.formatting import UNKNOWN
from parbench.reports.options import (
    figure_option,
    form_option,
    history_option,
    min_effect_option,
    unknown_option,
)

_EXAMPLES = """\b
Examples:
  parbench history add runs/20260102T030405Z-node1-1a2b3c --branch main --commit 1a2b3c4
  parbench history check --branch main --format markdown >> $GITHUB_STEP_SUMMARY
  parbench history check latest --branch main                   a pull request's run, which is not kept
  parbench history annotate 20260102T030405Z-node1-1a2b3c --series '*all_reduce*' --note 'new ring'
  parbench compare main~1 runs/20260109T030405Z-node1-4d5e6f

\b
Exit codes: 0 fine; 1 slower, counts that changed, or wrong; 2 bad input; 3 cannot tell, where asked to fail on it; 4
failed or missing.
"""
_file_option = history_option("file", help="The history file.")


@click.group(epilog=_EXAMPLES)
def history() -> None:
    """Keep runs in one file and find when a series became slower.

    A series is a case on a number of ranks in one environment: hosts, hardware, versions, variables. The history has
    the runs' metrics and the paths of their folders, which parbench compare reads.
    """


@history.command(epilog="Example: parbench history add runs/20260102T030405Z-node1-1a2b3c")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "--branch",
    envvar=["GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH"],
    default="main",
    show_default=True,
    help="The branch measured; in GitHub's and GitLab's jobs theirs. If given, runs already added are moved to it.",
)
@click.option(
    "--commit", envvar=["GITHUB_SHA", "CI_COMMIT_SHA"], default="", help="The commit, likewise."
)
@_file_option
def add(runs: tuple[Path, ...], branch: str, commit: str, file: Path) -> None:
    """Add runs, or all runs of a folder, to the history.

    Runs already added are left as they are.
    """
    from parbench.reports.history.runs import add_folders

    source = click.get_current_context().get_parameter_source
    # a later job's variables say nothing of the runs that it finds
    given = {"branch": branch, "commit": commit}
    meant = {
        name: text for name, text in given.items() if source(name) is ParameterSource.COMMANDLINE
    }
    where = ", ".join(f"{name} {text}" for name, text in meant.items())
    is_new = not file.exists()
    for run_id, what in add_folders(
        file, runs, branch=branch, commit=commit, meant=frozenset(meant)
    ):
        if is_new:
            click.echo(f"a new history: {file.absolute()}", err=True)
        is_new = False
        click.echo(f"moved {run_id}: {where}" if what == "moved" else f"{what} {run_id}")


@history.command("list", epilog="Example: parbench history list --branch main")
@click.option("--branch", help="Only runs of this branch.")
@_file_option
def list_runs(branch: str | None, file: Path) -> None:
    """List the runs in the history, newest first."""
    from parbench.bench.text import format_table, pluralize
    from parbench.reports.history.database import open_history

    with open_history(file) as found:
        lines, annotations = found.runs(branch), found.annotations()
    rows = [("run", "started", "branch", "commit", "preset", "series", "bad")]
    for o in reversed(lines):
        commit = o.commit[:12] or UNKNOWN
        rows.append(
            (o.id, o.started, o.branch, commit, o.preset, str(o.num_series), str(o.num_bad))
        )
    table = [format_table(rows)] if lines else []
    notes = [f"meant at {one.run_id}, {one.series}: {one.note}" for one in annotations]
    click.echo("\n".join([pluralize(len(lines), "run"), *table, *notes]))


@history.command(epilog="Example: parbench history show '*all_reduce*'")
@click.argument("pattern", default="*")
@click.option("--branch", help="Only runs of this branch.")
@form_option(type=click.Choice(("text", "json")), default="text")
@figure_option(help="Also draw the first six series to this file: .png, .svg or .pdf.")
@_file_option
def show(pattern: str, branch: str | None, form: str, figure: Path | None, file: Path) -> None:
    """Show how series developed, and where their level changed.

    PATTERN is a glob for their cases.
    """
    from parbench.reports.history.database import open_history
    from parbench.reports.history.levels import StepRule
    from parbench.reports.history.show import draw_courses, find_courses, render_courses

    rule = StepRule()
    with open_history(file) as found:
        lines = found.runs(branch)
        courses = find_courses(found, pattern, lines)
    if figure is not None:
        draw_courses(courses, lines, rule, figure)
    click.echo(render_courses(courses, rule, form), nl=False)


@history.command(
    epilog="Examples: parbench history check --branch main --min-effect 5%; parbench history check latest --branch main"
)
@click.argument("run", required=False)
@click.option(
    "--branch",
    default="main",
    show_default=True,
    help="The branch to check, or to check RUN against.",
)
@min_effect_option
@click.option(
    "--window", type=click.IntRange(min=8), default=30, show_default=True, help="Runs that count."
)
@form_option(type=click.Choice(("table", "markdown", "json")), default="table")
@unknown_option
@_file_option
def check(
    run: str | None,
    branch: str,
    min_effect: str | None,
    window: int,
    form: str,
    fail_on_unknown: bool,
    file: Path,
) -> None:
    """Check the newest run: which series became slower, since when?

    RUN is a run's id in the history; default: the branch's newest. A run's folder, or latest, is checked against the
    branch and not kept, as for a pull request: SLOWER is a rise above the branch's newest level and newest run.

    What is counted (calls, bytes, memory, schedule) is held exactly from the second run on: CHANGED until it
    is annotated.

    Only runs on the same hosts count: on others a series has INSUFFICIENT runs at first. A rise in the newest run alone
    is SUSPECT, a steady rise DRIFT; for --fail-on-unknown both are undecided.

    A case is MISSING if RUN did not measure it but one of the last three runs like it did: same preset, same number of
    ranks, a case in common.
    """
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.history import gate
    from parbench.reports.history import show as shown
    from parbench.reports.history.database import open_history
    from parbench.reports.history.levels import StepRule

    least, floors = find_thresholds(min_effect)
    rule = StepRule(floor=least, window=window)
    if run and ((folder := RunPath().convert(run, None, None)) / "run.json").exists():
        checked = gate.check_folder(file, folder, branch, rule, floors)
    else:
        with open_history(file) as found:
            line = found.line(run) if run else gate.newest(found, branch)
            checked = gate.check(found, line, rule, floors)
    code = checked.code(fail_on_unknown=fail_on_unknown)
    text = shown.render_json(checked, code) if form == "json" else shown.render(checked, form)
    click.echo(text, nl=False)
    click.get_current_context().exit(code)


@history.command(
    epilog="Example: parbench history annotate 20260102T030405Z-node1-1a2b3c --note 'new driver'"
)
@click.argument("run")
@click.option("--note", required=True, help="The reason.")
@click.option(
    "--series",
    default="*",
    show_default=True,
    metavar="GLOB",
    help="These series, by case and parameters.",
)
@_file_option
def annotate(run: str, note: str, series: str, file: Path) -> None:
    """Mark a change as intended: later runs are compared from RUN on."""
    from parbench.reports.history.database import open_history

    with open_history(file) as found:
        found.annotate(run, series, note)


@history.command(epilog="Example: parbench history prune --keep 400")
@click.option(
    "--keep",
    type=click.IntRange(1, 10**9),
    required=True,
    help="Runs to keep of each branch and preset.",
)
@_file_option
def prune(keep: int, file: Path) -> None:
    """Delete old runs from the history, and print their ids."""
    from parbench.reports.history.database import open_history

    with open_history(file) as found:
        for run_id in found.prune(keep):
            click.echo(run_id)


@history.command(epilog="Example: parbench history export times.csv --branch main")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--branch", help="Only runs of this branch.")
@_file_option
def export(target: Path, branch: str | None, file: Path) -> None:
    """Write the times of all runs as CSV, a column per series."""
    from parbench.bench.files import convert_write_errors
    from parbench.reports.history.database import open_history
    from parbench.reports.history.show import render_csv

    with open_history(file) as found, convert_write_errors(target):
        target.write_text(render_csv(found, branch))
