"""``parbench history``: the command line of the history, and its runs and series as text."""

import csv
import io
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource
from msgspec.structs import asdict

from bench.text import UserError, counted, reading, writing
from reports import cells
from reports.regression import history_gate
from reports.regression.compare import world_words
from reports.regression.history import Added, History, open_history
from reports.regression.history_entry import About, read_entry
from reports.regression.noise_floor import find_floor
from reports.regression.statistics import StepRule, segments

FILE = Path("runs/history.sqlite")
_BARS = "▁▂▃▄▅▆▇█"
_EXAMPLES = """\b
Examples:
  parbench history add runs/20260102T030405Z-node1-1a2b3c --branch main --commit 1a2b3c4
  parbench history check --branch main --format markdown >> $GITHUB_STEP_SUMMARY
  parbench history annotate 20260102T030405Z-node1-1a2b3c --series '*all_reduce*' --note 'new ring'
  parbench compare main~1 runs/20260109T030405Z-node1-4d5e6f

\b
Exit codes: 0 fine; 1 slower or wrong; 2 bad input; 3 cannot tell, where asked to fail on it; 4 failed or missing.
"""
_file_option = click.option(
    "--history",
    "file",
    type=click.Path(path_type=Path),
    envvar="PARBENCH_HISTORY",
    default=FILE,
    show_default=True,
    help="The history's file, also $PARBENCH_HISTORY.",
)
_form_option = partial(click.option, "--format", "form", show_default=True, help="The form.")


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
    where = ", ".join(f"{name} {text}" for name, text in meant.items())
    for run_id, what in add_folders(file, runs, branch=branch, commit=commit, meant=frozenset(meant)):
        click.echo(f"moved {run_id}: {where}" if what == "moved" else f"{what} {run_id}")


@history.command("list", epilog="Example: parbench history list --branch main")
@click.option("--branch", help="Runs of this branch alone.")
@_file_option
def list_runs(branch: str | None, file: Path) -> None:
    """Show the runs that the history has, the newest first."""
    with open_history(file) as found:
        lines, annotations = found.runs(branch), found.annotations()
    rows = [("run", "started", "branch", "commit", "preset", "series", "bad")]
    for o in reversed(lines):
        commit = o.commit[:12] or cells.UNKNOWN
        rows.append((o.id, o.started, o.branch, commit, o.preset, str(o.num_series), str(o.num_bad)))
    form = "  ".join(
        f"{{:{max(map(len, column))}}}" for column in zip(*rows, strict=True)
    )  # rich is slow for thousands
    table = [form.format(*row).rstrip() for row in rows] if lines else []
    notes = [f"meant at {one.run_id}, {one.series}: {one.note}" for one in annotations]
    click.echo("\n".join([counted(len(lines), "run"), *table, *notes]))


@history.command(epilog="Example: parbench history show '*all_reduce*'")
@click.argument("pattern", default="*")
@click.option("--branch", help="Runs of this branch alone.")
@_form_option(type=click.Choice(("text", "json")), default="text")
@_file_option
def show(pattern: str, branch: str | None, form: str, file: Path) -> None:
    """Show the course of the series whose case fits PATTERN, a glob: its times, and where their level changed."""
    with open_history(file) as found:
        click.echo(render_courses(found, pattern, branch, StepRule(), form), nl=False)


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
@_form_option(type=click.Choice(("table", "markdown", "json")), default="table")
@click.option("--fail-on-unknown", is_flag=True, help="Exit with 3 if something cannot be told and all else is fine.")
@_file_option
def check(
    run: str | None, branch: str, floor: str | None, window: int, form: str, fail_on_unknown: bool, file: Path
) -> None:
    """Say of each series of RUN, or of the branch's newest run, whether it has become slower, and since when.

    A case is MISSING if RUN has not measured it, and one of the last three runs of its kind has: of the same preset,
    and with a case in common on as many ranks. Runs on other ranks, or of another --only, do not count.
    """
    least, floors = find_floor(floor)
    with open_history(file) as found:
        line = found.line(run) if run else history_gate.newest(found, branch)
        checked = history_gate.check(found, line, StepRule(floor=least, window=window), floors)
    code = checked.code(fail_on_unknown=fail_on_unknown)
    text = history_gate.render_json(checked, code) if form == "json" else history_gate.render(checked, form)
    click.echo(text, nl=False)
    click.get_current_context().exit(code)


@history.command(epilog="Example: parbench history annotate 20260102T030405Z-node1-1a2b3c --note 'new driver'")
@click.argument("run")
@click.option("--note", required=True, help="Why.")
@click.option("--series", default="*", show_default=True, metavar="GLOB", help="Which series, by case and parameters.")
@_file_option
def annotate(run: str, note: str, series: str, file: Path) -> None:
    """Say that what changed at RUN was meant: its series count from there on."""
    with open_history(file) as found:
        found.annotate(run, series, note)


