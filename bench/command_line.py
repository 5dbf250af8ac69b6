"""Types of command-line arguments, and options that several commands have.

A case is a benchmark with values for its parameters. A run is a folder with the records of its
cases.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parbench.bench.text import UserError, format_list

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

RUNS_FOLDER = Path("runs")
"""The default folder in which each run gets its own folder."""
FILE_PATH = click.Path(path_type=Path)
"""The type of an argument that is the path of any file or folder."""
OUT_HELP = "Folder in which the run's folder is created."
"""The help of ``--out`` of commands that measure."""
FIGURE_FORMATS = ("png", "svg", "pdf")
"""The file formats of ``--figure-format``."""
format_option = partial(
    click.option, "--format", "form", show_default=True, help="The output format."
)
"""A decorator that adds ``--format`` to a command. The command names the allowed formats."""
output_option = partial(
    click.option,
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, instead of standard output.",
)
"""A decorator that adds ``--output``, the file that a command writes, to a command."""


def print_or_write(content: bytes, output: Path | None) -> None:
    """Write ``content`` to the file ``output``, or print it if ``output`` is None."""
    from parbench.bench.files import write_output

    if output is None:
        click.echo(content, nl=False)
    else:
        write_output(output, content)


def _split_formats(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[str, ...]:
    """Return the distinct formats of a comma-separated list, in the order of the list.

    click calls this function with the value of ``--figure-format``. Raises ``click.BadParameter``
    for a format other than ``png``, ``svg`` and ``pdf``.
    """
    formats = tuple(dict.fromkeys(value.split(",")))
    for name in formats:
        if name not in FIGURE_FORMATS:
            allowed = format_list(FIGURE_FORMATS)
            raise click.BadParameter(
                f"{name!r} is not {allowed}. Separate formats by commas: --figure-format png,pdf"
            )
    return formats


figures_option = click.option(
    "--figures",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write also each figure to this folder, in a size for papers.",
)
"""A decorator that adds ``--figures``, the folder for figures, to a command."""
figure_format_option = click.option(
    "--figure-format",
    "formats",
    metavar="FORMAT[,...]",
    default="png",
    show_default=True,
    callback=_split_formats,
    help="Formats of figures: png, svg, pdf.",
)
"""A decorator that adds ``--figure-format``, the file formats of figures, to a command."""


def resolve_latest(path: Path) -> Path:
    """Return the newest run in ``runs`` for ``latest``, and in the folder DIR for ``DIR/latest``.

    Any other path is returned unchanged. Raises ``UserError`` if the folder contains no run.
    """
    from parbench.bench.results.runs import list_runs

    if path.name != "latest" or path.exists():
        return path
    folder = path.parent if path.parent != Path() else RUNS_FOLDER
    runs = list_runs(folder)
    if not runs:
        raise UserError(f"{path}: {folder} contains no run", hint="parbench run makes one")
    return runs[-1]


class RunPath(click.Path):
    """The type of an argument that is the folder of a run, also ``latest`` and ``DIR/latest``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the folder of a run (``resolve_latest``)."""
        return resolve_latest(Path(value))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem]":
        """Return ``latest`` and the runs in ``runs`` that complete a text, otherwise any files."""
        from click.shell_completion import CompletionItem

        from parbench.bench.results.runs import list_runs

        names = ["latest", *map(str, list_runs(RUNS_FOLDER))]
        items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return items or super().shell_complete(ctx, param, incomplete)


class CountRange(click.IntRange):
    """The type of a whole number from 1 to a limit, which the help does not show."""

    def __init__(self, limit: int) -> None:
        """Make the type of a number of at most ``limit``."""
        super().__init__(min=1)
        self._limit = limit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number that was typed as text."""
        number = int(super().convert(value, param, ctx))
        if number > self._limit:
            self.fail(f"{number} is above the limit {self._limit}", param, ctx)
        return number
