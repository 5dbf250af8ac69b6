"""``parbench ab`` and ``aa``: repetitions in turns; and the options that ``compare`` and ``history`` share."""

from functools import partial
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

FILE = Path("runs/history.sqlite")
FIGURES = ("png", "svg", "pdf")


def _check_suffix(
    context: click.Context, parameter: click.Parameter, file: Path | None
) -> Path | None:
    if file is not None and file.suffix[1:] not in FIGURES:
        raise click.BadParameter(f"{file} is not a figure: its name ends with .png, .svg or .pdf")
    return file


history_option = partial(
    click.option,
    "--history",
    type=click.Path(path_type=Path),
    default=FILE,
    show_default=True,
    envvar="PARBENCH_HISTORY",
    show_envvar=True,
)
runs_option = partial(
    click.option, "--out", type=click.Path(file_okay=False, path_type=Path), show_default=True
)
form_option = partial(click.option, "--format", "form", show_default=True, help="The form.")
figure_option = partial(
    click.option,
    "--figure",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_suffix,
)
floor_option = click.option(
    "--floor",
    envvar="PARBENCH_FLOOR",
    show_envvar=True,
    help="Ignore changes below this: a percentage, or the file that parbench aa wrote. Default: 3%, "
    "and runs/floor.json if it exists.",
)
unknown_option = click.option(
    "--fail-on-unknown",
    is_flag=True,
    help="Exit with 3 if a series is undecided and all else is fine.",
)

_AB_EXAMPLES = """\b
Examples:
  parbench ab --a NCCL_ALGO=Ring --b NCCL_ALGO=Tree -- --only all_reduce --sizes 1M:64M:x4
  parbench ab --a OMP_NUM_THREADS=1 --b OMP_NUM_THREADS=2 --budget 5m -- --only ddp
  parbench ab --b-python .venv-nightly/bin/python --across 'versions.*' --across 'torch.*' -- --only fsdp

\b
Exit codes: 0 fine; 1 B is slower or wrong; 2 bad input; 3 nothing could be compared, or cannot tell where asked to fail
on it; 4 failed or missing, or the budget is too short to tell.
"""

_AA_EXAMPLES = """\b
Examples:
  parbench aa -- --only all_reduce --sizes 1M:64M:x4
  parbench aa --repetitions 10 --budget 30m -- --preset smoke
  parbench compare BASE NEW                                     uses what it wrote

\b
Exit codes: 0 fine; 2 bad input; 4 too few repetitions within the budget.
"""

_budget = partial(
    click.option, "--budget", show_default=True, metavar="TIME", help="Time for the whole session."
)
_words = click.argument("words", metavar="[-- OPTIONS OF RUN]", nargs=-1, type=click.UNPROCESSED)


def _budget_is_given() -> bool:
    return click.get_current_context().get_parameter_source("budget") is ParameterSource.COMMANDLINE


def _end_short(why: str, out: Path) -> NoReturn:
    click.echo(f"Nothing can be told: {why}. What was measured is in {out}.")
    click.get_current_context().exit(4)


