"""The command line: a table of commands, each imported when it is first used.

``parbench --help`` has to answer within 0.2 s, so this module imports nothing heavy.
"""

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import click

from parbench.bench.commands import AppHooks
from parbench.bench.text import UserError, format_error
from parbench.defaults import read_defaults

if TYPE_CHECKING:
    from parbench.bench.results.tables import Document

COMMANDS = {
    "run": "parbench.bench.commands:run",
    "list": "parbench.bench.commands:list_cases",
    "doctor": "parbench.bench.commands:doctor",
    "check": "parbench.bench.commands:check",
    "report": "parbench.reports.commands:report",
    "show": "parbench.reports.commands:show",
    "compare": "parbench.reports.commands:compare",
    "explain": "parbench.reports.commands:explain",
    "plan": "parbench.workloads.commands:plan",
    "history": "parbench.reports.history.commands:history",
    "ab": "parbench.reports.compare.commands:ab",
    "aa": "parbench.reports.compare.commands:aa",
    "slurm": "parbench.slurm.commands:slurm",
    "import": "parbench.reports.commands:import_files",
    "export": "parbench.reports.commands:export",
}
DEFINITIONS = ("parbench.bench.plan.catalogue", "parbench.workloads.catalogue")


class CommandLineError(click.ClickException):
    """A user's error, printed as ``error:`` and ``hint:``."""

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        """Print the error to standard error."""
        click.echo(format_error(self.message, self.hint), file=file, err=True)


@contextmanager
def convert_user_errors() -> Iterator[None]:
    """Raise ``CommandLineError`` for a user's error, and for one that click finds."""
    try:
        yield
    except UserError as error:
        raise CommandLineError(str(error), error.hint) from error
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        hint = f"{error.ctx.command_path} --help" if error.ctx else ""
        raise CommandLineError(error.format_message(), hint) from error


class LazyGroup(click.Group):
    """A group that imports a command when it is used. A user's error ends it with exit code 2."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """Return the context of the group. Errors in its own options are converted."""
        with convert_user_errors():
            return super().make_context(*args, **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None if there is none of the name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names. An unknown one raises ``UsageError``."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and near and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. A user's error exits with code 2, any other error with code 4."""
        try:
            with convert_user_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(format_error("interrupted"), err=True)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (
                errno.ENAMETOOLONG,
                errno.ELOOP,
                errno.ENOTDIR,
            ):
                # Any option may have named the file.
                message = f"{error.filename} cannot be used: {error.strerror}"
                raise CommandLineError(message, "") from error
            if is_out_of_memory(error):
                click.echo(format_error("the memory is full"), err=True)
            elif is_missing_package(error):
                message = f"the Python package {error.name!r} is not installed"
                click.echo(format_error(message), err=True)
            else:
                traceback.print_exc()
        sys.exit(4)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if there is too little memory, also for the dynamic linker to load a library."""
    return isinstance(error, MemoryError) or (
        isinstance(error, ImportError) and "failed to map" in str(error)
    )


def is_missing_package(error: Exception) -> TypeGuard[ModuleNotFoundError]:
    """Return True if a dependency is not installed. A missing module of parbench is a defect."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return "." not in error.name and error.name != "parbench"


def run() -> None:
    """Run the command line as the program ``parbench``.

    Processes that parbench starts with ``python -m`` do not import from the current folder, where a
    module may have the name of one of Python's. They inherit the variable.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    main()


_EPILOG = """\b
Start with: parbench run

\b
Defaults of options: the environment, such as PARBENCH_RUN_OUT=/data/runs, or
parbench.toml in the working folder, with a table such as [run] out = "/data/runs".
"""
_FIRST = """\
parbench measures how this machine communicates, and what that costs a training step.

  parbench run                                        measure this node, in under 2 min
  parbench doctor                                     find what would disturb a measurement
  parbench plan search --model llama3-8b --gpus 64    predict a training step, without GPUs

All commands: parbench --help"""


def _show(path: Path, form: str, limits: Path | None) -> int:
    from parbench.reports.history.baseline import judge_by_history
    from parbench.reports.limits import check_run
    from parbench.reports.render.show import show_run
    from parbench.reports.run_data import RunData

    data = RunData.load(path)
    code = data.exit_code
    if form != "json":
        code = show_run(data, judge_by_history(data), form=form)
    return code if limits is None else check_run(data, limits, code)


def _render(document: "Document", form: str) -> bytes:
    from parbench.reports.render.show import render_report
    from parbench.reports.report import make_report_of_document

    return render_report(make_report_of_document(document), form)


def _write_figures(document: "Document", folder: Path, formats: Sequence[str]) -> None:
    from parbench.reports.render.show import write_figures
    from parbench.reports.report import make_report_of_document

    write_figures(make_report_of_document(document), folder, formats)


def _report(runs: Sequence[Path], output: Path) -> None:
    from parbench.reports.render.show import write_report

    write_report(runs, output)


HOOKS = AppHooks(
    modules=DEFINITIONS,
    show_run=_show,
    write_report=_report,
    render_document=_render,
    write_figures=_write_figures,
)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "PARBENCH",
        "obj": HOOKS,
    },
)
@click.version_option(package_name="parbench", prog_name="parbench", allow_from_autoenv=False)
@click.option(
    "--color/--no-color", default=None, help="Color the output. Default: only in a terminal."
)
@click.pass_context
def main(ctx: click.Context, color: bool | None) -> None:
    """Measure how this machine communicates, and what that costs a training step."""
    if color is not None:
        os.environ["NO_COLOR"] = "" if color else "1"
        os.environ["FORCE_COLOR"] = "1" if color else ""
    ctx.default_map = read_defaults(ctx)
    if ctx.invoked_subcommand is None:
        click.echo(_FIRST)
