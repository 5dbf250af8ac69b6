"""``parbench history``: the command line of the history."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from bench.text import UserError, reading
from reports.regression.history import Added, History, Line, open_history
from reports.regression.history_entry import About, Identity, read_entry

F = TypeVar("F", bound=Callable[..., Any])
FILE = Path("runs/history.sqlite")
CHECKS = ("table", "markdown", "json")
COURSES = ("text", "json")
EXPORTS = ("runs", "otava")
_EXAMPLES = """\b
Examples:
  parbench history add runs/20260102T030405Z-node1-1a2b3c --branch main --commit 1a2b3c4
  parbench history check --branch main --format markdown >> $GITHUB_STEP_SUMMARY
  parbench history annotate 20260102T030405Z-node1-1a2b3c --series '*all_reduce*' --note 'new ring'
  parbench compare main~1 runs/20260109T030405Z-node1-4d5e6f

\b
Exit codes: 0 fine; 1 slower or wrong; 2 bad input; 3 cannot tell, where asked to fail on it; 4 failed or missing.
"""


def _file_option(command: F) -> F:
    return click.option(
        "--history",
        "file",
        type=click.Path(path_type=Path),
        envvar="PARBENCH_HISTORY",
        default=FILE,
        show_default=True,
        help="The history's file, also $PARBENCH_HISTORY.",
    )(command)


@click.group(epilog=_EXAMPLES)
def history() -> None:
    """Keep runs in one file, and tell since when a series has been slower.

    A series is a case on a world in its surroundings: hosts, hardware, versions, variables.
    """


@history.command(epilog="Example: parbench history add runs/20260102T030405Z-node1-1a2b3c")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--branch",
    envvar=["GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_BRANCH"],
    default="main",
    show_default=True,
    help="What was measured; in GitHub's and GitLab's jobs their branch. Given here, it moves known runs.",
)
@click.option(
    "--commit", envvar=["GITHUB_SHA", "CI_COMMIT_SHA"], default="", help="Its commit, likewise; in such jobs theirs."
)
@_file_option
def add(runs: tuple[Path, ...], branch: str, commit: str, file: Path) -> None:
    """Add runs, or folders of runs, to the history; what it has already is passed over, or moved where you say so.

    A folder that parbench history export wrote says itself of which branch and commit its runs are.
    """

    source = click.get_current_context().get_parameter_source
    # a later job's variables say nothing of the runs that it finds
    given = {"branch": branch, "commit": commit}
    meant = {name: text for name, text in given.items() if source(name) is ParameterSource.COMMANDLINE}
    for run_id, what in add_folders(file, runs, branch=branch, commit=commit, meant=frozenset(meant)):
        where = ", ".join(f"{name} {text}" for name, text in meant.items())
        click.echo(f"moved {run_id}: {where}" if what == "moved" else f"{what} {run_id}")


@history.command("list", epilog="Example: parbench history list --branch main")
@click.option("--branch", help="Runs of this branch alone.")
@_file_option
def list_runs(branch: str | None, file: Path) -> None:
    """Show the runs that the history has, the newest first."""
    from reports.regression.history import open_history
    from reports.regression.history_show import runs_text

    with open_history(file) as found:
        click.echo(runs_text(found.runs(branch), found.annotations()), nl=False)


@history.command(epilog="Example: parbench history show '*all_reduce*'")
@click.argument("pattern", default="*")
@click.option("--branch", help="Runs of this branch alone.")
@click.option("--format", "form", type=click.Choice(COURSES), default="text", show_default=True, help="The form.")
@_file_option
def show(pattern: str, branch: str | None, form: str, file: Path) -> None:
    """Show the course of the series whose case fits PATTERN, a glob: its times, and where their level changed."""
    from reports.regression.history import open_history
    from reports.regression.history_show import courses, courses_json, courses_text
    from reports.regression.statistics import StepRule

    with open_history(file) as found:
        shown = courses(found, pattern, branch, StepRule())
    click.echo(courses_json(shown) if form == "json" else courses_text(shown), nl=False)


@history.command(epilog="Example: parbench history check --branch main --floor 5%")
@click.argument("run", required=False)
@click.option("--branch", default="main", show_default=True, help="The branch whose newest run is looked at.")
@click.option(
    "--floor",
    envvar="PARBENCH_FLOOR",
    help="The change below which levels count as the same, or the file that parbench aa wrote, also $PARBENCH_FLOOR; "
    "default: 3%, and runs/floor.json where it is there.",
)
@click.option("--window", type=click.IntRange(min=8), default=30, show_default=True, help="How many runs count.")
@click.option("--format", "form", type=click.Choice(CHECKS), default="table", show_default=True, help="The form.")
@click.option("--fail-on-unknown", is_flag=True, help="Exit with 3 if something cannot be told and all else is fine.")
@_file_option
def check(
    run: str | None, branch: str, floor: str | None, window: int, form: str, fail_on_unknown: bool, file: Path
) -> None:
    """Say of each series of RUN, or of the branch's newest run, whether it has become slower, and since when.

    A case is MISSING if RUN has not measured it, and one of the last three runs of its kind has: of the same preset,
    and with a case in common on as many ranks. Runs on other ranks, or of another --only, do not count.
    """
    from reports.regression.history import open_history
    from reports.regression.history_gate import check as examine
    from reports.regression.history_gate import newest
    from reports.regression.history_show import check_json, check_markdown, check_text
    from reports.regression.noise_floor import find_floor
    from reports.regression.statistics import StepRule

    least, floors = find_floor(floor)
    rule = StepRule(floor=least, window=window)
    with open_history(file) as found:
        checked = examine(found, found.line(run) if run else newest(found, branch), rule, floors)
    code = checked.code(fail_on_unknown=fail_on_unknown)
    texts = {"json": lambda: check_json(checked, code=code), "markdown": lambda: check_markdown(checked)}
    click.echo(texts.get(form, lambda: check_text(checked))(), nl=False)
    click.get_current_context().exit(code)


@history.command(epilog="Example: parbench history annotate 20260102T030405Z-node1-1a2b3c --note 'new driver'")
@click.argument("run")
@click.option("--note", required=True, help="Why.")
@click.option("--series", default="*", show_default=True, metavar="GLOB", help="Which series, by case and parameters.")
@_file_option
def annotate(run: str, note: str, series: str, file: Path) -> None:
    """Say that what changed at RUN was meant: its series count from there on."""
    from reports.regression.history import open_history

    with open_history(file) as found:
        found.annotate(run, series, note)


@history.command(epilog="Example: parbench history prune --keep 400")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many runs stay of each branch and preset.")
@_file_option
def prune(keep: int, file: Path) -> None:
    """Forget all but the newest runs, and print what was forgotten."""
    from reports.regression.history import open_history

    with open_history(file) as found:
        for run_id in found.prune(keep):
            click.echo(run_id)


@history.command(epilog="Example: parbench history export kept-runs")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(EXPORTS), default="runs", show_default=True, help="The format.")
@click.option("--branch", help="With otava: runs of this branch alone.")
@_file_option
def export(target: Path, form: str, branch: str | None, file: Path) -> None:
    """Write every run of the history into the folder TARGET, which parbench history add reads back.

    otava writes the file TARGET instead: Apache Otava's CSV, a row for each run and a column for each series.
    """
    from bench.text import UserError, writing
    from reports.regression.history import open_history

    if branch is not None and form != "otava":
        raise UserError(f"--branch {branch} goes with --format otava alone: a folder of runs holds all branches")
    with open_history(file) as found:
        if form == "otava":
            with writing(target):
                target.write_text(render_otava(found, branch))
            return
        count = found.export(target)
    click.echo(f"{count} run{'s' * (count != 1)} in {target}")


def find_folders(path: Path) -> list[Path]:
    """Return a run's folder itself, or the runs' folders in it; ``UserError`` if there is none."""
    if (path / "run.json").exists():
        return [path]
    with reading(path):
        found = sorted(file.parent for file in path.glob("*/run.json"))
    if not found:
        raise UserError(f"{path} is no run and holds none: name runs' folders, or a folder of such folders")
    return found


def add_folders(
    file: Path, paths: Sequence[Path], *, branch: str, commit: str, meant: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Added]]:
    """Add runs to the history in a file and yield each run's id and what became of it.

    ``meant`` names those of ``branch`` and ``commit`` to which runs are moved that the history has elsewhere.
    Each is kept whole before the next is read, so that what was yielded is never lost.
    """
    folders = {folder: path for path in paths for folder in find_folders(path)}
    with open_history(file, create=True) as history:
        for folder in folders:
            entry = read_entry(folder, About(branch=branch, commit=commit), meant)
            yield entry.run.id, history.add(entry)
        for parent in dict.fromkeys(paths):
            history.import_annotations(parent)


def render_otava(history: History, branch: str | None) -> str:
    """Return the runs in the order of time, their commits, and the time of every series; unknown is empty.

    Otava's configuration names ``time`` as ``time_column`` and ``commit`` and ``run`` as ``attributes``.
    """
    lines = history.runs(branch)
    series = history.series()
    times = {number: dict(history.times_of_series(number)) for number in series}
    ours = {line.number for line in lines}
    shown = [number for number in series if ours & times[number].keys()]
    names = _names([(number, series[number]) for number in shown])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["time", "commit", "run", *(names[number] for number in shown)])
    for line in lines:
        writer.writerow([*_head(line), *(_cell(times[number].get(line.number)) for number in shown)])
    return out.getvalue()


def _head(line: Line) -> list[str]:
    return [line.started, line.commit, line.id]


def _names(series: list[tuple[int, Identity]]) -> dict[int, str]:
    """Return a column's name for each series: its label, with the fingerprint where two bear the same one."""
    labels = [one.case.label for _, one in series]
    return {
        number: label if labels.count(label) == 1 else f"{label} #{one.fingerprint}"
        for (number, one), label in zip(series, labels, strict=True)
    }


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.9g}"
