"""The commands ``parbench ab`` and ``aa``."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from parbench.bench.command_line import format_option
from parbench.reports.options import COMPARE_FORMATS, runs_option, undecided_option

_AB_EXAMPLES = """\b
Examples:
  parbench ab --a NCCL_ALGO=Ring --b NCCL_ALGO=Tree -- all_reduce --sizes 1M:64M:x4
  parbench ab --a OMP_NUM_THREADS=1 --b OMP_NUM_THREADS=2 --budget 5m -- ddp
  parbench ab --b-python .venv-nightly/bin/python -- fsdp

\b
Exit codes: 0 fine; 1 B is slower or wrong; 2 bad input, or the budget is too short;
3 a series is undecided (with --fail-on-undecided); 4 failed or missing, or nothing could be
compared.
"""

_AA_EXAMPLES = """\b
Examples:
  parbench aa -- all_reduce --sizes 1M:64M:x4
  parbench aa --repetitions 10 --budget 30m -- --preset smoke
  parbench compare BASE NEW                                     uses the thresholds

\b
Exit codes: 0 fine; 2 bad input, or the budget is too short; 4 no series was measured often enough.
"""

RESERVED_OPTIONS = ("--repetitions", "--budget", "--out", "--format", "--resume")
"""The options of ``parbench run`` that users of ``parbench ab`` and ``aa`` cannot give to it."""
_PASS_OPTIONS = {"ignore_unknown_options": True}
"""Options that the command does not have are those of ``parbench run``, also without ``--``."""
_budget_option = partial(
    click.option,
    "--budget",
    metavar="TIME",
    show_default=True,
    help="Time for the whole session.",
)


def _refuse_reserved_options(
    context: click.Context, parameter: click.Parameter, options: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the arguments of ``parbench run`` after ``--``, as the callback of this argument.

    Raises ``click.BadParameter`` for an option in ``RESERVED_OPTIONS``.
    """
    names = {name for known in context.command.params for name in known.opts}
    for option in (option.partition("=")[0] for option in options):
        if option in RESERVED_OPTIONS:
            hint = f". Give {option} before --" if option in names else ""
            raise click.BadParameter(
                f"{option} is not allowed after --, because the session sets it{hint}"
            )
    return options


_run_options = click.argument(
    "options",
    metavar="[-- ARGUMENTS OF RUN]",
    nargs=-1,
    type=click.UNPROCESSED,
    callback=_refuse_reserved_options,
)


def _log(line: str) -> None:
    """Print a line about the progress to standard error."""
    click.echo(line, err=True)


@click.command(epilog=_AB_EXAMPLES, context_settings=_PASS_OPTIONS)
@click.option(
    "--a", default="", metavar="VARIABLES", help="Environment of side A: 'NAME=VALUE NAME=VALUE'."
)
@click.option("--b", default="", metavar="VARIABLES", help="Environment of side B.")
@click.option(
    "--a-python",
    default="",
    metavar="PYTHON",
    help="Python interpreter of side A, with parbench installed.",
)
@click.option("--b-python", default="", metavar="PYTHON", help="Python interpreter of side B.")
@_budget_option(default="10m")
@click.option(
    "--min-effect",
    metavar="PERCENT",
    default="3%",
    show_default=True,
    help="Ignore smaller changes.",
)
@undecided_option
@click.option(
    "--repetitions", type=click.IntRange(5, 24), help="Maximum number per side; default: 24."
)
@format_option(type=click.Choice(COMPARE_FORMATS), default="tables")
@runs_option(default=Path("runs/ab"))
@_run_options
def ab(
    fail_on_undecided: bool,
    repetitions: int | None,
    out: Path,
    options: tuple[str, ...],
    budget: str,
    min_effect: str,
    form: str,
    **sides: str,
) -> None:
    """Compare two settings, measured alternately in one session.

    Repetitions are interleaved in the order A B B A and compared in pairs, so a slow drift of the
    machine does not matter. All differences of environments and counts count as intended, and are
    listed. The session ends when no series is UNDECIDED any more, or with the budget.
    Arguments of parbench run follow after --.
    """
    from parbench.bench.text import UserError, parse_duration
    from parbench.reports.compare.ab import (
        compare_interleaved,
        parse_side,
        run_repetition,
    )
    from parbench.reports.compare.report import render_comparison
    from parbench.reports.compare.thresholds import parse_percentage

    base_side = parse_side("a", sides["a"], sides["a_python"])
    new_side = parse_side("b", sides["b"], sides["b_python"])
    if replace(base_side, name="b") == new_side:
        raise UserError(f"--a and --b are equal, {new_side.text!r}, so there is nothing to compare")
    result = compare_interleaved(
        (base_side, new_side),
        partial(run_repetition, out=out, options=options, log=_log),
        budget_seconds=parse_duration(budget),
        min_effect=parse_percentage(min_effect),
        max_pairs=repetitions,
    )
    comparison = result.comparison
    code = comparison.get_exit_code(fail_on_undecided=fail_on_undecided)
    click.echo(render_comparison(comparison, form, code), nl=False)
    end = f"{result.num_pairs} repetitions per side. The session ended: {result.reason}."
    click.echo(end, err=form != "tables")
    click.get_current_context().exit(code)


@click.command(epilog=_AA_EXAMPLES, context_settings=_PASS_OPTIONS)
@click.option(
    "--repetitions",
    type=click.IntRange(min=5),
    default=10,
    show_default=True,
    help="Repetitions per side.",
)
@_budget_option(default="20m")
@click.option(
    "--thresholds",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("runs/thresholds.json"),
    show_default=True,
    help="The file to which thresholds are written.",
)
@runs_option(default=Path("runs/aa"))
@_run_options
def aa(repetitions: int, budget: str, file: Path, out: Path, options: tuple[str, ...]) -> None:
    """Measure this machine's noise, and write a threshold for each series.

    The same code is compared with itself, interleaved. The threshold of a series is the smallest
    change for which at most 1 % of comparisons among these repetitions are false alarms. compare
    and history check then ignore smaller changes. Arguments of parbench run follow after --.
    """
    from parbench.bench.text import parse_duration
    from parbench.reports.compare.ab import (
        Side,
        measure_pairs,
        run_repetition,
    )
    from parbench.reports.compare.thresholds import (
        MIN_REPETITIONS,
        measure_thresholds,
        read_thresholds,
        save_thresholds,
    )

    if file.exists():
        read_thresholds(file)  # A bad file is refused before an hour is spent.
    *_, pairs = measure_pairs(
        (Side(name="a", variables={}), Side(name="b", variables={})),
        partial(run_repetition, out=out, options=options, log=_log),
        budget_seconds=parse_duration(budget),
        min_pairs=MIN_REPETITIONS // 2,
        max_pairs=repetitions,
        planned_pairs=repetitions,
    )
    runs = sorted((run for pair in pairs for run in pair), key=lambda run: run.info.started)
    thresholds = measure_thresholds(runs)
    if not thresholds:
        _log(f"No series was measured in at least {MIN_REPETITIONS} repetitions, see {out}.")
        click.get_current_context().exit(4)
    save_thresholds(file, thresholds)
    for threshold in sorted(thresholds.values(), key=lambda threshold: -threshold.min_effect):
        click.echo(f"{100 * threshold.min_effect:5.1f} %  {threshold.series}")
    click.echo(f"Smaller changes are not reported. The thresholds were written to {file}.")
