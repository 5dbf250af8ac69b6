"""``parbench history``, ``ab`` and ``aa``: the command lines of the history and of launches in turns."""

from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from bench.commands import RunPath

FILE = Path("runs/history.sqlite")
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

    A series is a case on a world in its surroundings: hosts, hardware, versions, variables. Check joins those that
    differ in hosts alone.
    """


@history.command(epilog="Example: parbench history add runs/20260102T030405Z-node1-1a2b3c")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
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
    from reports.regression.history import add_folders

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
    from bench.text import counted
    from reports import cells
    from reports.regression.history import open_history

    with open_history(file) as found:
        lines, annotations = found.runs(branch), found.annotations()
    rows = [("run", "started", "branch", "commit", "preset", "series", "bad")]
    for o in reversed(lines):
        commit = o.commit[:12] or cells.UNKNOWN
        rows.append((o.id, o.started, o.branch, commit, o.preset, str(o.num_series), str(o.num_bad)))
    # rich is slow for thousands
    form = "  ".join(f"{{:{max(map(len, column))}}}" for column in zip(*rows, strict=True))
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
    from reports.regression.history import open_history
    from reports.regression.history_gate import render_courses
    from reports.regression.levels import StepRule

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

    Runs on other hosts count: hosts that are slower in all series are another kind, with a level of its own. A rise of
    RUN alone is SUSPECT, one from run to run DRIFT with its slope; both are unknown to --fail-on-unknown.

    A case is MISSING if RUN has not measured it, and one of the last three runs of its kind has: of the same preset,
    and with a case in common on as many ranks. Runs on other ranks, or of another --only, do not count.
    """
    from reports.regression import history_gate
    from reports.regression.history import open_history
    from reports.regression.levels import StepRule
    from reports.regression.noise_floor import find_floor

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
@_form_option(type=click.Choice(("runs", "otava")), default="runs", help="The format.")
@click.option("--branch", help="With otava: runs of this branch alone.")
@_file_option
def export(target: Path, form: str, branch: str | None, file: Path) -> None:
    """Write every run of the history into the folder TARGET, which parbench history add reads back.

    otava writes the file TARGET instead: Apache Otava's CSV, a row for each run and a column for each series.
    """
    from bench.text import UserError, counted, writing
    from reports.regression.history import open_history
    from reports.regression.history_gate import render_otava

    if branch is not None and form != "otava":
        raise UserError(f"--branch {branch} goes with --format otava alone: a folder of runs holds all branches")
    with open_history(file) as found:
        if form == "otava":
            with writing(target):
                target.write_text(render_otava(found, branch))
        else:
            click.echo(f"{counted(found.export(target), 'run')} in {target}")


_AB_EXAMPLES = """\b
Examples:
  parbench ab --a NCCL_ALGO=Ring --b NCCL_ALGO=Tree -- --only all_reduce --sizes 1M:64M:x4
  parbench ab --a OMP_NUM_THREADS=1 --b OMP_NUM_THREADS=2 --budget 5m -- --only ddp
  parbench ab --b-python .venv-nightly/bin/python --across 'versions.*' --across 'torch.*' -- --only fsdp

\b
Exit codes: 0 fine; 1 B is slower or wrong; 2 bad input; 3 nothing could be compared, or cannot tell where asked to fail
on it; 4 failed or missing.
"""

_AA_EXAMPLES = """\b
Examples:
  parbench aa -- --only all_reduce --sizes 1M:64M:x4
  parbench aa --launches 10 --budget 30m -- --preset smoke
  parbench compare BASE NEW                                     uses what it wrote

\b
Exit codes: 0 fine; 2 bad input; 4 too few launches within the budget.
"""

_budget = partial(click.option, "--budget", show_default=True, metavar="TIME", help="Time for the whole session.")
_out = partial(click.option, "--out", type=click.Path(path_type=Path), show_default=True, help="For the runs.")
_words = click.argument("words", metavar="[-- OPTIONS OF RUN]", nargs=-1, type=click.UNPROCESSED)


