"""``parbench ab`` and ``parbench aa``: the command line of two settings in one session, and of one against itself."""

from functools import partial
from pathlib import Path

import click

_EXAMPLES = """\b
Examples:
  parbench ab --a NCCL_ALGO=Ring --b NCCL_ALGO=Tree -- --only all_reduce --sizes 1M:64M:x4
  parbench ab --a OMP_NUM_THREADS=1 --b OMP_NUM_THREADS=2 --budget 5m -- --only ddp
  parbench ab --b-python .venv-nightly/bin/python --across 'versions.*' --across 'torch.*' -- --only fsdp

\b
Exit codes: 0 fine; 1 B is slower or wrong; 2 bad input; 3 cannot tell, where asked to fail on it; 4 failed or missing.
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


@click.command(epilog=_EXAMPLES)
@click.option("--a", default="", metavar="VARIABLES", help="Variables of side A, NAME=VALUE with spaces between.")
@click.option("--b", default="", metavar="VARIABLES", help="Those of side B.")
@click.option("--a-python", default="", metavar="PYTHON", help="The Python of side A, of an environment with parbench.")
@click.option("--b-python", default="", metavar="PYTHON", help="That of side B.")
@_budget(default="10m")
@click.option("--floor", default="3%", show_default=True, help="The change below which times count as the same.")
@click.option("--across", multiple=True, metavar="GLOB", help="Another difference of the environment that is meant.")
@click.option("--fail-on-unknown", is_flag=True, help="Exit with 3 if something cannot be told and all else is fine.")
@_out(default=Path("runs/ab"))
@_words
def ab(
    a: str,
    b: str,
    a_python: str,
    b_python: str,
    budget: str,
    floor: str,
    across: tuple[str, ...],
    fail_on_unknown: bool,
    out: Path,
    words: tuple[str, ...],
) -> None:
    """Compare two settings in one session, launch by launch in turns, until B is told from A or the budget ends.

    What is measured is said as for parbench run, after --.
    """
    from bench.text import UserError, parse_duration
    from reports.regression.ab import LOOKS, check_words, launch_run, measure_in_turns, parse_side
    from reports.regression.compare_show import as_table
    from reports.regression.noise_floor import parse_floor

    sides = parse_side("a", a, a_python), parse_side("b", b, b_python)
    if (sides[0].variables, a_python) == (sides[1].variables, b_python):
        raise UserError(f"--a and --b are the same, {sides[0].text!r}: nothing would be compared")
    check_words(words)
    seconds = parse_duration(budget)
    tell = partial(click.echo, err=True)
    launch = partial(launch_run, out=out, words=words, seconds=seconds / (2 * LOOKS[0]), tell=tell)
    found = measure_in_turns(sides, launch, budget_seconds=seconds, floor=parse_floor(floor), across=across)
    click.echo(as_table(found.comparison), nl=False)
    click.echo(f"{found.launches} launches a side in turns (ABBA); ended because {found.reason}.")
    click.get_current_context().exit(found.comparison.code(fail_on_unknown=fail_on_unknown))


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
        raise UserError(
            f"--floor {file} is a percentage, and aa measures one: name the file for it, or unset PARBENCH_FLOOR"
        )
    if file.exists():
        read_floors(file)  # before an hour is spent
    seconds = parse_duration(budget)
    tell = partial(click.echo, err=True)
    launch = partial(launch_run, out=out, words=words, seconds=seconds / (2 * launches), tell=tell)
    sides = Side(name="a", variables={}), Side(name="b", variables={})
    *_, pairs = launch_in_turns(sides, launch, launches, budget_seconds=seconds)
    runs = sorted((run for side in pairs.values() for run in side), key=lambda run: run.info.started)
    floors = measure_floors(runs, Rule())
    click.echo(as_text(floors), nl=False)
    if not floors:
        click.echo(f"No floor: {len(runs)} launches were made, and a series needs {MIN_LAUNCHES} that measured it.")
        click.get_current_context().exit(4)
    keep_floors(file, floors)
    click.echo(f"{len(runs)} launches in turns; {file} has {counted(len(floors), 'floor')} of them.")
