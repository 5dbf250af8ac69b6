"""The types of command-line arguments with shell completion, and shared options of commands.

A case is a benchmark with values for its parameters. A run is a folder with the records of its
cases.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from parbench.bench.text import UserError, format_list

RUNS_FOLDER = Path("runs")
"""The default folder in which each run gets its own folder."""
FILE_PATH = click.Path(path_type=Path)
"""The type of an argument that is the path of any file or folder."""
FIGURE_FORMATS = ("png", "svg", "pdf")
"""The file formats of ``--figure-format``."""
format_option = partial(
    click.option, "--format", "form", show_default=True, help="The output format."
)
"""A decorator that adds ``--format`` to a command. The command names the allowed formats."""


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


class GroupedCommand(click.Command):
    """A click command whose help lists its options in titled groups instead of one list.

    ``option_groups`` has the names of each group's parameters, by the title of the group. Options
    in no group come last.
    """

    def __init__(
        self, *args: Any, option_groups: Mapping[str, Sequence[str]], **settings: Any
    ) -> None:
        """Store the groups of options. The other arguments are those of ``click.Command``."""
        super().__init__(*args, **settings)
        self.option_groups = option_groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the options: a section for each group, then one for other options."""
        records = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                records[param.name] = record
        for title, names in self.option_groups.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        with formatter.section("Other options"):
            formatter.write_dl(list(records.values()))


class CaseName(click.types.StringParamType):
    """The type of an argument that names benchmarks, such as ``ddp``, or a glob such as ``p2p.*``.

    It may also be ``module:function`` for a custom step. The type accepts any text, and only adds
    shell completion.
    """

    name = "case"
    """The name of the type in messages of click."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of benchmarks that begin with the incomplete word, each with its help.

        A benchmark has a short name, such as ``all_reduce``, and a full name, such as
        ``collective.all_reduce``. If both begin with the word, only the short name is returned.
        """
        from parbench.bench.plan.cases import load_catalogue

        items = []
        for definition in load_catalogue(ctx.obj.modules):
            for name in (definition.short_name, definition.name):
                if name.startswith(incomplete):
                    items.append(CompletionItem(name, help=definition.help))
                    break
        return items


class RunPath(click.Path):
    """The type of an argument that is the folder of a run.

    ``latest`` stands for the newest run in ``runs``, and ``DIR/latest`` for the newest run in the
    folder DIR.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the folder of a run, also for ``latest`` and ``DIR/latest``.

        Raises ``UserError`` if the value is ``latest`` and the folder ``runs`` contains no run, or
        if the value is ``DIR/latest`` and the folder DIR contains none.
        """
        from parbench.bench.results.runs import list_runs

        path = Path(value)
        if path.name != "latest" or path.exists():
            return path
        folder = path.parent if path.parent != Path() else RUNS_FOLDER
        runs = list_runs(folder)
        if not runs:
            raise UserError(f"{path}: {folder} contains no run", hint="parbench run makes one")
        return runs[-1]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return ``latest`` and the paths of runs, each if it begins with the incomplete word.

        The runs are those in the folder ``runs``, and the newest comes first. If nothing begins
        with the word, the result lets the shell complete the path of any folder.
        """
        from parbench.bench.results.runs import list_runs

        paths = map(str, reversed(list_runs(RUNS_FOLDER)))
        items = [CompletionItem(path) for path in ("latest", *paths) if path.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="dir")]
