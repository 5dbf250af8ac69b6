"""Command-line options that several report commands share, and their output formats."""

from functools import partial
from pathlib import Path

import click

from parbench.bench.command_line import FIGURE_FORMATS

REPORT_FORMATS = ("html", "markdown", "csv", "json")
EXPLAIN_FORMATS = ("tables", "html", "markdown", "json")
COMPARE_FORMATS = ("tables", "markdown", "json", "junit")
HISTORY_FILE = Path("runs/history.sqlite")


def _check_suffix(
    context: click.Context, parameter: click.Parameter, file: Path | None
) -> Path | None:
    """Return the file of a figure unchanged, as the callback of the option ``--figure``.

    Raises ``click.BadParameter`` unless the file ends with .png, .svg or .pdf. ``file`` is None if
    the option is not given.
    """
    if file is not None and file.suffix[1:] not in FIGURE_FORMATS:
        raise click.BadParameter(f"{file} does not end with .png, .svg or .pdf")
    return file


history_option = partial(
    click.option,
    "--history",
    type=click.Path(path_type=Path),
    default=HISTORY_FILE,
    show_default=True,
    envvar="PARBENCH_HISTORY",
    show_envvar=True,
)
runs_option = partial(
    click.option,
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    show_default=True,
    help="Folder in which the folders of the runs are created.",
)
figure_option = partial(
    click.option,
    "--figure",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_suffix,
)
min_effect_option = click.option(
    "--min-effect",
    metavar="PERCENT|FILE",
    envvar="PARBENCH_MIN_EFFECT",
    show_envvar=True,
    help="Ignore smaller changes: a percentage, or the file that parbench aa wrote. Default: 3%, "
    "and runs/thresholds.json if it exists.",
)
undecided_option = click.option(
    "--fail-on-undecided",
    is_flag=True,
    help="Exit with code 3 if everything else is fine, but the time of a series is undecided: "
    "UNDECIDED, DRIFT, ENVIRONMENT CHANGED or NOT ENOUGH DATA.",
)