@click.command(epilog=_AB_EXAMPLES)
@click.option("--a", default="", metavar="VARIABLES", help="Variables of side A, NAME=VALUE with spaces between.")
@click.option("--b", default="", metavar="VARIABLES", help="Those of side B.")
@click.option("--a-python", default="", metavar="PYTHON", help="The Python of side A, of an environment with parbench.")
@click.option("--b-python", default="", metavar="PYTHON", help="That of side B.")
@_budget(default="10m")
@click.option("--floor", default="3%", show_default=True, help="The change below which times count as the same.")
@click.option("--across", multiple=True, metavar="GLOB", help="Another difference of the environment that is meant.")
@click.option("--fail-on-unknown", is_flag=True, help="Exit with 3 if something cannot be told and all else is fine.")
@click.option("--launches", type=click.IntRange(5, 24), help="The most a side; default: 24.")
@_out(default=Path("runs/ab"))
@_words
def ab(
    across: tuple[str, ...],
    fail_on_unknown: bool,
    launches: int | None,
    out: Path,
    words: tuple[str, ...],
    **given: str,
) -> None:
    """Compare two settings in one session, launch by launch in turns, until B is told from A or the budget ends.

    What is measured is said as for parbench run, after --.
    """
    from bench.text import UserError, parse_duration
    from reports.regression.ab import LOOKS, check_words, launch_run, measure_in_turns, parse_side
    from reports.regression.compare_show import advised, as_table
    from reports.regression.noise_floor import parse_floor

    a, b = (parse_side(name, given[name], given[f"{name}_python"]) for name in ("a", "b"))
    if (a.variables, a.python) == (b.variables, b.python):
        raise UserError(f"--a and --b are the same, {a.text!r}: nothing would be compared")
    check_words(words)
    seconds = parse_duration(given["budget"])
    tell = partial(click.echo, err=True)
    launch = partial(launch_run, out=out, words=words, seconds=seconds / (2 * (launches or LOOKS[0])), tell=tell)
    floor, most = parse_floor(given["floor"]), launches or LOOKS[-1]
    found = measure_in_turns((a, b), launch, budget_seconds=seconds, floor=floor, launches=most, across=across)
    sides = [word for name in ("a", "b", "a_python", "b_python") if given[name] for word in (name, given[name])]
    command = [f"--{word.replace('_', '-')}" if i % 2 == 0 else word for i, word in enumerate(sides)]
    command = ["parbench", "ab", *command, *(word for glob in across for word in ("--across", glob))]
    comparison = advised(found.comparison, command, ("--", *words))
    click.echo(as_table(comparison), nl=False)
    click.echo(f"{found.launches} launches a side in turns (ABBA); ended because {found.reason}.")
    click.get_current_context().exit(comparison.code(fail_on_unknown=fail_on_unknown))


@click.command(epilog=_AA_EXAMPLES)
@click.option(
    "--launches", type=click.IntRange(min=5), default=10, show_default=True, help="How many launches a side has."
)
@_budget(default="20m")
@click.option(
    "--floor",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="PARBENCH_FLOOR",
    default=Path("runs/floor.json"),
    show_default=True,
    help="The file that keeps the floors, also $PARBENCH_FLOOR; no percentage, which is what is measured.",
)
@_out(default=Path("runs/aa"))
@_words
def aa(launches: int, budget: str, file: Path, out: Path, words: tuple[str, ...]) -> None:
    """Measure this machine's noise floor: the same code against itself, launch by launch, in turns.

    What is measured is said as for parbench run, after --. A series' floor is the least one under which at most 1 % of
    the comparisons among these launches find a change; compare and history check use it for that series from then on.
    """
    from bench.text import UserError, counted, parse_duration
    from reports.regression.ab import Side, check_words, launch_in_turns, launch_run
    from reports.regression.noise_floor import MIN_LAUNCHES, as_text, keep_floors, measure_floors, read_floors
    from reports.regression.rule import Rule

    check_words(words, "aa")
    if file.name.strip().endswith("%"):
        how = "name the file for it, or unset PARBENCH_FLOOR"
        raise UserError(f"--floor {file} is a percentage, and aa measures one: {how}")
    if file.exists():
        read_floors(file)  # before an hour is spent
    seconds = parse_duration(budget)
    tell = partial(click.echo, err=True)
    launch = partial(launch_run, out=out, words=words, seconds=seconds / (2 * launches), tell=tell)
    sides = Side(name="a", variables={}), Side(name="b", variables={})
    *_, pairs = launch_in_turns(sides, launch, launches, budget_seconds=seconds)
    runs = sorted((run for side in pairs.values() for run in side), key=lambda run: run.info.started)
    floors, autocorrelation = measure_floors(runs, Rule())
    click.echo(as_text(floors), nl=False)
    if not floors:
        click.echo(f"No floor: {len(runs)} launches were made, and a series needs {MIN_LAUNCHES} that measured it.")
        click.get_current_context().exit(4)
    keep_floors(file, floors)
    click.echo("Noise is the deviation between launches, as a fraction; a series' floor is what that needs at most.")
    click.echo(f"A launch correlates with the next by {autocorrelation:.2f} (0: launches know nothing of each other).")
    click.echo(f"{len(runs)} launches in turns; {file} has {counted(len(floors), 'floor')} of them.")