@click.command(epilog=_AB_EXAMPLES)
@click.option(
    "--a", default="", metavar="VARIABLES", help="Environment of side A: 'NAME=VALUE NAME=VALUE'."
)
@click.option("--b", default="", metavar="VARIABLES", help="Environment of side B.")
@click.option(
    "--a-python",
    default="",
    metavar="PYTHON",
    help="Python of side A, in which parbench is installed.",
)
@click.option("--b-python", default="", metavar="PYTHON", help="Python of side B.")
@_budget(default="10m")
@click.option("--floor", default="3%", show_default=True, help="Ignore changes below this.")
@click.option(
    "--across",
    multiple=True,
    metavar="GLOB",
    help="Another difference that you compare on purpose.",
)
@unknown_option
@click.option(
    "--repetitions", type=click.IntRange(5, 24), help="Repetitions a side, at most; default: 24."
)
@runs_option(default=Path("runs/ab"), help="Where runs go.")
@_words
def ab(
    across: tuple[str, ...],
    fail_on_unknown: bool,
    repetitions: int | None,
    out: Path,
    words: tuple[str, ...],
    **given: str,
) -> None:
    """Compare two settings, launched in turns in one session.

    Ends when B is told from A, or with the budget. Options of parbench run follow after --.
    """
    from parbench.bench.text import UserError, parse_duration
    from parbench.reports.compare.ab import (
        check_words,
        measure_in_turns,
        parse_side,
        run_repetition,
    )
    from parbench.reports.compare.report import advised, as_table
    from parbench.reports.compare.thresholds import parse_floor

    a, b = (parse_side(name, given[name], given[f"{name}_python"]) for name in ("a", "b"))
    if (a.variables, a.python) == (b.variables, b.python):
        raise UserError(f"--a and --b are the same, {a.text!r}: nothing would be compared")
    check_words(words)
    found = measure_in_turns(
        (a, b),
        partial(run_repetition, out=out, words=words, tell=partial(click.echo, err=True)),
        budget_seconds=parse_duration(given["budget"]),
        given=_budget_is_given(),
        floor=parse_floor(given["floor"]),
        repetitions=repetitions,
        across=across,
    )
    if found.short:
        _end_short(found.reason, out)
    sides = [
        word
        for name in ("a", "b", "a_python", "b_python")
        if given[name]
        for word in (name, given[name])
    ]
    command = [
        f"--{word.replace('_', '-')}" if i % 2 == 0 else word for i, word in enumerate(sides)
    ]
    command = [
        "parbench",
        "ab",
        *command,
        *(word for glob in across for word in ("--across", glob)),
    ]
    comparison = advised(found.comparison, command, ("--", *words))
    click.echo(as_table(comparison), nl=False)
    click.echo(
        f"{found.repetitions} repetitions a side in turns (ABBA); ended because {found.reason}."
    )
    click.get_current_context().exit(comparison.code(fail_on_unknown=fail_on_unknown))


@click.command(epilog=_AA_EXAMPLES)
@click.option(
    "--repetitions",
    type=click.IntRange(min=5),
    default=10,
    show_default=True,
    help="Repetitions a side.",
)
@_budget(default="20m")
@click.option(
    "--floor",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="PARBENCH_FLOOR",
    show_envvar=True,
    default=Path("runs/floor.json"),
    show_default=True,
    help="The file that keeps the floors.",
)
@runs_option(default=Path("runs/aa"), help="Where runs go.")
@_words
def aa(repetitions: int, budget: str, file: Path, out: Path, words: tuple[str, ...]) -> None:
    """Measure this machine's noise: changes below it are ignored.

    The same code is launched against itself, in turns; options of parbench run follow after --. A series' floor is the
    smallest with which at most 1 % of comparisons among these repetitions find a change. compare and history check use
    it
    from then on.
    """
    from parbench.bench.text import UserError, parse_duration, pluralize
    from parbench.reports.compare.ab import Side, Turns, check_words, run_repetition
    from parbench.reports.compare.rule import Rule
    from parbench.reports.compare.thresholds import (
        MIN_REPETITIONS,
        as_text,
        measure_floors,
        read_thresholds,
        save_thresholds,
    )

    check_words(words, "aa")
    if file.name.strip().endswith("%"):
        how = "name the file for it, or unset PARBENCH_FLOOR"
        raise UserError(f"--floor {file} is a percentage, and aa measures one: {how}")
    if file.exists():
        read_thresholds(file)  # before an hour is spent
    turns = Turns(
        (Side(name="a", variables={}), Side(name="b", variables={})),
        partial(run_repetition, out=out, words=words, tell=partial(click.echo, err=True)),
        repetitions,
        budget_seconds=parse_duration(budget),
        first=repetitions,
        least=MIN_REPETITIONS // 2,
        given=_budget_is_given(),
    )
    *_, pairs = turns
    if turns.short:
        _end_short(turns.short, out)
    runs = sorted(
        (run for side in pairs.values() for run in side), key=lambda run: run.info.started
    )
    floors, autocorrelation = measure_floors(runs, Rule())
    click.echo(as_text(floors), nl=False)
    if not floors:
        click.echo(
            f"No floor: {len(runs)} repetitions were made, and a series needs {MIN_REPETITIONS} that measured it."
        )
        click.get_current_context().exit(4)
    save_thresholds(file, floors)
    click.echo(
        "Noise is the deviation between repetitions, as a fraction; a series' floor is what that needs at most."
    )
    click.echo(
        f"A repetition correlates with the next by {autocorrelation:.2f} (0: repetitions know nothing of each other)."
    )
    click.echo(
        f"{len(runs)} repetitions in turns; {file} has {pluralize(len(floors), 'floor')} of them."
    )