@history.command(epilog="Example: parbench history prune --keep 400")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many runs stay of each branch and preset.")
@_file_option
def prune(keep: int, file: Path) -> None:
    """Forget all but the newest runs, and print what was forgotten."""
    with open_history(file) as found:
        for run_id in found.prune(keep):
            click.echo(run_id)


@history.command(epilog="Example: parbench history export kept-runs")
@click.argument("target", type=click.Path(path_type=Path))
@_form_option(type=click.Choice(("runs", "otava")), default="runs", help="The format.")
@click.option("--branch", help="With otava: runs of this branch alone.")
@_file_option
def export(target: Path, form: str, branch: str | None, file: Path) -> None:
    """Write every run of the history into the folder TARGET, which parbench history add reads back.

    otava writes the file TARGET instead: Apache Otava's CSV, a row for each run and a column for each series.
    """
    if branch is not None and form != "otava":
        raise UserError(f"--branch {branch} goes with --format otava alone: a folder of runs holds all branches")
    with open_history(file) as found:
        if form == "otava":
            with writing(target):
                target.write_text(render_otava(found, branch))
        else:
            click.echo(f"{counted(found.export(target), 'run')} in {target}")


def add_folders(
    file: Path, paths: Sequence[Path], *, branch: str, commit: str, meant: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Added]]:
    """Add runs to the history in a file and yield each run's id and what became of it.

    ``meant`` names those of ``branch`` and ``commit`` to which runs are moved that the history has elsewhere.
    Each is kept whole before the next is read, so that what was yielded is never lost.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        with reading(path):
            found = [path / "run.json"] if (path / "run.json").exists() else sorted(path.glob("*/run.json"))
        if not found:
            raise UserError(f"{path} is no run and holds none: name runs' folders, or a folder of such folders")
        folders |= dict.fromkeys(file.parent for file in found)
    with open_history(file, create=True) as history:
        for folder in folders:
            entry = read_entry(folder, About(branch=branch, commit=commit), meant)
            yield entry.run.id, history.add(entry)
        for parent in dict.fromkeys(paths):
            history.import_annotations(parent)


def render_courses(history: History, pattern: str, branch: str | None, rule: StepRule, form: str = "text") -> str:
    """Return the courses of the series whose label fits a glob; ``UserError`` if none does.

    As ``text``, its last runs as bars from the fastest to the slowest, and where its level changed in the rule's
    window; as ``json``, all of its runs, times in seconds.
    """
    lines = history.runs(branch)
    courses = [
        (one, times)
        for number, one in history.series().items()
        if fnmatchcase(one.case.label, pattern) or fnmatchcase(one.case.name, pattern)
        if (times := history.times(number, lines))
    ]
    if not courses:
        allowed = "write a case's name or a glob, such as '*all_reduce*'"
        raise UserError(f"no series of the history fits {pattern!r}: {allowed}")
    if form == "json":
        plain = []
        for one, times in courses:
            told = {"runs": [line.id for line, _ in times], "seconds": [seconds for _, seconds in times]}
            plain.append({"fingerprint": one.fingerprint, **asdict(one), **told})
        return history_gate.as_json({"series": plain})
    shown = []
    for one, times in courses:
        last, window = [seconds for _, seconds in times[-30:]], times[-rule.window :]
        low, high = min(last), max(last)
        step = (high - low) / (len(_BARS) - 1) or 1.0
        bars = "".join(_BARS[round((value - low) / step)] for value in last)
        shown += [one.case.label, f"    on {world_words(one.world)}"]
        shown.append(f"    {bars}  {cells.duration(low)} to {cells.duration(high)}, {len(times)} runs")
        for level in segments([seconds for _, seconds in window], rule):
            since, count = window[level.start][0].id, level.stop - level.start
            shown.append(f"    {cells.duration(level.seconds)} from {since} on ({count} runs)")
    return "\n".join([*shown, ""])


def render_otava(history: History, branch: str | None) -> str:
    """Return the runs in the order of time, their commits, and the time of every series; unknown is empty.

    Otava's configuration names ``time`` as ``time_column`` and ``commit`` and ``run`` as ``attributes``.
    """
    lines = history.runs(branch)
    known = [(one, {line.id: value for line, value in history.times(n, lines)}) for n, one in history.series().items()]
    columns = [(series, times) for series, times in known if times]
    labels = [series.case.label for series, _ in columns]
    names = [
        label if labels.count(label) == 1 else f"{label} #{series.fingerprint}"
        for label, (series, _) in zip(labels, columns, strict=True)
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["time", "commit", "run", *names])
    for line in lines:
        values = [f"{times[line.id]:.9g}" if line.id in times else "" for _, times in columns]
        writer.writerow([line.started, line.commit, line.id, *values])
    return out.getvalue()
