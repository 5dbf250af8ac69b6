"""Types of arguments with shell completion, and a command whose help has groups of options."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from parbench.bench.text import UserError, format_list

RUNS_FOLDER = Path("runs")
FILE_PATH = click.Path(path_type=Path)
"""The type of an argument that is the path of any file or folder."""
FIGURE_FORMATS = ("png", "svg", "pdf")
format_option = partial(
    click.option, "--format", "form", show_default=True, help="The output format."
)


def _split_formats(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[str, ...]:
    """Return the formats in a list separated by commas, each once.

    Raises ``click.BadParameter`` for an unknown format.
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
figure_format_option = click.option(
    "--figure-format",
    "formats",
    metavar="FORMAT[,...]",
    default="png",
    show_default=True,
    callback=_split_formats,
    help="Formats of figures: png, svg, pdf.",
)


class GroupedCommand(click.Command):
    """A command whose help lists its options in groups.

    ``option_groups`` has the parameter names of each group by title. Other options come last.
    """

    def __init__(
        self, *args: Any, option_groups: Mapping[str, Sequence[str]], **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.option_groups = option_groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group, and one for the other options."""
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
    """The name of a case, a glob, or ``module:function`` for a custom step."""

    name = "case"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of cases that begin with the text.

        The names are without their kind if the text has no dot.
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
    """The folder of a run.

    ``latest`` stands for the newest run in ``runs``, and ``DIR/latest`` for the newest run in DIR.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the folder. Raises ``UserError`` for ``latest`` without a run."""
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
        """Return ``latest`` and the matching runs, newest first. Otherwise complete any folder."""
        parent = Path(incomplete if incomplete.endswith("/") else incomplete.rpartition("/")[0])
        folder = parent if parent != Path() else RUNS_FOLDER
        files = sorted(folder.glob("*/run.json"), reverse=True)
        paths = [parent / "latest"] if files else []
        paths += [file.parent for file in files]
        items = [CompletionItem(path) for path in map(str, paths) if path.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="dir")]


class BranchName(click.types.StringParamType):
    """The name of a branch in the history file."""

    name = "branch"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the branches of the file of ``--history`` that begin with the text."""
        file = ctx.params.get("file")
        if file is None or not Path(file).is_file():
            return []
        try:
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
                rows = connection.execute("SELECT DISTINCT branch FROM run").fetchall()
        except sqlite3.Error:
            return []
        return [CompletionItem(name) for (name,) in rows if name.startswith(incomplete)]
